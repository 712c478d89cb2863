"""Lets a package import its public names when they are first asked for (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package that imports each public name from its module on first use.

    Python runs a package's `__init__.py` before any module in it. If that file imported torch, which takes seconds,
    `mcore-ckpt --help` would wait for it.

    Args:
        package: the package's `__name__`.
        modules: for each module of the package, relative to it, the public names that it defines.

    Example:
        >>> __getattr__ = lazy_names("mcore_ckpt.steps", {"pins": ("pin", "unpin")})
        >>> __getattr__("pin").__name__
        'pin'
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)  # Python finds it there the next time, without this call
        return value

    return find
