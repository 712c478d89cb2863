"""Computes which part of which global tensor a local tensor holds, without I/O, torch or megatron.

Public names, for integrations and commands: `compiled` checks and compiles the regular expressions that choose tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.sharding.patterns import compiled

__all__ = ["compiled"]

__getattr__ = lazy_names(__name__, {"patterns": ("compiled",)})
