"""Lists the checkpoints that a load can choose from: below the local root, on the nodes, and in the remote store."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, InvalidArgumentError, RemoteError
from mcore_ckpt.fast.found import node_candidate, spread_folder, why_not_whole
from mcore_ckpt.fast.tier import NodeTier
from mcore_ckpt.formats.huggingface.kind import is_hf_folder
from mcore_ckpt.formats.kinds import kind_of
from mcore_ckpt.formats.native.folder import Folder, LocalFolder
from mcore_ckpt.formats.native.remote_folder import RemoteFolder
from mcore_ckpt.formats.step_folders import is_legacy, step_folders
from mcore_ckpt.io.links import broken_link
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import leftovers
from mcore_ckpt.steps.choice import Choice, choose
from mcore_ckpt.steps.listing import StepStatus, find_moved_aside, is_step, list_steps
from mcore_ckpt.steps.node_steps import FastCheckpoint, NodeStep, node_steps
from mcore_ckpt.steps.remote_steps import RemoteStep, RemoteSteps
from mcore_ckpt.steps.tracker import warn_if_tracker_differs

logger = logging.getLogger(__name__)

AnyStep = StepStatus | RemoteStep | NodeStep


def remote_steps(remote: RemoteSteps | None, root: Path, step: int | None, required: bool) -> list[RemoteStep]:
    """Lists the steps in the remote store, the oldest first. Without a store the list is empty.

    `step` is the only step to list; None lists all. `required` is true if there is no local checkpoint to load instead.
    A step of another run is listed only if `step` names it and `required` is true.

    Raises RemoteError: the store does not answer, and `required` is true. The store may have checkpoints, so it would
    be wrong to train from the beginning.
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


def candidates_of(role: str, steps: Sequence[AnyStep], tier: NodeTier | None = None) -> list[Record]:
    """Describes a role's checkpoints in some steps, in the order of the steps, as JSON values that a rank can send.

    A save that is on the nodes, and also in the root or the store, is one candidate: its bytes are read from the nodes,
    as far as the nodes have them.
    """
    found: list[Record] = []
    on_nodes: dict[str, Record] = {}
    for step in steps:
        attempt = next(head.attempt for head in step.heads if head.role == role)
        if isinstance(step, NodeStep):
            assert tier is not None, "only the fast tier has steps on nodes"
            candidate = node_candidate(tier, step.found[role])
            on_nodes[attempt] = candidate
        elif isinstance(step, StepStatus):
            candidate = local_candidate(step.step, step.role_dir(role))
        else:
            key = file_names.remote_dir(step.step, role, attempt)
            candidate = {"step": step.step, "folder": key, "remote": True}
        if attempt in on_nodes and candidate is not on_nodes[attempt]:
            on_nodes.pop(attempt).update(candidate, below=candidate["folder"])
        else:
            found.append(candidate)
    return found


def local_candidate(step: int, role_dir: Path) -> Record:
    """Describes one local checkpoint as JSON values."""
    return {"step": step, "folder": str(role_dir), "remote": False}


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
    """Finds the checkpoints to try, in order. Only rank 0 calls this function, and sends the result to all ranks.

    `step` is the only step to look for. `path` is the folder to load instead of a step. With a fast tier, `path` can
    also name a step that is only on the nodes. `fast` has the checkpoints on the nodes of the fast tier.

    Raises:
        CheckpointNotFoundError: there is no checkpoint to try. The message gives the reason for each step that was
            looked at.
        CheckpointCorruptError: there is no checkpoint to try, and files of a committed step are missing.
        RemoteError: there is no local checkpoint, and the store does not answer.
    """
    nodes = [] if tier is None else node_steps(fast, (trainer.role,), partial(why_not_whole, tier))
    if path is not None:
        named = _step_of(trainer, path.absolute()) if nodes else None
        on_nodes = [each for each in nodes if each.step == named]
        if not any(each.is_complete for each in on_nodes):
            return _at_path(path.absolute(), [each.reason for each in on_nodes])
        step = named
    roles = (trainer.role,)
    local: list[AnyStep] = [*list_steps(trainer.root, step), *(each for each in nodes if step in (None, each.step))]
    there = remote_steps(remote, trainer.root, step, required=not choose(local, roles).steps)
    # With `strict`, a load must take the newest step or fail. So a step that lacks contents is not passed over.
    is_any_step_fine = step is not None or not trainer.config.strict
    needed = {trainer.role: trainer.config.load_contents} if is_any_step_fine else {}
    choice = choose([*there, *local], roles, needed)
    passed_over = [choice.reason(each) for each in choice.passed_over]
    if not choice.steps:
        what = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        advice = f"look at `mcore-ckpt list {trainer.root}`, and check root and role"
        reasons = "".join(f"\n  {reason}" for reason in passed_over)
        reasons += "" if remote is None else f"\n  {remote.store.url}: no complete checkpoint either"
        raise choice.error(f"{trainer.root}: {what} of {trainer.role}: {advice}{reasons}")
    if step is None:
        _check_newest(trainer, choice)
    choice.warn()
    candidates = candidates_of(trainer.role, choice.steps, tier)
    return {"candidates": candidates, "passed_over": passed_over, "last_resort": choice.last_resort, "foreign": None}


def _check_newest(trainer: Trainer, choice: Choice[AnyStep]) -> None:
    """Raises CheckpointCorruptError if a newer step lacks files, and `config.strict` forbids loading an older one.

    Otherwise logs a warning if the tracker does not name the step that the load tries first.
    """
    for step in choice.passed_over if trainer.config.strict else ():
        if step.is_claimed and step.lacks:
            raise CheckpointCorruptError(f"{choice.reason(step)}. Nothing has changed. To load another step, name it")
    warn_if_tracker_differs(trainer.root, choice.steps)


def _step_of(trainer: Trainer, path: Path) -> int | None:
    """Returns the step if `path` is a step's folder below the root, or this role's folder in a step; None otherwise."""
    for step_path in (path, path.parent):
        step = file_names.parse_step(step_path.name)
        if step is not None:
            with suppress(InvalidArgumentError):
                root = file_names.step_root(path, trainer.role, step)
                return step if root is not None and root.resolve() == trainer.root.resolve() else None
    return None


def _other(path: Path) -> str | None:
    """Returns a text that says what a path is and what to do instead; None if the path can be a role's folder."""
    name_role = "name the folder of a role, such as .../global_steps_100/actor"
    if path.exists() and not path.is_dir():
        return f"is a file: {name_role}"
    if not path.exists():
        return broken_link(path) or f"this folder does not exist: {name_role}"
    if os.path.lexists(path / file_names.MANIFEST_FILE):
        return None
    if is_hf_folder(path):
        return "is a HuggingFace model: load it with load_hf"
    if is_legacy(path):
        return "is a checkpoint in Megatron's legacy format, which this package does not read"
    if is_step(path):
        return "is the folder of a step: name the folder of a role in it"
    if step_folders(path):
        return f"is a folder of steps: {name_role}, or use load(step=...) of a manager with this root"
    return None


def _at_path(path: Path, lost: Sequence[str]) -> Record:
    """Describes the checkpoint in a folder, as JSON values.

    `lost` says why the nodes of the fast tier do not have the checkpoint.

    Raises CheckpointNotFoundError: there is no folder at this path, or the folder cannot be a role's folder.
    """
    # On file systems that cannot exchange folders, a crash may have left the checkpoint under another name. This call
    # renames the checkpoint back, unless the process that wrote the checkpoint may be alive. In that case the
    # checkpoint is read under its present name.
    if not path.is_dir():
        leftovers.remove_sibling_leftovers(path)
    foreign = kind_of(path)
    moved = None if foreign else find_moved_aside(path)
    if foreign is None and moved is None:
        other = _other(path)
        if other is not None:
            raise CheckpointNotFoundError(f"{path}: {other}" + "".join(f"\n  {reason}" for reason in lost))
    return {"candidates": [local_candidate(0, moved or path)], "foreign": foreign}
