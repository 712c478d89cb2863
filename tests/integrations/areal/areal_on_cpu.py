"""The real AReaL (1.0.4), without what it serves, schedules and logs with.

Its modules import each other, and with that web servers, Ray and kernels, of which checkpoints need none. While it is
imported, such modules are stood in for by ones that have any name, which is enough for classes to be defined.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typing_extensions

FOLDER = Path(os.environ.get("MCORE_CKPT_AREAL", Path(__file__).parents[3] / ".venv" / "areal"))

_STOOD_IN_FOR = frozenset(
    {
        "PIL",
        "aiofiles",
        "aiohttp",
        "antlr4",
        "awex",
        "datasets",
        "fastapi",
        "flash_attn",
        "flask",
        "httpx",
        "hydra",
        "lark",
        "mbridge",
        "megatron.bridge",
        "numba",
        "omegaconf",
        "openai",
        "orjson",
        "peft",
        "pybase64",
        "ray",
        "requests",
        "sglang",
        "starlette",
        "swanlab",
        "tenacity",
        "tensorboardX",
        "torch_memory_saver",
        "torchdata",
        "torchvision",
        "trackio",
        "triton",
        "uvicorn",
        "uvloop",
        "vllm",
        "wandb",
        "werkzeug",
        "zmq",
    }
)

# With what is imported later, from within functions, of the modules that are used.
MODULES = (
    "areal.engine.megatron_engine",
    "areal.trainer.rl_trainer",
    "areal.trainer.sft_trainer",
    "areal.trainer.rw_trainer",
    "areal.trainer.dpo_trainer",
    "areal.utils.recover",
    "areal.utils.saver",
    "areal.experimental.training_service.controller.controller",
)


class _Anything(type):
    """A class that is what it returns, whatever is asked of it: a base, a decorator, an annotation, an exception."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else cls

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _thing(name: str) -> Any:
    return _Anything(name, (Exception,), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        parts = name.split(".")
        if not any(".".join(parts[:count]) in _STOOD_IN_FOR for count in (1, 2)) or not _is_asked_by_areal():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _is_asked_by_areal() -> bool:
    """Torch, megatron and transformers ask what is there, and must not be told of what is not."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib", __name__)):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("areal.")


def import_areal() -> None:
    """From here on `import areal...` finds the real modules. For processes of their own.

    A process that this one spawns begins with this one's path, and may have emerging-optimizers on it (emerging.py).
    """
    typing.override = typing_extensions.override  # type: ignore[attr-defined, unused-ignore]
    sys.path.append(str(FOLDER))
    finder = _Finder()
    sys.meta_path.append(finder)  # behind all others: what is installed is taken
    for name in MODULES:
        importlib.import_module(name)
    sys.meta_path.remove(finder)
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
        del sys.modules[name]
    # AReaL configures the root logger, and disables those that are there (areal.utils.logging).
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.disabled = False
