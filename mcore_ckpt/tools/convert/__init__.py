"""Writes a checkpoint of one kind from a checkpoint of another kind, or of another layout.

All of it goes one way: `walk.py`.
"""

__all__ = ["for_trainers", "from_huggingface", "merge", "push_to_hub", "reshard", "to_native", "to_torch_dist"]
