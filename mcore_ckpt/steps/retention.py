"""Which steps may go, and how they go without taking anything along that somebody needs.

`judge` is the rule, and pure. Everything is counted from what is on disk, so it does not matter who deletes: a trainer
after its commit, one that was started anew, or `mcore-ckpt prune` beside it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io.files import sync_dir
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.listing import StepStatus, list_steps
from mcore_ckpt.steps.owner import write_owner
from mcore_ckpt.steps.read_lock import unread

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreservationPolicy:
    """What stays beside pinned steps.

    Attributes:
        max_to_keep: so many of the newest complete steps of each role; None: all steps.
        keep_every: and steps that are multiples of this, 0 included.
    """

    max_to_keep: int | None = None
    keep_every: int | None = None


class Judged(Protocol):
    """What the rule looks at in a step, wherever it is."""

    @property
    def step(self) -> int: ...
    @property
    def committed(self) -> Collection[str]: ...
    @property
    def problems(self) -> Collection[str]: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def pinned(self) -> bool: ...


Step = TypeVar("Step", bound=Judged)


@dataclass(frozen=True)
class RetentionDecision(Generic[Step]):
    """Whether a step stays, and why."""

    status: Step
    stays: bool
    reason: str


def too_old(statuses: Sequence[Step], policy: PreservationPolicy, committed: int | None = None) -> list[Step]:
    """Those that `judge` lets go."""
    return [decision.status for decision in judge(statuses, policy, committed) if not decision.stays]


def judge(
    statuses: Sequence[Step], policy: PreservationPolicy, committed: int | None = None
) -> list[RetentionDecision[Step]]:
    """The rule, for each of the statuses, which are ordered by step.

    What is not understood stays: folders without a manifest of ours, and manifests that are damaged, of a newer
    format, or copied from another step.

    Args:
        statuses: of all step folders of a root, ordered by step.
        policy: what is to stay.
        committed: the step saved last. It stays: after a rollback it is not among the newest.
    """
    newest = _newest(statuses, policy.max_to_keep)
    # While nothing is complete, another role may still be on its way to the first step.
    oldest_needed = min([*newest, *([] if committed is None else [committed])]) if newest else 0
    decisions = []
    for status in statuses:
        reason = _why_it_stays(status, policy, newest, oldest_needed, committed)
        if reason is not None:
            decisions.append(RetentionDecision(status, True, reason))
        elif status.is_complete:
            decisions.append(RetentionDecision(status, False, f"not among the newest {policy.max_to_keep} of any role"))
        else:
            decisions.append(RetentionDecision(status, False, f"older than all that are needed, and {status.reason}"))
    return decisions


def _newest(statuses: Sequence[Judged], count: int | None) -> dict[int, list[str]]:
    """The newest complete steps of each role: roles may save at steps of their own."""
    of_role: dict[str, list[int]] = defaultdict(list)
    for status in statuses:
        for role in status.committed if status.is_complete else ():
            of_role[role].append(status.step)
    newest: dict[int, list[str]] = defaultdict(list)
    for role, steps in sorted(of_role.items()):
        for step in steps[-count:] if count is not None else steps:
            newest[step].append(role)
    return newest


def _why_it_stays(
    status: Judged,
    policy: PreservationPolicy,
    newest: dict[int, list[str]],
    oldest_needed: int,
    committed: int | None,
) -> str | None:
    if status.pinned:
        return "pinned"
    if not status.is_complete:
        if status.problems or not status.committed:
            return f"not understood, so not ours to delete: {status.reason}"
        if policy.max_to_keep is None or status.step >= oldest_needed:
            return f"may still become complete: {status.reason}"
        return None  # nobody can come back to it
    if policy.max_to_keep is None:
        return "every complete step stays"
    if status.step in newest:
        return f"among the newest {policy.max_to_keep} of {', '.join(newest[status.step])}"
    if policy.keep_every is not None and status.step % policy.keep_every == 0:
        return f"a multiple of {policy.keep_every}"
    return "saved last" if status.step == committed else None


def delete_old_steps(root: Path, policy: PreservationPolicy, committed: int | None = None) -> list[int]:
    """Deletes what `judge` lets go; returns the steps deleted. What cannot go now is left for the next time.

    Raises OSError if the steps cannot be listed.
    """
    deleted = []
    for decision in judge(list_steps(root), policy, committed):
        if decision.stays:
            continue
        obstacle = delete_step(decision.status)
        if obstacle is None:
            deleted.append(decision.status.step)
        else:
            logger.info("step %d is too old, but stays for now: %s", decision.status.step, obstacle)
    return deleted


def delete_step(status: StepStatus) -> str | None:
    """Deletes one step that was judged. Returns why it stays after all, or None. Raises nothing.

    What stays must not keep others: a step that is in the way for ever would fill the disk.
    """
    try:
        with unread(map(status.role_dir, sorted(status.committed))) as alone:
            obstacle = obstacle_to(status, status.path) if alone else "it is being read"
            if obstacle is not None:
                return obstacle
            doomed = file_names.deleted_dir(status.path, commit.new_attempt())
            obstacle = _move_away(status, doomed)
            if obstacle is not None:
                return obstacle
    except FileNotFoundError:
        return "another process is deleting it"
    except CheckpointCorruptError as error:
        return str(error)
    except OSError as error:
        logger.warning("%s is too old, but stays: it cannot be deleted: %s", status.path, error)
        return f"it cannot be deleted: {error}"
    shutil.rmtree(doomed, ignore_errors=True)
    if os.path.lexists(doomed):
        logger.warning("%s is deleted, but not all of its files could be removed: look at %s", status.path, doomed)
    return None


def _move_away(status: StepStatus, doomed: Path) -> str | None:
    """Renames a step out of sight, unless something has come into it since it was judged."""
    # Half deleted it must not look like a step, and until the last look below no sweep may take it: it may come back.
    with suppress(OSError):  # on a full disk deleting is what is needed most
        write_owner(status.path)
    try:
        os.rename(status.path, doomed)
    except OSError:
        (status.path / file_names.OWNER_FILE).unlink(missing_ok=True)
        raise
    try:
        obstacle = obstacle_to(status, doomed)
    except OSError as error:
        obstacle = f"it cannot be looked at: {error}"
    if obstacle is not None:
        (doomed / file_names.OWNER_FILE).unlink(missing_ok=True)
        os.rename(doomed, status.path)
    with suppress(OSError):  # gone or back it is already
        sync_dir(status.path.parent)
    return obstacle


def obstacle_to(status: StepStatus, path: Path) -> str | None:
    """What has changed since a step was judged, or is under way in it; `path` is where it is now.

    Raises OSError: it is gone, or cannot be deleted.
    """
    if path.is_symlink():
        return "it is a link, and what it names may be somebody else's"
    if (path / file_names.PINNED_FILE).exists():
        return "it was pinned"
    for folder in (path, *map(path.joinpath, sorted(status.committed))):
        if _is_protected(folder):
            raise PermissionError(errno.EACCES, "may not be changed: it is somebody else's, or protected", str(folder))
    if commit.is_in_use(path, status.path):
        return "a save is under way in it"
    flat = {status.flat or path.name} if (path / file_names.MANIFEST_FILE).exists() else set()
    if {entry.name for entry in path.iterdir() if _is_committed(entry)} | flat != status.committed:
        return "it has just changed"
    return None


def _is_protected(folder: Path) -> bool:
    """Whether its files could not be removed: moved away all the same it would take its space, and be lost."""
    # The filter of an old container answers no to whatever is asked: then removing has to show.
    is_seen = folder.is_dir() and os.access(folder, os.F_OK, effective_ids=True)
    return is_seen and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


def _is_committed(entry: Path) -> bool:
    return file_names.is_role(entry.name) and (entry / file_names.MANIFEST_FILE).exists()


# -- pins ------------------------------------------------------------------------------------------------


# -- by hand ---------------------------------------------------------------------------------------------
