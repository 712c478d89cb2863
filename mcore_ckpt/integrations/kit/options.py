"""Refuses options that a framework cannot honour, and reads how many checkpoints a framework keeps."""

from __future__ import annotations

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import UnsupportedError


def refuse_fast(config: CheckpointConfig, where: str, why: str) -> None:
    """Raises UnsupportedError if a configuration has a fast tier, from which a framework would not resume.

    `where` names the configuration, and `why` says why the framework needs all steps in a shared folder.
    """
    if config.fast is not None:
        raise UnsupportedError(
            f"{where} has a fast tier, but {why}: leave fast out, and save to a folder that all nodes share"
        )


def refuse_skip(config: CheckpointConfig, where: str, why: str) -> None:
    """Raises UnsupportedError if saves may be skipped, although the framework counts on each save.

    `where` names the configuration, and `why` says what the framework does after each save.
    """
    if config.if_busy == "skip":
        raise UnsupportedError(f"{where} has if_busy='skip', but {why}: leave if_busy out, or use 'wait' or 'raise'")


def kept_count(count: int | None) -> int | None:
    """Returns how many checkpoints stay; None for all of them. Frameworks say None, 0 or -1 for all."""
    return count if count is not None and count > 0 else None
