"""Undoes an earlier save of a step whose driver commits a role of plain files, before the step is saved again."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from mcore_ckpt.steps import check_own_step, uncommit_role


def uncommit_earlier_save(step_path: Path, role: str, driver_role: str) -> None:
    """Undoes an earlier save of a step, before a role of this step is saved again.

    A step is saved again after a rollback, or after a crash that left it incomplete. Without this function the step
    would be complete as soon as it has all roles, although these come from different saves. An earlier save of
    `role` is undone, too, because a new async save of `role` may commit after the driver. The driver's role is removed
    first, because it is saved again last.

    The caller holds the lock of `role`, so that a second trainer does not undo what the first one has saved.

    Raises CommitError if the step belongs to another run, and OSError.
    """
    if step_path.is_dir():
        check_own_step(step_path)
    for folder in (step_path / driver_role, step_path / role):
        uncommit_role(folder)
    with suppress(FileNotFoundError):
        shutil.rmtree(step_path / driver_role)
