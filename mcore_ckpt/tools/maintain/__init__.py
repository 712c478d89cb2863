"""Maintains folders of steps: deletes old steps, collects checkpoints of nodes, makes forks, measures saves."""

__all__ = ["bench", "branch", "collect", "prune"]
