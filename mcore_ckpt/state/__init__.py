"""Turns a trainer's objects (model, optimizer, random state, scheduler) into named shards, and back.

Integrations use the public names: `to_stored` converts a trainer's values to values that are safe to open,
`from_stored` converts them back to the original values, `read_rng` and `write_rng` read and set this rank's random
number generators, and `optimizer_parts` finds the optimizers in a chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.state.model import process_groups_of
    from mcore_ckpt.state.optimizers.chain import optimizer_parts
    from mcore_ckpt.state.rng import read_rng, write_rng
    from mcore_ckpt.state.typed_values import from_stored, to_stored

__all__ = ["from_stored", "optimizer_parts", "process_groups_of", "read_rng", "to_stored", "write_rng"]

__getattr__ = lazy_names(
    __name__,
    {
        "model": ("process_groups_of",),
        "optimizers.chain": ("optimizer_parts",),
        "rng": ("read_rng", "write_rng"),
        "typed_values": ("from_stored", "to_stored"),
    },
)
