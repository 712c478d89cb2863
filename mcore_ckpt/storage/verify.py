"""Whether a committed checkpoint is what was written: structure, sizes, every byte, and all that its topology needs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt import layout
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.sharding.plan import MODEL, PARAM, ShardKey, StoredShard, plan_reads
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.storage import steps
from mcore_ckpt.storage.catalog import Catalog
from mcore_ckpt.storage.checksums import block_crcs, file_crcs
from mcore_ckpt.storage.index import BLOCK_BYTES
from mcore_ckpt.storage.manifest import FileRecord, Manifest
from mcore_ckpt.storage.reader import open_file, read_index, read_manifest

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Damage:
    """Something that is not as it was written.

    Attributes:
        problem: what, and in which path.
        file: below the role's folder, if it is in one file.
        rank: the world rank that wrote the file.
        tensor: whose bytes they are, if they are a tensor's.
        span: `[start, stop)` in bytes of the file, if it is known.
    """

    problem: str
    file: str | None = None
    rank: int | None = None
    tensor: str | None = None
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Verdict:
    """What was found of one role of one step; `files` and `nbytes` are the manifest's."""

    path: Path
    files: int
    nbytes: int
    damages: tuple[Damage, ...]


@dataclass(frozen=True)
class Report:
    """What was found of all that was looked at.

    Attributes:
        roles: of each role of each step.
        problems: of steps that are not complete, and of the tracker.
        seconds: it took.
    """

    roles: tuple[Verdict, ...]
    problems: tuple[str, ...]
    seconds: float

    @property
    def is_sound(self) -> bool:
        return not self.problems and not any(verdict.damages for verdict in self.roles)


def verify_role(
    role_dir: Path,
    deep: bool = False,
    progress: Progress = lambda nbytes: None,
) -> Verdict:
    """Reads all of a checkpoint once (with `deep`, its tensors twice).

    Args:
        role_dir: its folder.
        deep: look at every file as torch sees it, too: the same tensors, of the same bytes, under `weights_only`.
        progress: told of bytes read, from several threads.
    """
    try:
        manifest = read_manifest(role_dir, layout.MANIFEST_FILE)
    except (CheckpointCorruptError, CheckpointNotFoundError) as error:
        return Verdict(role_dir, 0, 0, (Damage(str(error), layout.MANIFEST_FILE),))
    damages = [*_missing_files(role_dir, manifest), *verify_files(role_dir, manifest.files, progress)]
    if not damages:
        damages += _incomplete_tensors(role_dir, manifest)
    if deep and not damages:
        from mcore_ckpt.storage.verify_deep import as_torch_sees_it

        damages += [damage for file in manifest.files for damage in as_torch_sees_it(role_dir, file)]
    return Verdict(role_dir, len(manifest.files), manifest.nbytes, tuple(damages))


def verify_files(role_dir: Path, files: Sequence[FileRecord], progress: Progress = lambda nbytes: None) -> list[Damage]:
    """Reads files of a checkpoint whole, and says where they are not what the manifest says."""
    damages, sound = list[Damage](), list[FileRecord]()
    for file in files:
        try:
            with open_file(role_dir, file):
                sound.append(file)
        except CheckpointCorruptError as error:
            damages.append(Damage(str(error), file.path, file.rank))
    crcs = file_crcs([(role_dir / file.path, file.size) for file in sound], progress)
    for file, crc in zip(sound, crcs, strict=True):
        if isinstance(crc, OSError):
            damages.append(_of(file, f"{role_dir / file.path}: cannot be read: {crc.strerror}"))
        elif crc != file.crc32:
            damages += _locate(role_dir, file)
    return damages


def verify(
    path: Path,
    step: int | None = None,
    deep: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Verifies the checkpoints that a path stands for, also those that do not count: they are said to be incomplete.

    Args:
        path: the folder of a role, of a step (all its roles), or of the steps (all of them, and the tracker).
        step: which one, below a folder of steps.
        deep: see `verify_role`.
        progress: told of bytes read and of all bytes.

    Raises:
        CheckpointNotFoundError: there is nothing to verify.
    """
    path = path.absolute()
    roles, problems = _selected(path, step)
    total, done, lock = sum(map(_nbytes, roles)), [0], threading.Lock()

    def count(nbytes: int) -> None:
        with lock:
            done[0] += nbytes
        progress(done[0], total)

    started = time.monotonic()
    verdicts = tuple(verify_role(role_dir, deep, count) for role_dir in roles)
    return Report(verdicts, tuple(problems), time.monotonic() - started)


def _selected(path: Path, step: int | None) -> tuple[list[Path], list[str]]:
    """The folders of roles, and what is wrong with steps as a whole."""
    if (path / layout.MANIFEST_FILE).exists() or layout.parse_step(path.parent.name) is not None:
        found = layout.parse_step(path.parent.name)
        if step is not None and found != step:
            raise CheckpointNotFoundError(f"{path}: is a role of step {found}, not of step {step}")
        if not path.is_dir():
            raise CheckpointNotFoundError(f"{path}: there is no such folder")
        return [path], []
    of_one = layout.parse_step(path.name) is not None and path.is_dir()
    statuses = [steps.step_status(path)] if of_one else steps.list_steps(path)
    statuses = [status for status in statuses if step in (None, status.step)]
    if not any(status.committed or status.declared for status in statuses):
        reasons = "".join(f"\n  {status.reason}" for status in statuses)
        raise CheckpointNotFoundError(f"{path}: no checkpoint{'' if step is None else f' of step {step}'}{reasons}")
    roles = [status.path / role for status in statuses for role in sorted(status.committed | _damaged(status))]
    problems = [status.reason for status in statuses if not status.is_complete]
    if not of_one and step is None:
        problems += steps.tracker_problems(path)
    return roles, problems


def _damaged(status: steps.StepStatus) -> set[str]:
    """Roles whose manifest is there, and is no good."""
    return {role for role in status.declared - status.committed if (status.path / role / layout.MANIFEST_FILE).exists()}


def _nbytes(role_dir: Path) -> int:
    try:
        return read_manifest(role_dir, layout.MANIFEST_FILE).nbytes
    except (CheckpointCorruptError, CheckpointNotFoundError):
        return 0


def _of(file: FileRecord, problem: str, tensor: str | None = None, span: tuple[int, int] | None = None) -> Damage:
    return Damage(problem, file.path, file.rank, tensor, span)


# -- where it is damaged -----------------------------------------------------------------------------------


def _locate(role_dir: Path, file: FileRecord) -> list[Damage]:
    """What of a file with a wrong CRC is damaged."""
    path = role_dir / file.path
    if file.index is None:
        return [_of(file, f"{path}: has a wrong CRC: damaged, or another file of that name")]
    try:
        shards = read_index(role_dir, file).shards
    except CheckpointCorruptError as error:
        return [_of(file, str(error), None, (file.index.offset, file.index.offset + file.index.size))]
    try:
        found = [damage for shard in shards for damage in _bad_blocks(path, file, shard)]
    except OSError as error:
        return [_of(file, f"{path}: cannot be read: {error.strerror}")]
    return found or [
        _of(file, f"{path}: has a wrong CRC, though all its tensors are sound: zip directory or pickle are damaged")
    ]


def _bad_blocks(path: Path, file: FileRecord, shard: StoredShard) -> Iterator[Damage]:
    """Runs of damaged blocks of one tensor."""
    assert shard.crc32 is not None, "a file that has an index has CRCs"
    found = block_crcs(path, shard.offset, shard.nbytes, BLOCK_BYTES)
    bad = [number for number, (crc, wanted) in enumerate(zip(found, shard.crc32, strict=True)) if crc != wanted]
    for _, group in itertools.groupby(enumerate(bad), lambda item: item[1] - item[0]):
        numbers = [number for _, number in group]
        start = shard.offset + numbers[0] * BLOCK_BYTES
        stop = min(shard.offset + (numbers[-1] + 1) * BLOCK_BYTES, shard.offset + shard.nbytes)
        problem = f"{path}: tensor {shard.key}: bytes [{start}, {stop}) have a wrong CRC: damaged"
        yield _of(file, problem, str(shard.key), (start, stop))


# -- whether all is there ----------------------------------------------------------------------------------


def _missing_files(role_dir: Path, manifest: Manifest) -> Iterator[Damage]:
    """Files that every rank of this topology has written, and the manifest does not list."""
    listed = {file.path for file in manifest.files}
    wanted = {layout.COMMON_FILE: 0} if "optimizer" in manifest.contents else {}
    for rank, at in enumerate(manifest.ranks):
        if "optimizer" in manifest.contents:
            wanted[layout.optimizer_file(*at.place)] = rank
        if "extra" in manifest.contents:
            wanted[layout.rng_file(*at.place)] = rank
    for path, rank in wanted.items():
        if path not in listed:
            yield Damage(f"{role_dir / layout.MANIFEST_FILE}: does not list {path}, of rank {rank}", path, rank)


def _incomplete_tensors(role_dir: Path, manifest: Manifest) -> Iterator[Damage]:
    """Tensors of which no file has some elements."""
    catalog = Catalog(role_dir, manifest)
    for name in manifest.tensors:
        files = catalog.files(ShardKey(name, PARAM))
        for kind in (MODEL, PARAM, *catalog.kinds(name, files)):
            key = ShardKey(name, kind)
            yield from _incomplete(role_dir, key, catalog.shards(key, catalog.files(key)))


def _incomplete(role_dir: Path, key: ShardKey, shards: Sequence[StoredShard]) -> Iterator[Damage]:
    if not shards:
        return
    shapes = {shard.region.global_shape for shard in shards}
    if len(shapes) > 1:
        yield Damage(f"{role_dir}: tensor {key}: has shapes {_lists(shapes)} in its files", tensor=str(key))
        return
    missing = plan_reads(Region.whole(shapes.pop()), shards).missing
    if missing:
        files = ", ".join(sorted({shard.file for shard in shards}))
        yield Damage(f"{role_dir}: tensor {key}: {missing} elements are in none of {files}", tensor=str(key))


def _lists(shapes: Iterable[tuple[int, ...]]) -> str:
    return " and ".join(str(list(shape)) for shape in sorted(shapes))
