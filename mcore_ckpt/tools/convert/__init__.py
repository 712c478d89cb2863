"""Converts checkpoints: into another kind of checkpoint, or for another layout.

All conversions take the steps in `walk.py`.
"""

__all__ = ["for_trainers", "from_huggingface", "merge", "push_to_hub", "reshard", "to_native", "to_torch_dist"]
