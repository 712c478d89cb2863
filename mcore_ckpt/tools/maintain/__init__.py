"""Keeps folders of steps: removes leftovers, collects what lies on nodes, and measures how fast saves can be."""

__all__ = ["bench", "collect", "prune"]
