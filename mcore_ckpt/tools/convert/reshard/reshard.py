"""Rewrites the roles of a step under another layout. All roles appear together, once all of them are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointError, CommitError, InvalidArgumentError
from mcore_ckpt.formats.companions import companions_of
from mcore_ckpt.formats.huggingface.tokenizer_size import tokens_in
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.io.files import make_folders, sync_folders_below, write_file
from mcore_ckpt.io.folder_sizes import sizes_below
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.steps.new_folder import mode_as
from mcore_ckpt.steps.new_step import NewStep, check_may_write
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.tools.convert.reshard.attention_heads import check_heads, config_beside
from mcore_ckpt.tools.convert.reshard.new_manifest import Identity, build_manifest
from mcore_ckpt.tools.convert.reshard.planner import PlannedFile, Planner
from mcore_ckpt.tools.convert.reshard.saved_tensors import saved_tensors
from mcore_ckpt.tools.convert.reshard.small_files import SmallFiles, checked_bytes, plan_small_files, write_small_files
from mcore_ckpt.tools.convert.reshard.streaming import write_planned_files
from mcore_ckpt.tools.convert.reshard.target import SavedLayout, Target, WantedLayout, resolve
from mcore_ckpt.tools.examine.select import Selection

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RoleReport:
    """The report of one role.

    Attributes:
        role: the role.
        source: the folder that was read.
        path: the folder that was written.
        saved: the layout of the checkpoint that was read.
        written: the layout of the new checkpoint.
        nbytes: the size of all written files in bytes.
        files: the number of written files.
        reseeded: True if the random number generators start from the saved seed instead of their saved states.
    """

    role: str
    source: Path
    path: Path
    saved: Topology
    written: Topology
    nbytes: int
    files: int
    reseeded: bool


@dataclass(frozen=True)
class ReshardReport:
    """The report of one reshard.

    Attributes:
        step: the step.
        roles: the reports of the roles that have a model.
        seconds: how long the reshard took.
        beside: the names of what the trainer keeps beside the roles. It was copied as it is.
    """

    step: int
    roles: tuple[RoleReport, ...]
    seconds: float
    beside: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of all written files in bytes."""
        return sum(role.nbytes for role in self.roles)


@dataclass(frozen=True, eq=False)
class _Job:
    """The planned and checked rewrite of one role that has a model.

    Attributes:
        reader: the reader of the saved checkpoint.
        source: its folder.
        role_dir: the folder to write.
        target: the layout to write.
        files: the files with tensors.
        small: the other files.
    """

    reader: NativeReader
    source: Path
    role_dir: Path
    target: Target
    files: list[PlannedFile]
    small: SmallFiles

    @property
    def nbytes(self) -> int:
        """The size of the tensors to write in bytes."""
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True)
class _FilesRole:
    """A role that consists of plain files (`steps/role_files.py`). It has no layout, so its files are copied.

    Attributes:
        source: its folder.
        manifest: its manifest.
    """

    source: Path
    manifest: Manifest


def reshard(
    selection: Selection,
    root: Path,
    wanted: WantedLayout,
    progress: Progress = lambda done, total: None,
    force: bool = False,
) -> ReshardReport:
    """Rewrites a step into another folder of steps, under another layout.

    It checks everything that it can check before it writes a byte. Meanwhile no trainer can save below `root`. If the
    CRC of a block that it reads is wrong, it stops and removes what it has written.

    Args:
        selection: the checkpoints to rewrite, from `select`.
        root: the folder of all steps to write into; it must differ from the one that is read.
        wanted: the wanted layout.
        progress: called with the number of bytes written so far and the number to write in all.
        force: True to replace checkpoints of the same step and roles, once all roles are written. A pinned step stays.

    Raises:
        InvalidArgumentError: the sizes contradict each other, or the new checkpoint would replace the one that is read,
            a pinned one, or any without `force`.
        LockedError: a trainer saves below `root`.
        CheckpointError: the checkpoint is damaged or does not fit the layout, or the new one cannot be written. `root`
            has no new complete step.

    Example:
        >>> reshard(select(Path("ckpt")), Path("ckpt_tp4"), WantedLayout(tp=4))  # doctest: +SKIP
    """
    with reading(selection.role_dirs):  # a trainer that still runs could delete the step
        return _reshard(selection, root.absolute(), wanted, force, progress)


def _reshard(selection: Selection, root: Path, wanted: WantedLayout, force: bool, progress: Progress) -> ReshardReport:
    started = time.monotonic()
    found = {source: read_manifest(source) for source in selection.role_dirs}
    _check_root(found, selection.step, root)
    check_may_write(root, selection.step, [manifest.role for manifest in found.values()], force)
    jobs = [_plan(source, root, selection.step, wanted) for source, manifest in found.items() if manifest.stages]
    copies = [_FilesRole(source, manifest) for source, manifest in found.items() if not manifest.stages]
    try:
        beside = companions_of(_step_of(selection))
        reports = _write_all(jobs, copies, beside, root, selection.step, force, progress)
    except OSError as error:
        raise CommitError(f"{root}: step {selection.step} could not be written: {error}") from error
    return ReshardReport(selection.step, tuple(reports), time.monotonic() - started, tuple(beside))


def _step_of(selection: Selection) -> Path | None:
    """Returns the folder of the step that is read; None if the checkpoint is in no step."""
    role_dir = selection.role_dirs[0]
    return next((each for each in (role_dir, role_dir.parent) if file_names.parse_step(each.name) is not None), None)


def _check_root(found: Mapping[Path, Manifest], step: int, root: Path) -> None:
    for source, manifest in found.items():
        role_dir = file_names.step_dir(root, step) / manifest.role
        if root.resolve() in (source.parent, source.parent.parent) or (role_dir.exists() and role_dir.samefile(source)):
            raise InvalidArgumentError(
                f"{root}: the checkpoint is read from this folder: name another folder to write to"
            )


def _plan(source: Path, root: Path, step: int, wanted: WantedLayout) -> _Job:
    manifest = read_manifest(source)
    role_dir = file_names.step_dir(root, step) / manifest.role
    reader, saved = NativeReader(LocalFolder(source), manifest), SavedLayout.of(manifest)
    try:
        tensors = list(saved_tensors(reader))
        target = resolve(wanted, saved, any(tensor.expert for tensor in tensors))
        check_heads(manifest.model or {}, config_beside(source), tensors, manifest.topology, target.topology)
        planner = Planner(reader, saved, manifest.contents, tensors, target, wanted)
        planner.check_tokens(tokens_in(source / file_names.HUGGINGFACE_DIR))
        files = planner.files()
        small = plan_small_files(source, reader, target.topology)
    except CheckpointError as error:
        raise type(error)(f"{source}: {error}") from error
    return _Job(reader, source, role_dir, target, files, small)


def _write_all(
    jobs: Sequence[_Job],
    copies: Sequence[_FilesRole],
    beside: Mapping[str, Path],
    root: Path,
    step: int,
    force: bool,
    progress: Progress,
) -> list[RoleReport]:
    total = sum(job.nbytes for job in jobs)
    done = [0]

    def wrote(nbytes: int) -> None:
        done[0] = min(total, done[0] + nbytes)
        progress(done[0], total)

    roles = tuple(sorted([*(job.reader.manifest.role for job in jobs), *(copy.manifest.role for copy in copies)]))
    reports = []
    mode = mode_as(*(job.source for job in jobs), *(copy.source for copy in copies))
    with NewStep(root, step, roles, force, mode=mode) as new:
        new.check_space(_sizes(jobs, copies, beside.values()))
        new.add_companions(beside)
        for copy in copies:
            staging = new.open(copy.manifest.role)
            _copy_files(copy, staging)
            new.write_manifest(replace(copy.manifest, roles=roles, attempt=new.attempt))
        for job in jobs:
            staging = new.open(job.reader.manifest.role)
            manifest = _write_role(job, staging, roles, new.attempt, wrote)
            new.write_manifest(manifest)
            reports.append(_report(job, manifest))
        new.publish()
    return reports


def _copy_files(role: _FilesRole, staging: Path) -> None:
    for file in role.manifest.files:
        make_folders(staging, file.path)
        write_file(staging / file.path, checked_bytes(role.source, file))
    sync_folders_below(staging)


def _write_role(
    job: _Job, staging: Path, roles: tuple[str, ...], attempt: str, progress: Callable[[int], None]
) -> Manifest:
    indexed = list(write_planned_files(job.reader.read, job.files, staging, progress))
    small = list(write_small_files(job.source, job.small, staging))
    sync_folders_below(staging)
    saved = job.reader.manifest
    # Keep the megatron version of the training. This process may have another one, or none.
    versions = {name: version for name, version in saved.versions.items() if name == "megatron_core"}
    identity = Identity(saved.step, saved.role, roles, attempt, saved.contents, versions, saved.adapters, saved.model)
    return build_manifest(identity, job.target, indexed, small)


def _sizes(jobs: Sequence[_Job], copies: Sequence[_FilesRole], beside: Iterable[Path]) -> Iterator[int]:
    for path in beside:
        yield from sizes_below(path).values() if path.is_dir() else [path.stat().st_size]
    for job in jobs:
        yield from (file.nbytes for file in job.files)
        yield from (copy.record.size for copy in job.small.copies)
    for role in copies:
        yield from (file.size for file in role.manifest.files)


def _report(job: _Job, manifest: Manifest) -> RoleReport:
    return RoleReport(
        role=manifest.role,
        source=job.source,
        path=job.role_dir,
        saved=job.reader.manifest.topology,
        written=job.target.topology,
        nbytes=manifest.nbytes,
        files=len(manifest.files),
        reseeded=bool(job.small.seeded),
    )
