"""Recovers a training from the newest step that all its roles can load.

`recover` loads the step. `resumable_steps` only lists steps, for a driver whose roles run in other processes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    may_pass,
    reworded,
)
from mcore_ckpt.field_checks import check_value
from mcore_ckpt.io.links import broken_link
from mcore_ckpt.load.report import LoadResult
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.steps.choice import Choice, Step, choose
from mcore_ckpt.steps.listing import StepStatus, holds_something, list_steps
from mcore_ckpt.steps.node_steps import NodeStep
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.steps.remote_steps import RemoteStep
from mcore_ckpt.steps.tracker import warn_if_tracker_differs
from mcore_ckpt.steps.worth import look_at_all
from mcore_ckpt.urls import local_path

logger = logging.getLogger(__name__)

AUTO, OFF = "auto", "off"
# Words of other programs for AUTO and OFF; None for a word that could mean either.
_WORDS = {
    **dict.fromkeys(("latest", "newest", "last", "true", "yes", "on"), AUTO),
    **dict.fromkeys(("disable", "never", "false", "no"), OFF),
    **dict.fromkeys(("none", "null"), None),
}

# The pause before the first retry (seconds). Each further pause is twice as long as the one before.
RETRY_FIRST_S = 1.0


@dataclass(frozen=True)
class Recovery:
    """The result of `recover`.

    Attributes:
        step: the step that every role was loaded from. None: nothing was loaded, so start from the beginning.
        results: the result of each role's load, by role.
        skipped: the reason for each newer step that could not be loaded, and for each step of another run; the newest
            first.
    """

    step: int | None = None
    results: Mapping[str, LoadResult] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def recover(
    managers: CheckpointManager | Sequence[CheckpointManager],
    resume: str | int | Path = AUTO,
    *,
    retries: int = 1,
) -> Recovery:
    """Loads all managers from the same step. Every rank calls `recover`, with the same arguments.

    If a role's part of a step is damaged, all roles load the next older step. A step is passed over if retention has
    removed its optimizer, and a manager would load the optimizer. Failures that may be temporary (a rank is late, a
    file cannot be opened) are retried first, with growing pauses.

    Args:
        managers: one manager for each role. All managers have the same root and the same remote store, or no store.
        resume: "auto": load the newest step that is complete and has all roles. If there is no checkpoint at all,
            neither local nor in the remote store, start from the beginning. "off": start from the beginning. A number:
            load only the step with this number. A path: load only the step in this folder; with one manager, the path
            may also name the role's folder, even a folder that another program wrote.
        retries: how often a failed attempt is repeated.

    Returns:
        The step, and the result of each role's load.

    Raises:
        CheckpointNotFoundError: the given step or path does not exist; or, with "auto", there are checkpoints, but no
            step is complete with these roles. The message lists all steps. Nothing has changed.
        CheckpointCorruptError: none of the steps that were tried can be loaded. The message lists these steps, and says
            in which state models and optimizers are now.
        CheckpointMismatchError: a checkpoint is intact, but belongs to another model (older steps are then not tried),
            or retention has removed the optimizer of all steps that are left (`CheckpointConfig.optimizer_for_last`).
        AgreementError: a rank is still missing after all retries.
        InvalidArgumentError: an argument has a value that is not allowed.

    Example:
        >>> recovery = recover([actor, critic], config.resume)  # doctest: +SKIP
        >>> step = recovery.step or 0  # doctest: +SKIP
    """
    by_role = _by_role(managers)
    _check_resume(resume)
    check_value("retries", retries, int, {"least": 0})
    with ExitStack() as calls:  # a rank that stops tells the other ranks, whichever role these ranks are loading
        for manager in by_role.values():
            calls.enter_context(manager._call("resuming"))
        return _recovered(by_role, resume, retries)


def _recovered(by_role: Mapping[str, CheckpointManager], resume: str | int | Path, retries: int) -> Recovery:
    first = next(iter(by_role.values()))
    request = {"resume": str(resume), "roles": list(by_role), "retries": retries}
    first.agree("resuming", request, dict)
    if resume == OFF:
        return Recovery()
    if resume != AUTO and not isinstance(resume, int):
        return _from_path(by_role, local_path(resume, "resume"), retries)
    wanted = None if resume == AUTO else int(resume)

    roles = tuple(by_role)

    def find() -> dict[str, Any]:
        whole, lost = first.fast_steps_found(roles, wanted)
        nodes = [*whole, *lost]
        return first.agree("finding a step to resume from", request, lambda: _found(by_role, wanted, nodes))

    found = retried(find, retries)
    steps = [(step, list(map(Path, folders))) for step, folders in found["steps"]]
    return _newest(by_role, steps, retries, found["passed_over"], found["last_resort"]) if steps else Recovery()


def _check_resume(resume: object) -> None:
    """Raises InvalidArgumentError for an invalid `resume`. The message says what to write instead."""
    what = "use 'auto', 'off', a step or a path"
    if isinstance(resume, bool) or not isinstance(resume, (str, int, os.PathLike)) or resume == "":
        raise InvalidArgumentError(f"resume is {resume!r}: {what}")
    if isinstance(resume, int):
        check_value("resume", resume, int, {"least": 0})
    if not isinstance(resume, str) or resume in (AUTO, OFF) or os.path.lexists(resume):
        return
    if resume.isdecimal():
        raise InvalidArgumentError(f"resume is {resume!r}: use {int(resume)}, without quotes, for a step, or a path")
    word = resume.strip().lower()
    meant = _WORDS.get(word, word)
    if meant in (AUTO, OFF, None):
        raise InvalidArgumentError(f"resume is {resume!r}: " + (f"use {meant!r}" if meant else what))


def _found(by_role: Mapping[str, CheckpointManager], step: int | None, nodes: Sequence[NodeStep]) -> dict[str, Any]:
    """Returns the steps to try, the newest first, each with the folders of its roles below the root.

    `nodes` has the steps of the fast tier.
    """
    manager, roles = next(iter(by_role.values())), tuple(by_role)
    needed = {role: each.load_contents for role, each in by_role.items()}
    statuses = list_steps(manager.root, step)
    local: list[StepStatus | RemoteStep | NodeStep] = [*statuses, *nodes]
    there = manager.remote_steps(step, required=not choose(local, roles).steps)
    choice = choose([*there, *local], roles, needed)
    _check_choice(manager.root, choice, step)
    folders: dict[int, list[str]] = {each.step: [] for each in choice.steps}
    for status in (each for each in choice.steps if isinstance(each, StepStatus)):
        folders[status.step] = [str(status.role_dir(role)) for role in roles]
    passed_over = list(map(choice.reason, choice.passed_over))
    return {"steps": list(folders.items()), "passed_over": passed_over, "last_resort": choice.last_resort}


def resumable_steps(root: str | Path, roles: Sequence[str], step: int | None = None) -> list[StepStatus]:
    """Lists the steps that are complete and have all these roles, the newest first.

    This function reads only manifests, looks at names and sizes of the other files, and does not communicate with other
    ranks. If retention has removed a step's optimizer, the step is listed only if there are no other steps.

    Args:
        root: the folder of the steps.
        roles: the roles to load.
        step: the only step to look at. None: all steps.

    Returns:
        The steps. The list is empty only if nothing below `root` shows that there ever was a checkpoint. Only then
        should training start from the beginning.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but no step is complete with these roles; or `step` is given,
            and that step is not complete with these roles. The message gives the reason for each step.
        CheckpointCorruptError: no step is complete with these roles, and files of a committed step are missing.
        OSError: the root cannot be read.

    Example:
        >>> resumable_steps("/no/such/folder", ["actor"])
        []
    """
    root, roles = local_path(root, "root"), file_names.check_roles(roles)
    if step is not None:
        check_value("step", step, int, {"least": 0})
    choice = choose(list_steps(root, step), roles, dict.fromkeys(roles, ("optimizer",)))
    _check_choice(root, choice, step)
    look_at_all(choice.steps)
    return [status for status in choice.steps if status.is_complete]


def _check_choice(root: Path, choice: Choice[Step], step: int | None) -> None:
    """Logs which steps are passed over, and whether the tracker names another step than the one to load.

    If there is no step to load, raises the error that says why, unless there never was a checkpoint.
    """
    if choice.steps:
        choice.warn()
        if step is None:
            warn_if_tracker_differs(root, choice.steps)
        return
    reasons = [
        choice.reason(each)
        for each in choice.passed_over
        if step is not None or (holds_something(each) if isinstance(each, StepStatus) else each.claims)
    ]
    if step is None and not reasons and os.path.lexists(root / file_names.TRACKER_FILE):
        reasons.append(
            f"{root / file_names.TRACKER_FILE}: exists, but there is no step (did another program write this file, or "
            "were the steps moved away?)"
        )
    if step is None and not reasons and (link := broken_link(root)) is not None:
        reasons.append(f"{root}: {link}")
    if step is None and not reasons:
        return
    of = f"complete with {', '.join(choice.roles)}"
    text = (
        f"there are checkpoints, but no step is {of}: to start from the beginning nevertheless, use resume='off'; to "
        "load a checkpoint of another program, pass its path"
        if step is None
        else f"there is no step {step} that is {of}"
    )
    raise choice.error(f"{root}: {text}{_listed('found', reasons)}")


def _by_role(managers: CheckpointManager | Sequence[CheckpointManager]) -> dict[str, CheckpointManager]:
    listed = [managers] if isinstance(managers, CheckpointManager) else list(managers)
    by_role = {manager.role: manager for manager in listed}
    if not listed or len(by_role) != len(listed):
        raise InvalidArgumentError(
            f"the managers have the roles {[manager.role for manager in listed]}: pass at least one manager, and "
            "only one for each role"
        )
    roots = sorted({str(manager.root) for manager in listed})
    if len(roots) > 1:
        raise InvalidArgumentError(
            f"the managers have several roots: {', '.join(roots)}: use one root, because a step's folder has all roles"
        )
    return by_role


def _from_path(by_role: Mapping[str, CheckpointManager], path: Path, retries: int) -> Recovery:
    # `path` is a step's folder or, with a single role, possibly that role's folder.
    of_step = len(by_role) > 1 or (path / next(iter(by_role))).is_dir()
    results = _load_all(by_role, {role: {"path": path / role if of_step else path} for role in by_role}, retries)
    steps = {role: result.step for role, result in results.items()}
    if len(set(steps.values())) > 1:
        raise CheckpointCorruptError(f"{path}: its roles have different steps, {steps}: load another folder")
    return Recovery(next(iter(steps.values())), results)


def _newest(
    by_role: Mapping[str, CheckpointManager],
    steps: Sequence[tuple[int, list[Path]]],
    retries: int,
    lost: Sequence[str],
    last_resort: str,
) -> Recovery:
    """Loads the newest step that can be loaded.

    Args:
        steps: the steps to try, in this order, each with the folders to lock while the step is loaded.
        lost: why newer steps are not tried.
        last_resort: advice for the case that no step can be loaded; empty if there is no advice.
    """
    skipped = list(lost)
    for step, folders in steps:
        # Lock the step until all roles are loaded. Otherwise another process could delete the step in between.
        with reading(folders):
            try:
                results = _load_all(by_role, {role: {"step": step} for role in by_role}, retries)
            except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                if step != steps[-1][0]:
                    logger.warning("step %d cannot be loaded, taking the next older one: %s", step, error)
                skipped.append(str(error))
                continue
            except CheckpointError as error:
                raise reworded(error, f"{error}{_listed('tried before', skipped)}") from error
        return Recovery(step, results, tuple(skipped))
    raise CheckpointCorruptError(
        f"no step can be loaded by all of {', '.join(by_role)}. Parts of the state may now be of several steps: load "
        f"another checkpoint before training continues{_listed('tried', skipped)}"
        + _listed("not tried", [last_resort] if last_resort else [])
    )


def _load_all(
    by_role: Mapping[str, CheckpointManager], which: Mapping[str, dict[str, Any]], retries: int
) -> dict[str, LoadResult]:
    """Loads every role's part of one step. The message of an error names the roles that are already loaded."""
    results: dict[str, LoadResult] = {}
    for role, manager in by_role.items():
        try:
            results[role] = retried(partial(manager.load, **which[role]), retries)
        except CheckpointError as error:
            loaded = f". Already loaded: {', '.join(results)}" if results else ""
            raise reworded(error, f"{role}: {error}{loaded}") from error
    return results


def _listed(what: str, reasons: Sequence[str]) -> str:
    return "".join(f"\n  {what}: {reason}" for reason in reasons)


def retried(work: Callable[[], Any], retries: int) -> Any:
    """Calls `work`, and calls it again after an error that may be temporary.

    All ranks see the same errors, so all ranks repeat the call.
    """
    for number in range(retries):
        try:
            return work()
        except (OSError, CheckpointError) as error:
            if not may_pass(error):
                raise
            pause = RETRY_FIRST_S * 2**number
            logger.warning("trying again in %g s: %s", pause, error)
            time.sleep(pause)
    return work()
