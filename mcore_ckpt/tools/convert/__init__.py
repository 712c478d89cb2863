"""Converts checkpoints: into another kind of checkpoint, or for another layout.

`walk.py` describes what every conversion does.
"""

__all__ = ["for_trainers", "from_huggingface", "merge", "push_to_hub", "reshard", "to_native", "to_torch_dist"]
