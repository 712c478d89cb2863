"""Reads our options from a framework's configuration, and its words for how many checkpoints stay."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import Field, fields
from typing import Any

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError


def own_fields(said_elsewhere: Collection[str]) -> list[Field[Any]]:
    """Returns the fields of CheckpointConfig for which a framework has no words of its own."""
    return [field for field in fields(CheckpointConfig) if field.name not in said_elsewhere]


def own_config(given: Mapping[str, Any], said_elsewhere: Collection[str], where: str) -> CheckpointConfig:
    """Returns the configuration that a mapping of our options describes.

    Args:
        given: the options by name. A list stands for a tuple, because YAML has no tuples.
        said_elsewhere: the options for which the framework has words of its own.
        where: what the mapping is called there, for messages.

    Raises InvalidArgumentError: an option is unknown or said elsewhere, or a value is not allowed.
    """
    known = {field.name for field in own_fields(said_elsewhere)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise InvalidArgumentError(
            f"{where} has unknown options ({', '.join(map(repr, unknown))}): the known ones are "
            f"{', '.join(sorted(known))}"
        )
    return CheckpointConfig(**{name: _frozen(value) for name, value in given.items()})


def kept_count(count: int | None) -> int | None:
    """Returns how many checkpoints stay; None for all of them, where a framework says None, 0 or -1."""
    return count if count is not None and count > 0 else None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
