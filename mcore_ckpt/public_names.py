"""Lets a package import its public names on first use (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package that imports each public name from its module on first use.

    Python runs a package's `__init__.py` before any module in it. If `__init__.py` imported torch, which takes seconds,
    `mcore-ckpt --help` would wait for the import.

    Args:
        package: the package's `__name__`.
        modules: the public names that each module defines. The keys are module names relative to the package.

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
        setattr(sys.modules[package], name, value)  # from now on Python finds the name without calling `__getattr__`
        return value

    return find
