"""Translates verl's checkpoint options into those of a CheckpointConfig.

verl's options are in `actor.checkpoint`, `critic.checkpoint` and, for SFT, `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any

from mcore_ckpt.integrations.kit.options import fast_tier, named_listeners, own_fields

VERLS_OWN = ("save_contents", "load_contents", "async_save", "strict")
# verl passes max_to_keep to each save, and skip_frozen follows from verl's own option for adapters (model.lora).
NOT_OPTIONS = ("max_to_keep", "skip_frozen")


def own_options() -> list[Field[Any]]:
    """Returns the fields of CheckpointConfig that verl's options lack."""
    return own_fields((*VERLS_OWN, *NOT_OPTIONS))


def read_options(options: Any) -> dict[str, Any]:
    """Returns the options that are set, by name.

    Args:
        options: a DictConfig, verl's or our dataclass, a dict, or any object that has options as attributes. None has
            no options.
    """
    found = {}
    for name in (*VERLS_OWN, *(field.name for field in own_options())):
        value = options.get(name) if isinstance(options, Mapping) else getattr(options, name, None)
        if value is not None:
            found[name] = value if isinstance(value, (str, int, float)) or name == "fast" else tuple(value)
    if "listeners" in found:
        found["listeners"] = named_listeners(found["listeners"], "verl's checkpoint options")
    if "fast" in found:
        found["fast"] = fast_tier(found["fast"], "verl's checkpoint options")
    return found
