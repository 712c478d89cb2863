"""Maintains folders of steps: removes leftovers, collects checkpoints of nodes, makes forks, measures saves."""

__all__ = ["bench", "branch", "collect", "prune"]
