"""Checkpoints that a load may take: of the local root and of the remote one together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from mcore_ckpt import layout
from mcore_ckpt.errors import RemoteError
from mcore_ckpt.session import Session
from mcore_ckpt.storage.agreement import Record
from mcore_ckpt.storage.folder import Folder, LocalFolder
from mcore_ckpt.storage.remote import RemoteStep
from mcore_ckpt.storage.remote_folder import RemoteFolder
from mcore_ckpt.storage.steps import StepStatus

logger = logging.getLogger(__name__)


def remote_steps(session: Session, step: int | None, required: bool) -> list[RemoteStep]:
    """The steps in the remote store, the oldest first; none where there is no store.

    Args:
        session: this rank's trainer.
        step: only this one; None for all.
        required: nothing can be loaded from elsewhere.

    Raises:
        RemoteError: the store does not answer, and is required: there may be checkpoints in it, so starting anew would
            be wrong.
    """
    if session.remote is None:
        return []
    try:
        return session.remote.steps() if step is None else [session.remote.step(step)]
    except RemoteError as error:
        if required:
            raise RemoteError(
                f"{error}; nothing to load in {session.root}, so it must be known what is there"
            ) from None
        logger.warning("taking local checkpoints only, there may be newer ones: %s", error)
        return []


def newest_first(role: str, local: Sequence[StepStatus], remote: Sequence[RemoteStep]) -> list[Record]:
    """All checkpoints of a role that count, as plain values; of the same step, the local one comes first.

    Args:
        role: whose.
        local: steps that are complete and have the role.
        remote: all steps in the store.
    """
    here = [local_candidate(status.step, status.role_dir(role)) for status in local]
    there = [
        {"step": step.step, "folder": layout.remote_dir(step.step, role, step.found[role].attempt), "remote": True}
        for step in remote
        if step.is_complete and role in step.found
    ]
    return sorted([*here, *there], key=lambda candidate: -candidate["step"])


def local_candidate(step: int, role_dir: Path) -> Record:
    return {"step": step, "folder": str(role_dir), "remote": False}


def folder_of(session: Session, candidate: Record) -> Folder:
    """Where this rank reads a candidate that rank 0 has named."""
    if not candidate["remote"]:
        return LocalFolder(Path(candidate["folder"]))
    assert session.remote is not None, "all ranks have the same config"
    return RemoteFolder(session.remote, candidate["folder"])
