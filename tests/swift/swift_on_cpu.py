"""Runs ms-swift's real Megatron trainers on a machine without CUDA: what is missing there is stood in for, or mapped.

Pipeline, arguments, trainers, callbacks, schedules, saves and loads are ms-swift's (4.6.0). The model, its bridge and
its adapters are mcore-bridge's (1.6.5), and the rest is Megatron's. Stood in for are transformer-engine
(transformer_engine_on_cpu.py), the packages that read data sets, and packages that no test comes near.
"""

import contextlib
import importlib
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.support.simulated_device import simulated_device
from tests.swift import transformer_engine_on_cpu
from tests.verl import absent

# datasets (with pandas and pyarrow) is a quarter of a gigabyte; the others have no part in a checkpoint.
_ABSENT = (
    *("PIL", "aiohttp", "dacite", "datasets", "json_repair", "modelscope", "msgspec", "pandas", "tensorboard"),
    "trl",
)

VOCABULARY = 132
ROWS = 64


class Rows(Dataset):
    """Takes the place of ms-swift's data set: rows as its template encodes them."""

    def __init__(self, are_pairs: bool = False) -> None:
        self._are_pairs = are_pairs
        draw = random.Random(3)
        self._rows = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(8, 16))] for _ in range(ROWS)]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, other = (self._encoded(at) for at in (index, -index))
        if not self._are_pairs:
            return row
        kinds = (("chosen", row), ("rejected", other))
        return {f"{kind}_{name}": value for kind, one in kinds for name, value in one.items()}

    def _encoded(self, index: int) -> dict[str, Any]:
        ids = self._rows[index]
        return {"input_ids": ids, "labels": [-100, -100, *ids[2:]], "length": len(ids)}


def stand_in() -> None:
    """Makes the packages importable that are not installed. Call it before ms-swift is imported."""
    transformer_engine_on_cpu.install()
    absent.stand_in(_ABSENT)
    # ms-swift formats this logger's first handler, and joins names to this folder, while it is imported.
    logs = logging.getLogger("modelscope")
    logs.addHandler(logging.NullHandler())
    _set("modelscope.utils.logger", get_logger=lambda *args, **kwargs: logs)
    _set("modelscope.hub.utils.utils", get_cache_dir=lambda *args, **kwargs: "/nonexistent")
    _set("modelscope.utils.config_ds", MS_CACHE_HOME="/nonexistent")
    # ms-swift has trainers of its own, and takes the constructors off those of trl that they derive from.
    trainers = {name: type(name, (), {"__init__": None}) for name in ("DPOTrainer", "GRPOTrainer")}
    _set("trl", __version__="0.20.0", **trainers)


def _set(module: str, **members: Any) -> None:
    vars(importlib.import_module(module)).update(members)


def enable() -> None:
    """Maps CUDA's uses to the CPU for the rest of the process. Call it before the first pipeline is made."""
    from swift.megatron.callbacks import megatron_callbacks_map
    from swift.megatron.callbacks.base import MegatronCallback
    from swift.megatron.pipelines.train import sft
    from swift.pipelines import SwiftSft

    from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu

    enable_cpu()
    for name in ("max_memory_reserved", "memory_reserved", "memory_allocated"):
        setattr(torch.cuda, name, lambda *device: 0)
    megatron_callbacks_map["tensorboard"] = MegatronCallback  # does nothing
    sft.plot_images = lambda *args: None  # matplotlib's, of what tensorboard has
    torch.Tensor.to = _by_name(torch.Tensor.to)  # type: ignore[method-assign]
    SwiftSft._prepare_dataset = lambda self: [Rows(self.template.mode == "rlhf")] * 2


@contextlib.contextmanager
def offloading() -> Iterator[None]:
    """What `optimizer_cpu_offload` needs that no CPU has."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    called: set[str] = set()
    # What saves and loads is to see tensors as they are.
    for name in ("__init__", "step"):
        setattr(HybridDeviceOptimizer, name, _on_device(getattr(HybridDeviceOptimizer, name), called))
    yield
    assert called == {"__init__", "step"}


def _on_device(method: Callable[..., Any], called: set[str]) -> Callable[..., Any]:
    def on_device(*args: Any, **kwargs: Any) -> Any:
        called.add(method.__name__)
        with simulated_device():
            return method(*args, **kwargs)

    return on_device


def _by_name(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a `Tensor.to` to which "cuda" is the CPU also where it is the first argument (mcore-bridge's bridge)."""
    return lambda tensor, *args, **kwargs: to(tensor, *("cpu" if arg == "cuda" else arg for arg in args), **kwargs)
