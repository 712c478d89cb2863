"""Stands in for the classes of Megatron-Energon's loader state, with the fields that they have in 7.4.1."""

from __future__ import annotations

import sys
from dataclasses import make_dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

FIELDS = {
    "megatron.energon.savable_loader": {
        "SavableDataLoaderState": ("worker_states", "next_worker_id", "micro_batch_size"),
        "SavableDatasetCheckpoint": ("state", "offset"),
        "SavableDatasetState": ("rng", "dataset_state", "sample_index"),
    },
    "megatron.energon.rng": {"SystemRngState": ("torch", "numpy", "random")},
    "megatron.energon.flavors.webdataset.sample_loader": {"SliceState": ("index", "current")},
}
PACKAGES = ("megatron.energon", "megatron.energon.flavors", "megatron.energon.flavors.webdataset")


def energon_classes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Makes the classes importable until the test ends. Returns them by name."""
    found: dict[str, Any] = {"FlexState": type("FlexState", (dict,), {"__module__": "megatron.energon.state"})}
    modules = {name: ModuleType(name) for name in (*PACKAGES, "megatron.energon.state", *FIELDS)}
    for name, module in modules.items():
        for cls, fields in FIELDS.get(name, {}).items():
            found[cls] = make_dataclass(cls, fields, kw_only=True, slots=True)
            found[cls].__module__ = name
            setattr(module, cls, found[cls])
        monkeypatch.setitem(sys.modules, name, module)
    modules["megatron.energon.state"].FlexState = found["FlexState"]  # type: ignore[attr-defined]
    return found


def state_of_rank(classes: dict[str, Any], rank: int, workers: int) -> Any:
    """What `save_state_rank` returns for a loader with so many workers; 0: one that reads in the trainer's process."""

    def worker(number: int) -> Any:
        slices = [classes["SliceState"](index=number, current=10 * rank), None]
        inner = classes["FlexState"]({"__class__": "Blend", 3: b"\x01", "slices": slices})
        rng = classes["SystemRngState"](torch=torch.arange(4), numpy=("MT19937", 7), random=(3, (1, 2), None))
        state = classes["SavableDatasetState"](
            rng=rng, dataset_state=classes["FlexState"](inner=inner), sample_index=number
        )
        return classes["SavableDatasetCheckpoint"](state=state, offset=rank) if workers else inner

    states = [worker(number) for number in range(workers or 1)]
    return classes["SavableDataLoaderState"](worker_states=states, next_worker_id=0, micro_batch_size=2)
