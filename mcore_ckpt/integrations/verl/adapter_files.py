"""Loads the adapters that verl 0.7 writes into one file per rank, next to the optimizer's `torch_dist` shards.

verl 0.8 and newer have adapters in `torch_dist` shards, which do not need this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats import load_safely
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.ranks import read_topology
from mcore_ckpt.state import process_groups_of


def load_adapter_files(manager: CheckpointManager, chunks: Sequence[Any], optimizer: Any, folder: Path) -> None:
    """Fills the model's adapters from verl's files, under the layout that they were saved with. Every rank calls it.

    Args:
        manager: connects the ranks.
        chunks: the model.
        optimizer: the optimizer whose main parameters are set from the adapters; None to leave them.
        folder: `adapter_checkpoint` of verl's checkpoint.

    Raises:
        CheckpointMismatchError: a file does not fit the model. Nothing has changed.
        CheckpointCorruptError: a file is missing or damaged. Nothing has changed.
        UnsupportedError: the model has virtual stages.
    """
    read: list[dict[torch.Tensor, torch.Tensor]] = []

    def request() -> dict[str, Any]:
        if len(chunks) > 1:
            raise UnsupportedError(
                f"{folder}: verl 0.7 saves only the first virtual stage's adapters (`save_adapter_checkpoint`), so "
                "those of the others are lost: load a checkpoint without virtual stages"
            )
        read.append(_read(chunks[0], folder / f"{_rank_name(chunks)}_adapter.pt"))
        return {"folder": str(folder)}

    manager.agree("reading verl's adapters", request, dict)
    for live, saved in read[0].items():
        live.data.copy_(saved)
    if optimizer is not None:
        optimizer.reload_model_params()


def _read(chunk: Any, file: Path) -> dict[torch.Tensor, torch.Tensor]:
    """Returns the saved tensor of each adapter. The file has the names of the unwrapped model."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    found = load_safely(file, str(file))
    saved = found.get("adapter_state_dict") if isinstance(found, Mapping) else None
    live = {name: parameter for name, parameter in chunk.named_parameters() if parameter.requires_grad}
    if not isinstance(saved, Mapping) or saved.keys() != live.keys():
        names = sorted(map(str, live.keys() ^ (saved.keys() if isinstance(saved, Mapping) else set())))
        raise CheckpointMismatchError(
            f"{file}: the adapters are not what the model trains: only one of the two has {', '.join(names[:3])} (verl "
            "0.7 saves nothing but adapters)"
        )
    for name, tensor in saved.items():
        if not isinstance(tensor, torch.Tensor) or (tensor.shape, tensor.dtype) != (live[name].shape, live[name].dtype):
            raise CheckpointMismatchError(
                f"{file}: tensor {name}: wanted {list(live[name].shape)} {live[name].dtype}, found "
                f"{list(getattr(tensor, 'shape', ()))} {getattr(tensor, 'dtype', type(tensor).__name__)}: load it "
                "under the parallel layout that it was saved with"
            )
    return {live[name]: tensor for name, tensor in saved.items()}


def _rank_name(chunks: Sequence[Any]) -> str:
    """The name of this rank's file in verl 0.7 (`_get_rank_checkpoint_path`)."""
    at, sizes = read_topology(process_groups_of(chunks))
    stage, experts = f"_{at.pp:03d}" if sizes.pp > 1 else "", f"_{at.ep:03d}" if sizes.ep > 1 else ""
    return f"mp_rank_{at.tp:02d}{stage}{experts}"
