"""Reads our options from a framework's configuration, and its words for how many checkpoints stay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import Field, fields
from typing import Any

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import UnsupportedError


def own_fields(said_elsewhere: Collection[str]) -> list[Field[Any]]:
    """Returns the fields of CheckpointConfig for which a framework has no options."""
    return [field for field in fields(CheckpointConfig) if field.name not in said_elsewhere]


def refuse_fast(config: CheckpointConfig, where: str, why: str) -> None:
    """Raises UnsupportedError if a configuration has a fast tier, from which a framework would not resume.

    Args:
        config: the configuration.
        where: its name in the framework.
        why: why the framework needs all steps in a shared folder.
    """
    if config.fast is not None:
        raise UnsupportedError(
            f"{where} has a fast tier, but {why}: leave fast out, and save to a folder that all nodes share"
        )


def kept_count(count: int | None) -> int | None:
    """Returns how many checkpoints stay; None for all of them, where a framework says None, 0 or -1."""
    return count if count is not None and count > 0 else None
