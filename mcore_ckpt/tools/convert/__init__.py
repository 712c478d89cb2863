"""Writes a checkpoint of one kind from a checkpoint of another kind, or of another layout.

All conversions take the steps in `walk.py`.
"""

__all__ = ["for_trainers", "from_huggingface", "merge", "push_to_hub", "reshard", "to_native", "to_torch_dist"]
