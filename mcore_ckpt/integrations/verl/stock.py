"""Checkpoints of verl's own manager whose weights are a HuggingFace model, as they are unless it was told otherwise."""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt.foreign import kinds

# verl's layout 2 (0.8 and 0.9): `get_hf_model_checkpoint_path`, `get_model_dist_checkpoint_path`.
_WEIGHTS = "model/huggingface"
_SHARDS = "model/dist_ckpt"


def huggingface_weights(folder: Path) -> Path | None:
    """The model beside optimizer and random states in megatron's format; None where the model is there too.

    With `use_dist_checkpointing` off verl writes no shards of the model, and of one with adapters the adapters alone.
    """
    weights = folder / _WEIGHTS
    # Empty it is made in any case (`get_model_dist_checkpoint_path`).
    has_shards = any((folder / _SHARDS).glob("*"))
    is_stock = kinds.kind_of(folder) == "torch_dist" and not has_shards
    return weights if is_stock and any(weights.glob("*.safetensors")) else None
