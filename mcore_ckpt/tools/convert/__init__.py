"""Converts checkpoints: into another kind of checkpoint, or for another layout.

`walk.py` lists the steps that every conversion takes.
"""

__all__ = ["for_trainers", "from_huggingface", "merge", "push_to_hub", "reshard", "to_native", "to_torch_dist"]
