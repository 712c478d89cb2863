"""Puts the folders of several nodes of the fast tier together into an ordinary checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, CommitError, InvalidArgumentError
from mcore_ckpt.io.file_copies import copy_checked
from mcore_ckpt.io.files import inside, make_folders, sync_folders_below
from mcore_ckpt.steps.choice import oldest_first
from mcore_ckpt.steps.new_folder import mode_as
from mcore_ckpt.steps.new_step import NewStep
from mcore_ckpt.steps.node_files import files_among
from mcore_ckpt.steps.node_steps import (
    FastCheckpoint,
    HeldRole,
    NodeStep,
    Runs,
    fast_checkpoints,
    held_roles,
    in_order_of_saves,
)
from mcore_ckpt.steps.runs import Ownership, elsewhere
from mcore_ckpt.tools.examine.progress import Progress, no_progress, summed
from mcore_ckpt.tools.maintain.copies import Count, copy_all


@dataclass(frozen=True)
class MissingFiles:
    """Files of a role that are in none of the folders, and the nodes that should have these files."""

    role: str
    nodes: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class RoleSource:
    """One role of a step, and the places of its files.

    `folders` are the role's folders on the nodes. Each folder is listed with the numbers of its files (positions in the
    manifest's list).
    """

    manifest: Manifest
    folders: tuple[tuple[Path, Runs], ...]

    def folders_of(self, number: int) -> list[Path]:
        """Returns the folders that have the file with this number."""
        return [folder for folder, has in self.folders if any(first <= number <= last for first, last in has)]


@dataclass(frozen=True)
class FoundStep:
    """One step, put together from all folders.

    `missing` are the files that are in none of the folders. `problems` are sentences on everything else that keeps the
    step from being whole.
    """

    step: int
    roles: tuple[RoleSource, ...]
    missing: tuple[MissingFiles, ...]
    problems: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """True if a checkpoint can be made of the folders."""
        return not self.missing and not self.problems


@dataclass(frozen=True)
class CollectedRole:
    """The report of one role: its new folder, and the number and size of its files.

    `damaged` has one error for each copy of a file that could not be used. The file was then taken from another folder.
    """

    role: str
    path: Path
    files: int
    nbytes: int
    damaged: tuple[str, ...]


@dataclass(frozen=True)
class CollectReport:
    """The report of `collect`."""

    step: int
    roles: tuple[CollectedRole, ...]
    seconds: float

    @property
    def nbytes(self) -> int:
        return sum(role.nbytes for role in self.roles)


def find_steps(folders: Sequence[Path], step: int | None = None, root: Path | None = None) -> list[FoundStep]:
    """Returns the steps that the folders of several nodes have together, the newest first, abandoned steps last.

    Args:
        folders: the folder that `FastTier.folder` named on each node.
        step: the only step to look for; None for all.
        root: the folder of steps into which a step will be collected. If the folders have steps of several runs, only
            the steps of the root's run are found.

    Raises:
        InvalidArgumentError: `root` has steps of a run, and the folders have no step of that run; or the folders have
            steps of several runs, the run of `root` is not known, and none of these runs has saved to the path of
            `root`.
        CheckpointNotFoundError: no folder has a step of the fast tier, or no folder has this step.
        OSError: a folder cannot be read.
    """
    held = [held_roles(folder) for folder in folders]
    found = [each for each in fast_checkpoints(enumerate(held)) if step in (None, each.step)]
    if not found:
        there = ", ".join(map(str, folders))
        what = "a step of the fast tier" if step is None else f"step {step} of the fast tier"
        raise CheckpointNotFoundError(
            f"{there}: none of these folders has {what}: name the folders of the fast tier on the nodes "
            "(FastTier.folder), or copies of these folders"
        )
    found = _of_one_run(found, root)
    placed = [NodeStep(each.step, (each.head,), is_committed=each.is_committed) for each in found]
    numbers = dict.fromkeys(each.step for each in oldest_first(placed)[::-1])
    return [_step(number, [each for each in found if each.step == number], folders, held) for number in numbers]


def _of_one_run(found: list[FastCheckpoint], root: Path | None) -> list[FastCheckpoint]:
    there = {each.head.run.id: each.head.run for each in found if each.head.run is not None}
    own = Ownership() if root is None else elsewhere(root)
    if own.known is None and len(there) < 2:
        return found
    ours = [each for each in found if own.owns(each.head)]
    if own.known is None and (root is None or all(each.head.run is None for each in ours)):
        raise InvalidArgumentError(
            f"the folders have steps of several runs ({', '.join(map(str, there.values()))}): collect into the root of "
            "one of them"
        )
    if own.known is not None and not ours:
        raise InvalidArgumentError(
            f"{root}: belongs to {own.known.run}, but the folders have steps of {', '.join(map(str, there.values()))}: "
            "name another folder to write to"
        )
    return ours


def choose(steps: Sequence[FoundStep]) -> FoundStep | None:
    """Returns the newest whole step; None if no step is whole."""
    return next((step for step in steps if step.is_whole), None)


def _step(
    number: int, found: Sequence[FastCheckpoint], folders: Sequence[Path], held: Sequence[Sequence[HeldRole]]
) -> FoundStep:
    by_role: dict[str, FastCheckpoint] = {}
    last_first = in_order_of_saves(found)[::-1]
    for each in sorted(last_first, key=lambda each: (not each.is_complete, not each.is_committed, len(each.missing))):
        by_role.setdefault(each.role, each)
    sources = {role: _source(each, folders, held) for role, each in sorted(by_role.items())}
    declared = {role for each in by_role.values() for role in each.head.roles}
    problems = [f"{role}: is in none of the folders" for role in sorted(declared - by_role.keys())]
    problems += [
        f"{role}: is committed in none of the folders, so its save did not finish, or the folders of more nodes are "
        "needed"
        for role, each in sorted(by_role.items())
        if not each.is_committed
    ]
    problems += [
        f"{role}: belongs to a branch that another role of the step has given up"
        for role in sorted(NodeStep(number, tuple(each.head for each in by_role.values())).given_up)
    ]
    missing = [lacks for role, each in sorted(by_role.items()) for lacks in _missing(sources[role].manifest, each)]
    return FoundStep(number, tuple(sources.values()), tuple(missing), tuple(problems))


def _source(found: FastCheckpoint, folders: Sequence[Path], held: Sequence[Sequence[HeldRole]]) -> RoleSource:
    places = []
    for number, has in found.holders:
        role_dir = file_names.step_dir(folders[number], found.step) / found.role
        heads = [each.head for each in held[number] if each.is_committed]
        is_committed = any((head.role, head.attempt) == (found.role, found.attempt) for head in heads)
        places.append((role_dir if is_committed else file_names.staging_dir(role_dir, found.attempt), has))
    return RoleSource(read_manifest(places[0][0]), tuple(places))


def _missing(manifest: Manifest, found: FastCheckpoint) -> Iterator[MissingFiles]:
    there = set(range(found.files)) - set(found.missing)
    for nodes, files in files_among(manifest, there).by_nodes():
        yield MissingFiles(found.role, nodes, tuple(file.path for file in files))


def collect(found: FoundStep, root: Path, progress: Progress = no_progress, force: bool = False) -> CollectReport:
    """Copies a whole step into a folder of steps, as an ordinary checkpoint.

    The result equals the checkpoint that a save to `root` would have written. Each file is read once, and its CRC is
    checked. If a file is damaged in one folder, the file is taken from the next folder that has a copy. During the
    copy, no trainer can save below `root`.

    Args:
        found: the step, which must be whole.
        root: the folder of steps to write into.
        force: True to replace the step in `root`, once the new step is written. A pinned step is refused.

    Raises:
        InvalidArgumentError: `root` is one of the nodes' folders, or has the step already and `force` is False, or the
            step in `root` is pinned.
        LockedError: a trainer saves below `root`.
        NoRoomError: the files do not fit.
        CheckpointCorruptError: a file is damaged in every folder that has it. `root` is as it was.
        CommitError: the checkpoint cannot be written. `root` is as it was.

    Example:
        >>> collect(choose(find_steps([Path("node0"), Path("node1")])), Path("checkpoints"))  # doctest: +SKIP
    """
    started = time.monotonic()
    root = root.absolute()
    if root.resolve() in {folder.parent.parent.resolve() for source in found.roles for folder, _ in source.folders}:
        raise InvalidArgumentError(f"{root}: is the folder of a node: name another folder to write to")
    try:
        roles = _write(found, root, force, progress)
    except OSError as error:
        raise CommitError(f"{root}: step {found.step} could not be written: {error}") from error
    return CollectReport(found.step, tuple(roles), time.monotonic() - started)


def _write(found: FoundStep, root: Path, force: bool, progress: Progress) -> list[CollectedRole]:
    files = [file for source in found.roles for file in source.manifest.files]
    count = summed(progress, sum(file.size for file in files))
    reports = []
    roles, run = [source.manifest.role for source in found.roles], found.roles[0].manifest.run
    mode = mode_as(*(folder for source in found.roles for folder, _ in source.folders))
    with NewStep(root, found.step, roles, force, run, mode) as new:
        new.check_space(file.size for file in files)
        for source in found.roles:
            staging = new.open(source.manifest.role)
            numbers = range(len(source.manifest.files))
            reasons = copy_all(numbers, partial(_copy, source, staging), count)
            damaged = [reason for of_file in reasons for reason in of_file]
            sync_folders_below(staging)
            manifest = replace(source.manifest, placement=None)
            new.write_manifest(manifest)
            role_dir = file_names.step_dir(root, found.step) / manifest.role
            reports.append(CollectedRole(manifest.role, role_dir, len(manifest.files), manifest.nbytes, tuple(damaged)))
        new.publish()
    return reports


def _copy(source: RoleSource, staging: Path, number: int, count: Count) -> list[str]:
    """Copies one file from the first folder in which it is intact. Returns the errors of the folders tried before."""
    file = source.manifest.files[number]
    target = staging / file.path
    make_folders(staging, file.path)
    damaged: list[str] = []
    for folder in source.folders_of(number):
        try:
            _copy_from(folder, file, target, count)
            return damaged
        except (CheckpointCorruptError, OSError) as error:
            if isinstance(error, OSError) and str(error.filename) == str(target):
                raise
            target.unlink(missing_ok=True)
            damaged.append(str(error))
    reasons = "".join(f"\n  {reason}" for reason in damaged)
    raise CheckpointCorruptError(
        f"{file.path} of {source.manifest.role} is intact in none of the folders: add the folder of another node with "
        f"a copy of this file, or collect an older step with --step{reasons}"
    )


def _copy_from(folder: Path, file: FileRecord, target: Path, count: Callable[[int], None]) -> None:
    copied = 0

    def count_copied(nbytes: int) -> None:
        nonlocal copied
        copied += nbytes
        count(nbytes)

    try:
        copy_checked(inside(folder, file.path), target, file.size, file.crc32, count_copied)
    except (CheckpointCorruptError, OSError):
        count(-copied)
        raise
