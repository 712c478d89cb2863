"""Finds the parts of a checkpoint that verl's own manager keeps outside of its `torch_dist` shards.

These are the HuggingFace weights, which it writes by default, and the adapters of verl 0.7.
"""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt.formats import TorchDistFiles, kind_of, torch_dist_folders

# The folder that `get_hf_model_checkpoint_path` returns in verl 0.9, and the one in 0.5 to 0.8.
_WEIGHTS = ("model/huggingface", "huggingface")
# verl 0.7 (`save_adapter_checkpoint`). 0.8 and newer have adapters in `torch_dist` shards.
_ADAPTERS = "adapter_checkpoint"


def huggingface_weights(folder: Path) -> Path | None:
    """Returns the folder of the HuggingFace weights; None if there is none, or if `torch_dist` shards hold the model.

    With a bridge and without `use_dist_checkpointing`, verl writes no shards of the model. For a model with adapters it
    writes only shards of the adapters.

    Raises CheckpointCorruptError: the list of shards is damaged.
    """
    if kind_of(folder) != "torch_dist":
        return None
    weights = next((folder / name for name in _WEIGHTS if any((folder / name).glob("*.safetensors"))), None)
    return None if weights is None or _has_model(folder) else weights


def adapter_folder(folder: Path) -> Path | None:
    """Returns the folder of the files with each rank's adapters; None if there is none."""
    files = folder / _ADAPTERS
    return files if kind_of(folder) == "torch_dist" and files.is_dir() else None


def _has_model(folder: Path) -> bool:
    names = TorchDistFiles(folder, torch_dist_folders(folder)).names
    # Names of optimizer state begin with `optimizer.`, or with `chained_0.optimizer.` in a chained optimizer.
    return not all("optimizer" in name.split(".")[:2] for name in names)
