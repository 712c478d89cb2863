"""Stands in for packages that verl, or SkyRL, imports and no test comes near.

verl imports them at the top of modules that engines and workers need something else from: ray in `verl.protocol`,
datasets and pandas in `verl.utils.dataset`, flash_attn in `verl.workers.roles` (0.6). Real, they are half a gigabyte
and seconds of every start.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

ABSENT = (
    *("PIL", "datasets", "pandas", "flash_attn", "ray", "uvicorn", "fastapi", "zmq", "aiohttp", "starlette"),
    "transfer_queue",
)


class _Anything(type):
    """A class whose every member is another one: verl decorates with them, derives from them, annotates with them."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # A decorator gives back what it decorates.
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else super().__call__()


def _anything(name: str) -> Any:
    # A decorator with arguments: what it returns gives back what it decorates.
    return _Anything(name, (), {"__call__": lambda decorator, decorated: decorated})


class _Module(types.ModuleType):
    """A module that has whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _anything(name)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if any(name == each or name.startswith(f"{each}.") for each in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(names: Sequence[str] = ABSENT) -> None:
    """Make each of the packages importable where it is not installed. Call before verl is imported."""
    sys.meta_path.append(_Finder(names))
