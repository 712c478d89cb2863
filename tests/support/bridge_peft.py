"""Megatron-Bridge's adapters (megatron.bridge.peft, 0.6.2), imported on a machine without GPU.

The package's own `__init__` imports every model that it knows, and with them transformer-engine, megatron.training and
much else. Of all that, the adapters use a decorator for messages, and transformer-engine's fused layers, which are not
used here.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

BRIDGE = Path(os.environ.get("MCORE_CKPT_BRIDGE", Path(__file__).parents[2] / ".venv" / "bridge"))


def add_peft_to_path() -> None:
    """HuggingFace's peft and accelerate, which come with what verl needs. Everything else stays what it is."""
    sys.path.append(str(Path(__file__).parents[2] / ".venv" / "verl"))


def import_peft(name: str) -> Any:
    """A module of megatron.bridge.peft: "lora", "canonical_lora" or "dora"."""
    # Before the stand-in for transformer-engine is there, which megatron would take for the real one.
    importlib.import_module("megatron.core.extensions.transformer_engine")
    _package("megatron.bridge", BRIDGE / "megatron" / "bridge")
    for package in ("peft", "utils"):
        _package(f"megatron.bridge.{package}", BRIDGE / "megatron" / "bridge" / package)
    _module("megatron.bridge.utils.common_utils").__dict__["print_rank_0"] = print
    missing = [name for name in ("transformer_engine", "transformer_engine.pytorch") if name not in sys.modules]
    for each in missing:
        _module(each)
    if missing:
        # Annotations of the fused layers name this class.
        sys.modules["transformer_engine.pytorch"].__dict__["ops"] = types.SimpleNamespace(Sequential=object)
    try:
        found = importlib.import_module(f"megatron.bridge.peft.{name}")
        # Without transformer-engine, megatron has None in place of its layers, which these modules take for classes.
        for module in ("utils", "module_matcher") if missing else ():
            names = vars(sys.modules[f"megatron.bridge.peft.{module}"])
            names.update({name: False for name in names if name.startswith("HAVE_TE")})
        return found
    finally:
        for each in missing:
            del sys.modules[each]


def _package(name: str, path: Path) -> None:
    if name not in sys.modules:
        _module(name).__dict__["__path__"] = [str(path)]


def _module(name: str) -> types.ModuleType:
    if name not in sys.modules:
        sys.modules[name] = types.ModuleType(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    return sys.modules[name]
