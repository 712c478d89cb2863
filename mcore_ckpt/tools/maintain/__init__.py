"""Maintains folders of steps: removes leftovers, collects checkpoints of nodes, measures how fast saves can be."""

__all__ = ["bench", "collect", "prune"]
