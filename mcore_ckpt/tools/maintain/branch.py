"""Makes a fork: a new folder of steps that begins with a copy of one step, as a run of its own.

The run's parent is the step, and the copy is the first commit of the run. So a training that is started with the new
folder goes on from the step, and neither its saves nor its retention can reach the folder that the step came from.

The files of a checkpoint never change (a save, too, writes new files and renames them), so the copy shares them as hard
links where the file system can do that. Other programs may write to their files at any time, and the trainer's own code
opens the files of parts, so these are copied. Metrics that were set after the save are put into the new manifest.

The manifests are enough to find the run again, and `.run.json` is written last. A process that dies before the first
rename leaves a staging folder, which the next try or the next trainer removes. If it dies between the renames of two
roles, the step is not complete, and the next try adds the roles that are missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.damage import Damage, find_damage, verify_files
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.provenance import Commit, Run, RunParent
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CommitError, InvalidArgumentError
from mcore_ckpt.formats.companions import companions_of
from mcore_ckpt.io.file_copies import clone_file, copy_checked, copy_durably, link_file
from mcore_ckpt.io.files import inside, make_folders, sync_file, sync_folders_below
from mcore_ckpt.io.folder_sizes import sizes_below
from mcore_ckpt.steps.later_metrics import metrics_of
from mcore_ckpt.steps.listing import StepStatus, holds_something, is_step, list_steps
from mcore_ckpt.steps.new_folder import mode_as
from mcore_ckpt.steps.new_step import NewStep
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.steps.runs import forked, read_root_run, settle
from mcore_ckpt.tools.examine.progress import Progress, summed
from mcore_ckpt.tools.examine.select import select
from mcore_ckpt.tools.maintain.copies import Count, copy_all

# How many damages a message names.
_NAMED = 3


@dataclass(frozen=True)
class BranchedRole:
    """The report of one role.

    Attributes:
        role: the role.
        source: the folder that was read.
        path: the new folder.
        files, nbytes: number and size in bytes of its files.
        linked: how many of the files are hard links, so that both folders share them.
    """

    role: str
    source: Path
    path: Path
    files: int
    nbytes: int
    linked: int


@dataclass(frozen=True)
class BranchReport:
    """The report of `branch`.

    Attributes:
        step: the step.
        run: the new run. Its parent is the step that it begins with.
        roles: the roles that were written.
        beside: the paths, below the step's folder, of other programs' files and folders, which were copied.
        seconds: how long it took.
    """

    step: int
    run: Run
    roles: tuple[BranchedRole, ...]
    beside: tuple[str, ...]
    seconds: float

    @property
    def nbytes(self) -> int:
        """The size of all files of the roles in bytes."""
        return sum(role.nbytes for role in self.roles)


def branch(
    root: Path,
    step: int,
    new_root: Path,
    *,
    test: bool = False,
    progress: Progress = lambda done, total: None,
) -> BranchReport:
    """Begins a new folder of steps with a copy of one complete step, with all its roles, as a run of its own.

    Meanwhile no trainer can save below `new_root`, and no retention deletes the step.

    Args:
        root: the folder of the steps that has the step. Nothing in it changes.
        step: the step.
        new_root: the new folder of steps. It may be there, but it must have neither steps nor a run, unless an
            interrupted call for the same checkpoints has left them.
        test: True to read all files first, and to check their CRCs. Otherwise only their sizes are checked.
        progress: called, on several threads, with the number of bytes done so far and the number in all.

    Raises:
        InvalidArgumentError: `new_root` may not be used, or `root` is no folder of steps.
        CheckpointNotFoundError: the step is not there, or is not complete.
        CheckpointCorruptError: a file of the step is missing or damaged.
        LockedError: a trainer saves below `new_root`.
        NoRoomError: the files do not fit.
        CommitError: the step cannot be written. `new_root` is as it was.

    Example:
        >>> branch(Path("checkpoints"), 100, Path("other_rewards")).run.parent  # doctest: +SKIP
        RunParent(run='5f0c...', step=100)
    """
    started = time.monotonic()
    root, new_root = root.absolute(), new_root.absolute()
    status = _source(root, step)
    with reading(map(status.role_dir, status.committed)):
        found = {role: read_manifest(status.role_dir(role)) for role in sorted(status.committed)}
        run, roles = _begin(root, status, found, new_root)
        count = summed(progress, (1 + test) * sum(manifest.nbytes for manifest in found.values()))
        _check_files(status, found, test, count)
        try:
            reports, beside = _write(status, {role: found[role] for role in roles}, new_root, run, count)
        except OSError as error:
            raise CommitError(f"{new_root}: step {step} could not be written: {error}") from error
    return BranchReport(step, run, tuple(reports), tuple(beside), time.monotonic() - started)


def _source(root: Path, step: int) -> StepStatus:
    if is_step(root.resolve()) or (root / file_names.MANIFEST_FILE).exists():
        raise InvalidArgumentError(f"{root}: is one checkpoint: name the folder of steps that it is in")
    select(root, step)  # raises the errors of a step that is missing, incomplete or divided among nodes
    (status,) = list_steps(root, step)
    return status


def _begin(
    root: Path, status: StepStatus, found: Mapping[str, Manifest], new_root: Path
) -> tuple[Run, tuple[str, ...]]:
    """Returns the run of the new root, and the roles that it lacks. Raises InvalidArgumentError if it may not be used.

    An interrupted call may have put some roles in place. They are of the run that it has begun.
    """
    if new_root.exists() and new_root.samefile(root):
        raise InvalidArgumentError(f"{new_root}: has the step itself: name another folder")
    if new_root.resolve().is_relative_to(status.path.resolve()):
        raise InvalidArgumentError(f"{new_root}: is in the step itself: name a folder outside of it")
    if os.path.lexists(new_root / file_names.RUN_FILE):
        known = read_root_run(new_root)
        raise InvalidArgumentError(
            f"{new_root}: belongs to {'a run' if known is None else known.run} already: a fork begins a folder of "
            "its own, so name another one"
        )
    manifest = next(iter(found.values()))
    own = read_root_run(root)
    of = manifest.run or (None if own is None else own.run)
    parent = RunParent("" if of is None else of.id, status.step)
    there = [each for each in list_steps(new_root) if holds_something(each)]
    if not there and not os.path.lexists(new_root / file_names.TRACKER_FILE):
        return forked(new_root, parent), tuple(found)
    runs = {head.run for each in there for head in each.heads}
    left = [role for role in found if not any(role in each.committed for each in there)]
    if len(there) == len(runs) == 1 and left:
        run = runs.pop()
        copied = all(head.commit == _commit_of(found.get(head.role)) for head in there[0].heads)
        if copied and run is not None and run.parent == parent and there[0].path.name == status.path.name:
            return run, tuple(left)
    what = f"the step {there[0].path.name}" if there else f"the tracker {file_names.TRACKER_FILE}"
    raise InvalidArgumentError(
        f"{new_root}: has {what} already: a fork begins a folder of its own, so name another one"
    )


def _commit_of(source: Manifest | None) -> Commit | None:
    return None if source is None else Commit(1, source.attempt, ((1, 1),))


def _check_files(status: StepStatus, found: Mapping[str, Manifest], test: bool, count: Count) -> None:
    damages: list[Damage] = []
    for role, manifest in found.items():
        role_dir = status.role_dir(role)
        damages += verify_files(role_dir, manifest.files, count) if test else find_damage(role_dir, False)
    if damages:
        more = f"\n  and {len(damages) - _NAMED} more" if len(damages) > _NAMED else ""
        named = "".join(f"\n  {damage.problem}" for damage in damages[:_NAMED])
        raise CheckpointCorruptError(f"{status.path}: is damaged, so nothing was written:{named}{more}")


def _write(
    status: StepStatus, found: Mapping[str, Manifest], new_root: Path, run: Run, count: Count
) -> tuple[list[BranchedRole], list[str]]:
    sources = {role: status.role_dir(role) for role in found}
    is_flat = status.flat is not None
    beside = {} if is_flat else companions_of(status.path)
    inside_roles = {role: companions_of(source) for role, source in sources.items()}
    copied = [path for folder in (beside, *inside_roles.values()) for path in folder.values()]
    mode, path = mode_as(*sources.values()), new_root / status.path.name
    reports, heads = [], []
    with NewStep(new_root, status.step, list(found), run=run, mode=mode, path=path, is_flat=is_flat) as new:
        shares = all(source.stat().st_dev == new_root.stat().st_dev for source in sources.values())
        shared = [] if shares else [file.size for manifest in found.values() for file in manifest.files]
        new.check_space([*shared, *(size for each in copied for size in _sizes(each))])
        new.add_companions(beside)
        for role, manifest in found.items():
            staging = new.open(role)
            linked = sum(copy_all(manifest.files, partial(_put, sources[role], staging, shares), count))
            for name, source in inside_roles[role].items():
                copy_durably(source, staging / name)
            sync_folders_below(staging)
            made = replace(
                manifest,
                attempt=new.attempt,
                run=run,
                commit=_commit_of(manifest),
                placement=None,
                metrics=metrics_of(sources[role], manifest),
            )
            new.write_manifest(made)
            heads.append(made.head)
            where = new.role_dir(role)
            reports.append(BranchedRole(role, sources[role], where, len(manifest.files), manifest.nbytes, linked))
        new.publish()
        # If this process dies here, the first save writes the file, because the manifests name the run.
        settle(new_root, new_root, heads, None, None)
    return reports, [str(path.relative_to(status.place)) for path in copied]


def _sizes(path: Path) -> list[int]:
    return list(sizes_below(path).values()) if path.is_dir() else [path.stat().st_size]


def _put(source: Path, staging: Path, shares: bool, file: FileRecord, count: Count) -> bool:
    """Puts one file in place, durably except for the names of its folders. Returns True for a hard link.

    `shares` says whether both folders are on one file system. A part's file is no hard link, because the trainer's code
    gets its path.
    """
    # A link would be linked itself, not its target.
    found, target = Path(os.path.realpath(inside(source, file.path))), staging / file.path
    make_folders(staging, file.path)
    if not shares:
        copy_checked(found, target, file.size, file.crc32, count)
        return False
    (clone_file if file.kind == "part" else link_file)(found, target)
    count(file.size)
    if found.samefile(target):
        return True
    sync_file(target)
    return False
