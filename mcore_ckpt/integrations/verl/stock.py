"""Checkpoints of verl's own manager whose weights are a HuggingFace model, as they are unless it was told otherwise."""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt.formats import TorchDistFiles, kind_of, torch_dist_folders

# `get_hf_model_checkpoint_path` of verl 0.9, and of 0.5 to 0.7.
_WEIGHTS = ("model/huggingface", "huggingface")


def huggingface_weights(folder: Path) -> Path | None:
    """The model beside optimizer and random states in megatron's format; None where that has the model, too.

    With a bridge, and `use_dist_checkpointing` off, verl writes no shards of the model; of one with adapters the
    adapters alone.

    Raises CheckpointCorruptError: what lists the shards is damaged.
    """
    if kind_of(folder) != "torch_dist":
        return None
    weights = next((folder / name for name in _WEIGHTS if any((folder / name).glob("*.safetensors"))), None)
    return None if weights is None or _has_model(folder) else weights


def _has_model(folder: Path) -> bool:
    names = TorchDistFiles(folder, torch_dist_folders(folder)).names
    # `optimizer.` and, of several chained ones, `chained_0.optimizer.`
    return not all("optimizer" in name.split(".")[:2] for name in names)
