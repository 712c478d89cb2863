"""A checkpoint of ROLL is one unit: the clusters' parts, and the driver's, which is committed last.

`checkpoint-{N}` counts when all have committed. What the driver writes beside the weights is the data position
(`worker_state_pipeline.json`: step, metrics, the state of the prompts' schedulers): weights of one step with that of
another would train on some prompts twice, or on others never.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mcore_ckpt.checkpoint import TRACKER_FILE, find_damage, parse_step
from mcore_ckpt.errors import CheckpointNotFoundError
from mcore_ckpt.integrations.roll.options import PIPELINE_ROLE, step_of
from mcore_ckpt.ranks import single_process_agreement
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.steps import (
    RoleWriter,
    StepStatus,
    commit_role,
    list_steps,
    move_tracker,
    remove_leftovers,
    roles_begun,
    step_status,
    uncommit_role,
)

logger = logging.getLogger(__name__)


def commit_pipeline(root: Path, ckpt_id: str, source: Path, roles: Sequence[str] | None, timeout_s: float) -> None:
    """Puts the driver's files into `<root>/<ckpt_id>/pipeline`, all or none, and moves the tracker if that completes
    the step.

    Args:
        root: the folder of all steps.
        ckpt_id: `checkpoint-{N}`.
        source: the folder that has the files.
        roles: of which the step is made, beside the driver's; None: those that have committed to it, or are about to.
        timeout_s: see CheckpointConfig.

    Raises:
        CommitError: an OSError on the way; nothing has been put in place.
    """
    step_path, step = root / ckpt_id, step_of(ckpt_id)

    def copy_files(files: RoleWriter) -> None:
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            files.write(path.relative_to(source).as_posix(), path.read_bytes())

    def roles_of_step() -> Sequence[str]:
        return sorted(roles_begun(step_path) - {PIPELINE_ROLE}) if roles is None else roles

    commit_role(
        # The driver is one process without a process group. The clusters' own trainers hold their locks.
        single_process_agreement(PIPELINE_ROLE, timeout_s),
        step_path / PIPELINE_ROLE,
        step,
        roles_of_step,
        copy_files,
        before=lambda: remove_leftovers(root, PIPELINE_ROLE, alone=True),
        after=lambda: move_tracker(root, step),
    )


def give_up(step_path: Path, role: str) -> None:
    """Before a role is saved to a step again (after a rollback, or a crash before the step was complete).

    A step of parts that were saved at different times would be complete, and none that ever was. So what is there goes
    first, the driver's part before all, which is the last to come again.

    Raises OSError.
    """
    for folder in (step_path / PIPELINE_ROLE, step_path / role):
        uncommit_role(folder)
    with suppress(FileNotFoundError):
        shutil.rmtree(step_path / PIPELINE_ROLE)


def newest_valid(root: Path, verify: bool) -> Path | None:
    """The newest `checkpoint-{N}` that is complete and whose files are all there; None if there never was any.

    Args:
        root: the folder of all steps.
        verify: read all files, and compare them with their CRCs. Without it their sizes are looked at; a load compares
            all that it reads in any case.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but none of them is complete and valid.
    """
    if _first_was_interrupted(root):
        logger.warning("%s: the first checkpoint was never complete: training starts from the beginning", root)
        return None
    reasons = []
    for status in resumable_steps(root, (PIPELINE_ROLE,)):
        problem = _problem(status, verify)
        if problem is None:
            return status.path
        logger.warning("%s is not taken, but the next older one: %s", status.path, problem)
        reasons.append(problem)
    if reasons:
        raise CheckpointNotFoundError("\n  ".join([f"{root}: no checkpoint is valid", *reasons]))
    return None


def _first_was_interrupted(root: Path) -> bool:
    """Whether there are parts of steps, and no step has ever been complete: that would have made a tracker."""
    statuses = list_steps(root)
    began = any(status.committed for status in statuses) and not any(status.problems for status in statuses)
    driver = any(PIPELINE_ROLE in status.committed for status in statuses)
    return began and not driver and not (root / TRACKER_FILE).exists()


def _problem(status: StepStatus, verify: bool) -> str | None:
    for role in sorted(status.committed):
        damages = find_damage(status.role_dir(role), read_bytes=verify)
        if damages:
            return damages[0].problem
    return None


def part_of(load_dir: Path, role: str) -> Path | None:
    """A role's folder in the checkpoint that ROLL names; None if it is not one of ours.

    ROLL hands `<checkpoint>` to actors and `<checkpoint>/<cluster>` to critics and students.

    Raises CheckpointNotFoundError if it is ours, and not complete.
    """
    step_path = load_dir.parent if load_dir.name == role else load_dir
    if parse_step(step_path.name) is None or not step_path.is_dir():
        return None
    status = step_status(step_path)
    if not status.committed | status.declared and not status.problems:
        return None
    if not status.is_complete or role not in status.committed:
        missing = f"{step_path}: complete, but without {role}" if status.is_complete else status.reason
        raise CheckpointNotFoundError(f"{missing}: resume_from_checkpoint: true takes the newest that is whole")
    return status.role_dir(role)
