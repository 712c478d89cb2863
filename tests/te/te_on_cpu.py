"""Build transformer-engine modules on a machine without CUDA, from the pure-Python wheel alone.

The modules have their real names, shapes and states; nothing can be run forward. What is missing is the compiled
extension, and transformer-engine (seen with 2.11.0) asks for it and for triton while it is imported.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch


class _Member(int):
    """A member of an enum of the extension; TE takes its value, compares it, uses it as a key."""

    name: str

    @property
    def value(self) -> int:
        return int(self)


class _AnyClass(type):
    """A class that has every member it is asked for, numbered in the order of asking."""

    def __getattr__(cls, name: str) -> _Member:
        if name.startswith("__"):
            raise AttributeError(name)
        member = _Member(sum(isinstance(value, _Member) for value in vars(cls).values()))
        member.name = name
        setattr(cls, name, member)
        return member


class _AnyModule(types.ModuleType):
    """A module that has every class it is asked for."""

    __all__: tuple[str, ...] = ()  # for TE's `import *`

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _AnyClass(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, found)
        return found


class _Triton(_AnyModule):
    """TE decorates its kernels while it is imported, with and without arguments."""

    __version__ = "3.0.0"
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        return _decorator if name in ("jit", "autotune", "heuristics") else super().__getattr__(name)


def _decorator(*args: Any, **kwargs: Any) -> Any:
    return args[0] if len(args) == 1 and callable(args[0]) else lambda function: function


def import_transformer_engine() -> None:
    """Make `import transformer_engine.pytorch` work. Call it before anything imports megatron."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # transformer_engine.common then loads no library
    package = _without_running_it("transformer_engine")
    package.__dict__["__version__"] = importlib.metadata.version("transformer_engine")
    common = importlib.import_module("transformer_engine.common")
    common.__dict__["load_framework_extension"] = _load_extension
    if importlib.util.find_spec("onnxscript") is None:
        _load("transformer_engine.pytorch.onnx_extensions", _AnyModule)
    # These ask whether there is triton when they are imported, and must not believe the stand-in.
    for module in ("torch._dynamo", "torch._inductor.utils", "torch.utils._triton"):
        importlib.import_module(module)
    with _triton():
        package.__dict__["pytorch"] = importlib.import_module("transformer_engine.pytorch")
    extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    extensions.__dict__["get_cudnn_version"] = lambda: 91900


def _without_running_it(name: str) -> types.ModuleType:
    """A package whose submodules can be imported, its own __init__ left out: that one loads libraries."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not on the path"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    return module


def _load_extension(framework: str) -> None:
    _load(f"transformer_engine_{framework}", _AnyModule)


def _load(name: str, kind: type[types.ModuleType]) -> None:
    sys.modules[name] = kind(name)
    sys.modules[name].__file__ = f"<{name}>"


@contextlib.contextmanager
def _triton() -> Iterator[None]:
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    names = ("triton", "triton.language", "triton.language.core", "triton.language.standard")
    for name in names:
        _load(name, _Triton)
    yield
    for name in names:
        del sys.modules[name]


@contextlib.contextmanager
def cuda_seems_available() -> Iterator[None]:
    """TE asserts it when a module is built; everything else must see the truth."""
    truth = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = truth


def do_without_fla() -> None:
    """Has GatedDeltaNets made without flash-linear-attention, whose kernels need a GPU. They can then not run.

    They ask for the package when they are made, and use it in forward only.
    """
    from megatron.core.ssm import gated_delta_net

    # Since 0.19 the module is a package of two modules.
    for part in ("GatedDeltaNetSubmodules", "GatedDeltaNet"):
        using: Any = sys.modules[getattr(gated_delta_net, part).__module__]
        using.HAVE_FLA, using.chunk_gated_delta_rule = True, _decorator
