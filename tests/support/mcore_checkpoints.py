"""Checkpoints of this package that hold a HuggingFace model, made without megatron."""

from __future__ import annotations

from pathlib import Path

import torch

from mcore_ckpt.models.architecture import HfModel, read_config
from mcore_ckpt.models.reconcile import with_mtp_of
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.sharding.cuts import Cut
from mcore_ckpt.sharding.synonyms import synonyms
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows
from tests.support.global_tensors import to_mcore
from tests.support.small_model import make, resharded

PADDING = 5
"""Rows behind the vocabulary, and what they hold: it must not get into any file."""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a HuggingFace folder, read by the safetensors library."""
    from safetensors import safe_open

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    return found


def model_of(folder: Path) -> HfModel:
    return with_mtp_of(model_from_config(read_config(folder)), weights(folder))


def mcore_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The global tensors that a HuggingFace folder's model has in megatron."""
    return to_mcore(model_of(folder), weights(folder))


def pad_vocabulary(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if has_vocabulary_rows(name)]:
        if tensors[name].shape[0] > 1:
            rows = torch.full((PADDING, *tensors[name].shape[1:]), 7.0, dtype=tensors[name].dtype)
            tensors[name] = torch.cat([tensors[name], rows])


def as_transformer_engine(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors under the names of transformer-engine's layer specs."""
    return {[*synonyms(name)][-1 if "local_experts" in name else 0]: tensor for name, tensor in tensors.items()}


def make_checkpoint(root: Path, folder: Path, saved_tp: int = 1, **sizes: int) -> Path:
    """A committed checkpoint of the folder's model: its role folder.

    Its vocabulary is padded.

    Args:
        saved_tp: of how many tensor-parallel ranks it is written.
        sizes: to what layout it is resharded then.
    """
    tensors = mcore_tensors(folder)
    pad_vocabulary(tensors)
    value_head = {name: Cut(None) for name in ("output_layer.weight",) if name in tensors and len(tensors[name]) == 1}
    role = make(root / "first", tensors, tp=saved_tp, cuts=value_head, config=(folder / "config.json").read_bytes())
    return resharded(role, root / "second", **sizes) if sizes else role
