"""Lists the checkpoints that a load can choose from, both below the local root and in the remote store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, InvalidArgumentError, RemoteError
from mcore_ckpt.formats import kinds
from mcore_ckpt.formats.native.folder import Folder, LocalFolder
from mcore_ckpt.formats.native.remote_folder import RemoteFolder
from mcore_ckpt.load.candidate_order import Candidate, last_first, record_of
from mcore_ckpt.load.node_candidates import add_fast, spread_folder, why_not_whole
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import leftovers
from mcore_ckpt.steps.branches import StepCommit, commit_of, oldest_first
from mcore_ckpt.steps.listing import StepStatus, find_moved_aside, list_steps
from mcore_ckpt.steps.node_steps import FastCheckpoint, newer_than, whole_steps
from mcore_ckpt.steps.node_tier import NodeTier
from mcore_ckpt.steps.remote_steps import RemoteStep, RemoteSteps
from mcore_ckpt.steps.tracker import warn_if_tracker_differs
from mcore_ckpt.steps.worth import whole_first

logger = logging.getLogger(__name__)


def remote_steps(remote: RemoteSteps | None, root: Path, step: int | None, required: bool) -> list[RemoteStep]:
    """Lists the steps in the remote store, the oldest first. Without a store the list is empty.

    Args:
        remote: the remote steps, or None without a store.
        root: the folder of the local steps, for messages.
        step: the only step to list; None for all. A step of another run is listed only if it is named in this way, and
            if there is no other one.
        required: True if there is no local checkpoint to load instead.

    Raises:
        RemoteError: the store does not answer, and `required` is true. The store may have checkpoints, so it would be
            wrong to train from the beginning.
    """
    if remote is None:
        return []
    try:
        if step is None:
            return remote.steps()
        return [remote.step(step, of_any_run=required)]
    except RemoteError as error:
        if required:
            raise RemoteError(
                f"{error}; {root} has no checkpoint to load, and the store may have one: make the store reachable"
            ) from None
        logger.warning("only local checkpoints can be loaded, although the store may have newer ones: %s", error)
        return []


def newest_first(role: str, local: Sequence[StepStatus], remote: Sequence[RemoteStep]) -> list[Record]:
    """Lists the checkpoints of a role, the newest first. Of the same commit, the local one precedes the remote one.

    Args:
        role: the role to load.
        local: the local steps to try that have the role.
        remote: all steps in the store.

    Returns:
        The candidates as JSON values, which can be sent to the other ranks.
    """
    here = [local_candidate(status.step, status.role_dir(role), status.commit) for status in local]
    there = [
        {
            "step": step.step,
            "folder": file_names.remote_dir(step.step, role, step.found[role].attempt),
            "remote": True,
            "commit": record_of(step.commit),
        }
        for step in whole_first(oldest_first([step for step in remote if role in step.found]))
    ]
    return last_first([*here, *there])


def local_candidate(step: int, role_dir: Path, commit: StepCommit | None = None) -> Record:
    """Describes one local checkpoint as JSON values."""
    commit = commit or commit_of(step, [])
    return {"step": step, "folder": str(role_dir), "remote": False, "commit": record_of(commit)}


def folder_of(remote: RemoteSteps | None, candidate: Record, role: str = "", tier: NodeTier | None = None) -> Folder:
    """Returns the folder, or folders, from which this rank reads a candidate that rank 0 has chosen."""
    if "holders" in candidate:
        assert tier is not None, "all ranks have the same config"
        is_below = candidate["below"] is not None
        below = _folder_of(remote, candidate["remote"], candidate["below"]) if is_below else None
        return spread_folder(tier, role, candidate, below)
    return _folder_of(remote, candidate["remote"], candidate["folder"])


def _folder_of(remote: RemoteSteps | None, is_remote: bool, folder: str) -> Folder:
    if not is_remote:
        return LocalFolder(Path(folder))
    assert remote is not None, "all ranks have the same config"
    return RemoteFolder(remote.store, folder)


def find_candidates(
    trainer: Trainer,
    remote: RemoteSteps | None,
    step: int | None,
    path: Path | None,
    tier: NodeTier | None = None,
    fast: Sequence[FastCheckpoint] = (),
) -> Record:
    """Finds the checkpoints to try, in order. Only rank 0 calls it, and sends the result to the other ranks.

    Args:
        trainer: rank 0's trainer.
        remote: the steps in the remote store; None without a store.
        step: the only step to look for. None: all steps.
        path: the folder to load instead of a step. In the fast tier it also names a step that is only on the nodes.
        tier: rank 0's part of the fast tier; None without one.
        fast: what the nodes of the fast tier have together.

    Raises:
        CheckpointNotFoundError: there is none. The message gives the reason for each step that was looked at.
        CheckpointCorruptError: the same, and files of a committed step are missing.
        RemoteError: there is no local checkpoint, and the store does not answer.
    """
    whole = whole_steps(fast, (trainer.role,)) if fast else {}
    if path is not None:
        named = _step_of(trainer, path.absolute()) if whole else None
        if named not in whole:
            known = [] if tier is None or named is None else _lost(tier, fast, trainer.role, None, named)
            return _at_path(path.absolute(), known)
        step = named
    statuses = list_steps(trainer.root, step)
    # The newest whole one, and older ones that a load looks at when it tries them.
    good = list(whole_first(oldest_first([status for status in statuses if trainer.role in status.committed])))
    there = remote_steps(remote, trainer.root, step, required=not good and not whole)
    candidates = newest_first(trainer.role, good, there)
    lost: list[str] = []
    if tier is not None:
        fits = {number: roles for number, roles in whole.items() if step in (None, number)}
        candidates = add_fast(tier, trainer.role, candidates, fits)
        lost = _lost(tier, fast, trainer.role, candidates[0] if candidates else None, step)
    if not candidates:
        what = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        reasons = "".join(f"\n  {_reason(status, trainer.role)}" for status in reversed(statuses))
        reasons += "".join(f"\n  {reason}" for reason in lost)
        if remote is not None:
            reasons += f"\n  {remote.store.url}: no complete checkpoint either"
            reasons += "".join(f"\n  {found.reason}" for found in reversed(there))
        advice = f"look at `mcore-ckpt list {trainer.root}`, and check root and role"
        # Something is left to mend, so nobody may take this for a new training.
        lacks_files = any(status.is_claimed and status.lacks for status in statuses)
        error = CheckpointCorruptError if lacks_files else CheckpointNotFoundError
        raise error(f"{trainer.root}: {what} of {trainer.role}: {advice}{reasons}")
    if step is None and not candidates[0]["remote"] and "holders" not in candidates[0]:
        warn_if_tracker_differs(trainer.root, good)
    passed_over = lost
    for reason in lost:
        logger.warning("a newer step is not loaded: %s", reason)
    for status in reversed(statuses):
        # A step without any committed role is a save in progress, not a bad checkpoint.
        if step is None and _is_newer(status, candidates[0]) and (status.committed or status.problems):
            passed_over.append(_reason(status, trainer.role))
            if trainer.config.strict and status.is_claimed and status.lacks:
                raise CheckpointCorruptError(f"{passed_over[-1]}. Nothing has changed. To load another step, name it")
            kind = "a step" if status.is_of_other_run else "a newer step"
            logger.warning("%s is not loaded: %s", kind, passed_over[-1])
    return {"candidates": candidates, "passed_over": passed_over, "foreign": None}


def _is_newer(status: StepStatus, chosen: Record) -> bool:
    if status.is_of_other_run:
        return True
    if status.heads:
        return status.commit.number > int(chosen["commit"][0])
    return status.step > int(chosen["step"])  # its manifest cannot be read


def _lost(
    tier: NodeTier, fast: Sequence[FastCheckpoint], role: str, newest: Record | None, step: int | None
) -> list[str]:
    """Says why the fast tier's checkpoints of a role that are newer than a candidate cannot be loaded.

    What no node has committed is a save that was under way, and not a step that was lost.
    """
    chosen = None if newest is None else Candidate.of(newest)
    found = newer_than(chosen, [each for each in fast if each.is_committed and each.role == role])
    return [why_not_whole(tier, each) for each in found if step in (None, each.step)]


def _step_of(trainer: Trainer, path: Path) -> int | None:
    """Returns the step below the root whose folder, or whose role's folder, a path names; None if it names no step."""
    for step_path in (path, path.parent):
        step = file_names.parse_step(step_path.name)
        if step is not None:
            with suppress(InvalidArgumentError):
                root = file_names.step_root(path, trainer.role, step)
                return step if root is not None and root.resolve() == trainer.root.resolve() else None
    return None


def _reason(status: StepStatus, role: str) -> str:
    return status.reason if not status.is_complete else f"{status.path}: complete, but without {role}"


def _at_path(path: Path, lost: Sequence[str]) -> Record:
    """Describes the checkpoint in a folder, as JSON values. Raises CheckpointNotFoundError if there is no folder.

    `lost` says why the nodes of the fast tier do not have it.
    """
    # On file systems that cannot exchange folders, a crash may have left the checkpoint under another name. This call
    # renames it back. It does not if the process that crashed may be alive: then the checkpoint is read where it is.
    if not path.is_dir():
        leftovers.remove_leftovers_beside(path)
    foreign = kinds.kind_of(path)
    moved = None if foreign else find_moved_aside(path)
    if moved is None and not path.is_dir():
        raise CheckpointNotFoundError(
            f"{path}: this folder does not exist: name the folder of a role, such as .../global_steps_100/actor"
            + "".join(f"\n  {reason}" for reason in lost)
        )
    return {"candidates": [local_candidate(0, moved or path)], "foreign": foreign}
