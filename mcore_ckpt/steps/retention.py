"""Decides which steps stay (the preservation policy) and deletes the other steps, except those that are in use.

`judge` decides, and needs only the statuses of the steps. They are read from disk each time, so any process can delete:
a trainer after its commit, a restarted trainer, or `mcore-ckpt prune` while a trainer runs.

To add a rule, add a field to `PreservationPolicy` and a reason to `_why_it_stays`. So that users can set it, add the
field to `config.py`, and pass it on wherever a policy is made: in `save/request.py` (for the root), in
`save/context.py` (for the remote store) and in `cli/prune.py`. Integrations make policies of their frameworks' options.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.field_checks import check_fields, checked, limited
from mcore_ckpt.io.files import sync_dir
from mcore_ckpt.steps.choice import abandoned, oldest_first
from mcore_ckpt.steps.hidden_step import HiddenStep, hide_step
from mcore_ckpt.steps.listing import StepStatus, list_steps
from mcore_ckpt.steps.owner import write_owner
from mcore_ckpt.steps.read_lock import unread
from mcore_ckpt.steps.work_folders import is_in_use
from mcore_ckpt.steps.worth import Weighed, look_at_all

logger = logging.getLogger(__name__)


@checked
@dataclass(frozen=True)
class PreservationPolicy:
    """The rules that decide which steps stay. Pinned steps stay in any case.

    Attributes:
        max_to_keep: how many of the newest complete steps of each role stay; None keeps all steps.
        keep_every: complete steps whose number is a multiple of this stay, too, including step 0; None for no rule.

    Example:
        >>> PreservationPolicy(max_to_keep=2, keep_every=1000)
        PreservationPolicy(max_to_keep=2, keep_every=1000)
    """

    max_to_keep: int | None = limited(None, least=1, or_none="to keep every checkpoint")
    keep_every: int | None = limited(None, least=1)

    def __post_init__(self) -> None:
        check_fields(self)


Step = TypeVar("Step", bound=Weighed)


@dataclass(frozen=True)
class RetentionDecision(Generic[Step]):
    """The decision whether a step stays, and its reason."""

    status: Step
    stays: bool
    reason: str


def too_old(
    statuses: Sequence[Step], policy: PreservationPolicy, committed: int | None = None, spared: Collection[int] = ()
) -> list[Step]:
    """Returns the steps that may be deleted. It has the arguments of `judge`."""
    return [decision.status for decision in judge(statuses, policy, committed, spared) if not decision.stays]


def judge(
    statuses: Sequence[Step], policy: PreservationPolicy, committed: int | None = None, spared: Collection[int] = ()
) -> list[RetentionDecision[Step]]:
    """Decides for each step of a root, ordered by step, whether it stays. Returns the decisions in the same order.

    A step that is not understood stays: a folder without a manifest of this package, or with a manifest that is
    damaged, has a newer format, or was copied from another step.

    Only steps that have all their files count. So it looks at the files of the newest steps, until enough of them are
    whole, and not at the files of older steps. A step that lacks files and would otherwise count stays, because it may
    be a copy under way, or the only one left. Once enough newer steps are whole, it goes like any other old step.

    The step that was saved last (`committed`) stays even if it is not among the newest, as after a rollback, and so do
    those that are `spared`, such as the best one. Raises OSError or RemoteError: the files of a step cannot be looked
    at.
    """
    newest, lacking = _newest(statuses, policy.max_to_keep)
    given_up = frozenset[int]() if policy.max_to_keep is None else abandoned(statuses)
    # While no step is complete, another role may still be saving the first one, so nothing is too old.
    needed = [each.commit.number for each in statuses if each.step in newest or each.step == committed]
    oldest_needed = min(needed) if newest else 0
    named = dict.fromkeys(spared, "spared by its number") | ({} if committed is None else {committed: "saved last"})
    decisions = []
    for status in statuses:
        stays = _why_it_stays(status, policy, newest, lacking, oldest_needed, named)
        reason = stays or _why_it_goes(status, policy, status.step in given_up)
        decisions.append(RetentionDecision(status, stays is not None, reason))
    return decisions


def _newest(statuses: Sequence[Weighed], count: int | None) -> tuple[dict[int, list[str]], set[int]]:
    """Returns the `count` newest complete steps of each role, as a mapping from step to roles; nothing if it is None.

    Roles can save at different steps. Abandoned steps come after all others, so they never take the place of another
    step. The second result contains the steps that would be among the newest, but lack files.
    """
    claimed = [] if count is None else [status for status in statuses if status.is_claimed]
    roles = frozenset(role for status in claimed for role in status.committed)
    of_role = {role: _last_first(statuses, role) for role in roles}
    found: dict[str, list[Weighed]] = {}
    looked_at: dict[int, Weighed] = {}
    while True:
        # First by their manifests, then without the steps that turned out to lack files.
        found = {role: _may_count(steps, looked_at)[:count] for role, steps in of_role.items()}
        to_look_at = {each.step: each for steps in found.values() for each in steps if each.step not in looked_at}
        if not to_look_at:
            break
        look_at_all(to_look_at.values())
        looked_at |= to_look_at
    newest: dict[int, list[str]] = defaultdict(list)
    for role, steps in sorted(found.items()):
        for each in steps:
            newest[each.step].append(role)
    return newest, {step for step, each in looked_at.items() if not each.is_complete}


def _last_first(statuses: Sequence[Weighed], role: str) -> list[Weighed]:
    """Returns the claimed steps of a role in the order in which a load tries them."""
    last_first = reversed(oldest_first(statuses, (role,)))
    return [status for status in last_first if status.is_claimed and role in status.committed]


def _may_count(steps: Sequence[Weighed], looked_at: Collection[int]) -> list[Weighed]:
    return [each for each in steps if each.step not in looked_at or each.is_complete]


def _why_it_stays(
    status: Weighed,
    policy: PreservationPolicy,
    newest: dict[int, list[str]],
    lacking: Collection[int],
    oldest_needed: int,
    named: Mapping[int, str],
) -> str | None:
    if status.pinned:
        return "pinned"
    if not status.is_claimed:
        if status.problems or not status.committed:
            return f"not understood, so it is not deleted: {status.reason}"
        if policy.max_to_keep is None or status.commit.number >= oldest_needed:
            return f"may still become complete: {status.reason}"
        return named.get(status.step)  # no trainer can resume from it
    if policy.max_to_keep is None:
        return "every complete step stays"
    if status.step in newest:
        return f"among the newest {policy.max_to_keep} of {', '.join(newest[status.step])}"
    if policy.keep_every is not None and status.step % policy.keep_every == 0:
        return f"a multiple of {policy.keep_every}"
    if status.step in named:
        return named[status.step]
    return f"does not count, but may be a copy under way: {status.reason}" if status.step in lacking else None


def _why_it_goes(status: Weighed, policy: PreservationPolicy, is_given_up: bool) -> str:
    if not status.is_claimed:
        return f"older than all needed steps, and not complete: {status.reason}"
    by = ", and abandoned by the newest one" if is_given_up else ""
    return f"not among the newest {policy.max_to_keep} of any role{by}"


def delete_old_steps(
    root: Path, policy: PreservationPolicy, committed: int | None = None, spared: Collection[int] = ()
) -> list[int]:
    """Deletes the steps that the policy does not keep, and returns their numbers. The arguments are those of `judge`.

    A step that cannot be deleted now is left for the next call. Raises OSError: the steps cannot be listed.
    """
    deleted = []
    for status in too_old(list_steps(root), policy, committed, spared):
        obstacle = delete_step(status)
        if obstacle is None:
            deleted.append(status.step)
        else:
            logger.info("step %d is too old, but stays for now: %s", status.step, obstacle)
    return deleted


def delete_step(status: StepStatus) -> str | None:
    """Deletes one step unless it is in use. Returns the reason why it stays, or None if it is gone.

    Raises nothing, because one step that cannot be deleted must not prevent the deletion of others, or the disk would
    fill up.
    """
    try:
        return delete_or_raise(status)
    except OSError as error:
        logger.warning("%s is too old, but stays, because it cannot be deleted: %s", status.path, error)
        return f"it cannot be deleted: {error}"


def delete_or_raise(status: StepStatus) -> str | None:
    """Does the same as `delete_step`, but raises OSError if the step cannot be deleted."""
    try:
        with unread(map(status.role_dir, sorted(status.committed))) as alone:
            obstacle = obstacle_to(status, status.path) if alone else "it is being read"
            if obstacle is not None:
                return obstacle
            hidden = _hide_unless_changed(status)
            if isinstance(hidden, str):
                return hidden
    except FileNotFoundError:
        return "another process is deleting it"
    except CheckpointCorruptError as error:
        return str(error)
    try:
        left = hidden.remove()
    except KeyboardInterrupt:
        # The step is gone, so the rest of its files goes, too. A second Ctrl-C leaves them to the next trainer.
        hidden.remove()
        raise
    if left:
        logger.warning(
            "%s is deleted, but not all of its files could be removed: look at %s",
            status.path,
            ", ".join(map(str, left)),
        )
    return None


def discard_step(step_path: Path) -> None:
    """Deletes a step's folder with everything in it. No other process may be using the folder. Raises OSError.

    The folder is renamed first, so that a half-deleted step never looks like a step.
    """
    hidden = hide_step(step_path)
    sync_dir(step_path.parent)
    hidden.remove()


def _hide_unless_changed(status: StepStatus) -> HiddenStep | str:
    """Renames a step to a hidden name. If `obstacle_to` then finds an obstacle, renames it back and returns that."""
    # A half-deleted step must not look like a step. Until the second check below, the owner file shows other processes
    # that this process may still rename the step back.
    with suppress(OSError):  # a full disk is the best reason to delete, and must not prevent the deletion
        write_owner(status.path)
    try:
        hidden = hide_step(status.path)
    except OSError:
        (status.path / file_names.OWNER_FILE).unlink(missing_ok=True)
        raise
    try:
        obstacle = obstacle_to(status, hidden.path)
    except OSError as error:
        obstacle = f"it cannot be checked: {error}"
    if obstacle is not None:
        (hidden.path / file_names.OWNER_FILE).unlink(missing_ok=True)
        hidden.put_back()
    with suppress(OSError):  # the renames are done, even if they cannot be made durable
        sync_dir(status.path.parent)
    return hidden if obstacle is None else obstacle


def obstacle_to(status: StepStatus, path: Path) -> str | None:
    """Returns what prevents the deletion of a step that is now at `path`, such as a pin; None if nothing does.

    Raises OSError: the step is gone, or its files cannot be deleted.
    """
    if status.aside:
        return "a save was replacing it and died; the next start or save of a trainer puts it back"
    if path.is_symlink():
        return "it is a link, and its target may belong to somebody else"
    if (path / file_names.PINNED_FILE).exists():
        return "it was pinned"
    for folder in (path, *map(path.joinpath, sorted(status.committed))):
        if _is_protected(folder):
            raise PermissionError(errno.EACCES, "may not be changed: it is another user's, or protected", str(folder))
    if is_in_use(path, status.path):
        return "a save is under way in it"
    flat = {status.flat or path.name} if (path / file_names.MANIFEST_FILE).exists() else set()
    roles = {each.name for each in path.iterdir() if file_names.is_role(each.name)}
    if {role for role in roles if (path / role / file_names.MANIFEST_FILE).exists()} | flat != status.committed:
        return "it has just changed"
    return None


def _is_protected(folder: Path) -> bool:
    """True if the files in it cannot be removed. A rename would lose them, and they would still take space."""
    # The system call filter of an old container makes every `access` call fail, even this one. Then only an attempt to
    # remove the files shows whether they can be removed.
    is_seen = folder.is_dir() and os.access(folder, os.F_OK, effective_ids=True)
    return is_seen and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True)
