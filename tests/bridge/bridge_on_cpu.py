"""Megatron-Bridge's real `pretrain()` without CUDA: what cannot be had then is mapped here and nowhere else.

Bridge's configuration, setup, training loop, mock data and checkpointing are its own (seen with megatron-bridge 0.6.2,
megatron-core 0.19.2 and Python 3.11), and so are megatron's model, optimizer and schedules. Mapped are the device, for
megatron as in the demo, and packages that Bridge imports and no test comes near.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typing_extensions

from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu

BRIDGE = Path(os.environ.get("MCORE_CKPT_BRIDGE", Path(__file__).parents[2] / ".venv" / "bridge"))

# Modules that Bridge imports without asking whether they are there. Real, they are gigabytes, or for CUDA alone.
# nvidia_resiliency_ext has nothing else, so that megatron sees that its asynchronous saves are not there.
_ABSENT = (
    *("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess"),
    *("modelopt", "modelopt.torch", "modelopt.torch.distill", "modelopt.torch.distill.plugins"),
    *("modelopt.torch.distill.plugins.megatron", "modelopt.torch.opt", "modelopt.torch.opt.plugins"),
    *("modelopt.torch.quantization", "modelopt.torch.quantization.utils"),  # in 0.4 and 0.5
    *("megatron.energon", "datasets", "PIL", "torch.utils.tensorboard", "torch.utils.tensorboard.writer"),
)
# Bridge calls these without asking. They are for distilled and quantized models alone.
_MODELOPT = {
    "modelopt.torch.distill.plugins.megatron": ("get_tensor_shapes_adjust_fn_for_distillation",),
    "modelopt.torch.quantization.utils": ("is_quantized",),
    "modelopt.torch.opt.plugins": ("restore_modelopt_state", "save_modelopt_state", "save_sharded_modelopt_state"),
}


class _Absent(types.ModuleType):
    """A module that has a class of whatever name it is asked for: Bridge derives from them and annotates with them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {})
        setattr(self, name, found)
        return found


def import_bridge() -> None:
    """Imports Bridge's training. Call it once in a process, before anything else imports Bridge."""
    typing.override = typing_extensions.override  # type: ignore[attr-defined]  # Bridge and megatron want Python 3.12
    # Before the stand-in for transformer-engine is there, which megatron would take for the real one.
    importlib.import_module("megatron.core.extensions.transformer_engine")
    for name in _ABSENT:
        _add(name, _Absent(name))
    for name, functions in _MODELOPT.items():
        vars(sys.modules[name]).update(dict.fromkeys(functions, _nothing))
    # Its own __init__ imports diffusion models, whose package needs others.
    package = _add("megatron.bridge", types.ModuleType("megatron.bridge"))
    package.__path__ = [str(BRIDGE / "megatron" / "bridge")]
    _import_adapters()
    for module in ("models", "training.pretrain", "training.gpt_step", "peft.lora"):
        importlib.import_module(f"megatron.bridge.{module}")
    # Without transformer-engine, megatron has None in place of its layers, which these modules take for classes.
    for module in ("utils", "module_matcher"):
        names = vars(sys.modules[f"megatron.bridge.peft.{module}"])
        names.update({name: False for name in names if name.startswith("HAVE_TE")})


def enable() -> None:
    """Maps the device for the rest of the process."""
    enable_cpu()
    from megatron.bridge.training import initialize, setup
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    torch.cuda.device_count = lambda: 1  # _set_random_seed seeds megatron's generators only where there is one
    torch.cuda.set_device = _nothing
    torch.cuda.memory_stats = lambda *device: {}
    real = setup.initialize_megatron
    setup.initialize_megatron = lambda **words: real(**words, allow_no_cuda=True)
    # The wheel has the library already.
    initialize.compile_helpers = _nothing
    MockGPTLowLevelDataset.size = 1000  # indices of 100,000 sequences take seconds
    setup.setup_data_iterators = _with_own_generator(setup.setup_data_iterators)


def _with_own_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    """An iterator begins by drawing a number, on a CPU from the generator that the dropout has, too."""

    def with_own_generator(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return function(*args, **kwargs)

    return with_own_generator


def _import_adapters() -> None:
    """Imports the modules that need transformer-engine for its fused layers, which are not used here."""
    for name in ("utils", "module_matcher", "base"):  # which would take the stand-in for the real one
        importlib.import_module(f"megatron.bridge.peft.{name}")
    names = ("transformer_engine", "transformer_engine.pytorch")
    for name in names:
        _add(name, _Absent(name))
    vars(sys.modules[names[-1]])["ops"] = types.SimpleNamespace(Sequential=object)
    importlib.import_module("megatron.bridge.peft.lora")
    for name in names:
        del sys.modules[name]


def _add(name: str, module: types.ModuleType) -> types.ModuleType:
    sys.modules[name] = module
    module.__path__ = []
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(importlib.import_module(parent), child, module)
    return module


def _nothing(*args: Any, **kwargs: Any) -> None: ...


__all__: Sequence[str] = ("BRIDGE", "enable", "import_bridge")
