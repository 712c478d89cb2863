"""Turns a trainer's objects (model, optimizer, random state, scheduler) into named shards, and back.

Integrations use the public names: `to_plain` copies small state into plain values, and `read_rng` and `write_rng` read
and set this rank's random number generators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.state.model import process_groups_of
    from mcore_ckpt.state.plain import to_plain
    from mcore_ckpt.state.rng import read_rng, write_rng

__all__ = [
    "process_groups_of",
    "read_rng",
    "to_plain",
    "write_rng",
]

__getattr__ = lazy_names(
    __name__,
    {
        "model": ("process_groups_of",),
        "plain": ("to_plain",),
        "rng": ("read_rng", "write_rng"),
    },
)
