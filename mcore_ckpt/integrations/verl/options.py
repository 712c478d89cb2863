"""verl's checkpoint options (`actor.checkpoint`, `critic.checkpoint`, of SFT `checkpoint`) as a CheckpointConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from mcore_ckpt.config import CheckpointConfig

VERLS_OWN = ("save_contents", "load_contents", "async_save", "strict")
# The number comes with each save, and adapters are verl's own option (model.lora).
NOT_OPTIONS = ("max_to_keep", "skip_frozen")


def own_options() -> list[Field[Any]]:
    """The fields of CheckpointConfig that verl's options lack."""
    return [field for field in fields(CheckpointConfig) if field.name not in (*VERLS_OWN, *NOT_OPTIONS)]


def read_options(options: Any) -> dict[str, Any]:
    """What is set in a DictConfig, a dataclass of verl's or of ours, a dict or any object; None for verl's defaults."""
    found = {}
    for name in (*VERLS_OWN, *(field.name for field in own_options())):
        value = options.get(name) if isinstance(options, Mapping) else getattr(options, name, None)
        if value is not None:
            found[name] = value if isinstance(value, (str, int, float)) else tuple(value)
    return found
