"""Makes a fork: a new run, in a new folder of steps, that begins with a copy of one step.

The copied step is the parent of the new run, and the copy is the run's first commit. So a training that is started with
the new folder goes on from the step, and its saves and its retention cannot change the old folder.

This package never changes a file of a checkpoint (a save writes new files and renames them), so the copy shares the
checkpoint's files as hard links if the file system allows hard links. The files of other programs and of parts are
copied, because other programs and the trainer's own code may write to them. Metrics that were set after the save
are put into the new manifest.

`.run.json` is written last. A call refuses a root that has this file, so if it were written first, no later call could
finish an interrupted call. Until the file is written, the manifests name the run. If the process dies before the first
rename, it leaves a staging folder, which the next call or the next trainer removes. If it dies between the renames of
two roles, the step is not complete, and the next call adds the missing roles.
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
from mcore_ckpt.steps.listing import StepStatus, holds_something, is_of_attempt, is_step, list_steps
from mcore_ckpt.steps.new_folder import mode_as
from mcore_ckpt.steps.new_step import NewStep
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.steps.runs import forked, read_root_run, settle
from mcore_ckpt.tools.examine.progress import Progress, summed
from mcore_ckpt.tools.examine.select import select
from mcore_ckpt.tools.maintain.copies import Count, copy_all

# A message lists at most this many damages.
_NAMED = 3


@dataclass(frozen=True)
class BranchedRole:
    """The report of one role.

    Attributes:
        source: the role's folder in the old step.
        path: the role's folder in the new step.
        files, nbytes: the number of the role's files, and their size in bytes.
        linked: how many of the files are hard links that both folders share.
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
        step: the step that was copied.
        run: the new run. Its parent is the step that was copied.
        roles: the roles that were written.
        beside: the copied files and folders of other programs, as paths below the step's folder.
        seconds: the duration of the call.
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
    """Begins a new run in a new folder of steps, with a copy of one complete step and all its roles.

    During the call, no trainer can save below `new_root`, and retention does not delete the step.

    Args:
        root: the folder of steps that has the step. It is not changed.
        step: the step to copy.
        new_root: the new folder of steps. It may exist, but it must not have steps or a run, unless an interrupted
            call made them from the same checkpoints.
        test: True to read all files first and check their CRCs. Otherwise only the files' sizes are checked.
        progress: called, on several threads, with the number of bytes done so far and the number of all bytes.

    Raises:
        InvalidArgumentError: `new_root` must not be used, or `root` is not a folder of steps.
        CheckpointNotFoundError: the step is missing or not complete.
        CheckpointCorruptError: a file of the step is missing or damaged.
        LockedError: a trainer saves below `new_root`.
        NoRoomError: the files do not fit.
        CommitError: the step cannot be written, or was saved again meanwhile. `new_root` is as it was.

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
        raise InvalidArgumentError(f"{root}: is one checkpoint: name the folder of steps that has it")
    select(root, step)  # raises an error if the step is missing, incomplete or divided among nodes
    (status,) = list_steps(root, step)
    return status


def _begin(
    root: Path, status: StepStatus, found: Mapping[str, Manifest], new_root: Path
) -> tuple[Run, tuple[str, ...]]:
    """Returns the run of the new root, and the roles that are missing there.

    An interrupted call may have put some roles in place. These roles belong to the run that the call has begun.

    Raises InvalidArgumentError if the new root must not be used.
    """
    if new_root.exists() and new_root.samefile(root):
        raise InvalidArgumentError(f"{new_root}: is the folder that has the step: name another folder")
    if new_root.resolve().is_relative_to(status.path.resolve()):
        raise InvalidArgumentError(f"{new_root}: is inside the step: name a folder outside of the step")
    if os.path.lexists(new_root / file_names.RUN_FILE):
        known = read_root_run(new_root)
        raise InvalidArgumentError(
            f"{new_root}: belongs to {'a run' if known is None else known.run} already, but a fork needs a "
            "new folder: name another folder"
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
    raise InvalidArgumentError(f"{new_root}: has {what} already, but a fork needs a new folder: name another folder")


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
    inside_roles = {role: _not_listed(sources[role], manifest) for role, manifest in found.items()}
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
        _check_unchanged(sources, found)
        new.publish()
        # If this process dies here, the first save of a trainer writes `.run.json`, because the manifests name the run.
        settle(new_root, new_root, heads, None, None)
    return reports, [str(path.relative_to(status.place)) for path in copied]


def _check_unchanged(sources: Mapping[str, Path], found: Mapping[str, Manifest]) -> None:
    """Raises CommitError if a role was saved again since its manifest was read.

    The copied files could then come from both saves. The read lock keeps other processes from deleting the step, but
    the step's trainer may save the step again.
    """
    for role, manifest in found.items():
        if not is_of_attempt(sources[role], manifest.attempt):
            raise CommitError(
                f"{sources[role]}: was saved again or has changed while it was copied, so nothing was written: call "
                "branch again once no trainer saves this step"
            )


def _not_listed(role_dir: Path, manifest: Manifest) -> dict[str, Path]:
    """Returns the files and folders in a role's folder that are from other programs and not in the role's manifest."""
    listed = {file.path.partition("/")[0] for file in manifest.files}
    return {name: path for name, path in companions_of(role_dir).items() if name not in listed}


def _sizes(path: Path) -> list[int]:
    return list(sizes_below(path).values()) if path.is_dir() else [path.stat().st_size]


def _put(source: Path, staging: Path, shares: bool, file: FileRecord, count: Count) -> bool:
    """Puts one file in place. Makes its bytes durable, but not its name. Returns True for a hard link.

    `shares` is True if both folders are on one file system. A part's file is cloned or copied, not linked, because
    the trainer's code may write to it.
    """
    # Follow symbolic links first, because `os.link` would link a symbolic link itself, not its target.
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
