"""Finds out which files, tensors and bytes of a checkpoint are damaged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.index import BLOCK_BYTES
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.checkpoint.reading import open_file, read_index, read_manifest, wrong_crc
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.io.checksums import Progress, block_crcs, file_crcs
from mcore_ckpt.sharding.plan import StoredShard


@dataclass(frozen=True)
class Damage:
    """One place in a checkpoint that is damaged.

    Attributes:
        problem: a message that names the path and describes the damage.
        file: the damaged file's path below the role's folder; None if the damage is not in a single file.
        rank: the world rank that wrote the file; None if it is unknown.
        tensor: the key of the damaged tensor; None if the damage is not known to be in a tensor.
        span: the damaged bytes `[start, stop)` of the file; None if they are unknown.
        unreadable: True if this process is not allowed to read the file. Then the process cannot find out whether the
            file is damaged.
    """

    problem: str
    file: str | None = None
    rank: int | None = None
    tensor: str | None = None
    span: tuple[int, int] | None = None
    unreadable: bool = False

    @staticmethod
    def of(error: Exception, file: str, rank: int | None = None) -> Damage:
        """Makes a `Damage` from an error that `checkpoint.reading` has raised for a file."""
        return Damage(str(error), file, rank, unreadable=isinstance(error.__cause__, PermissionError))


def verify_files(role_dir: Path, files: Sequence[FileRecord], progress: Progress = lambda nbytes: None) -> list[Damage]:
    """Reads files of a checkpoint completely, and returns every difference from the manifest.

    `progress` is called from several threads, each time with the number of bytes just read.
    """
    damages = _wrong_sizes(role_dir, files)
    damaged = {damage.file for damage in damages}
    sound = [file for file in files if file.path not in damaged]
    crcs = file_crcs([(role_dir / file.path, file.size) for file in sound], progress)
    for file, crc in zip(sound, crcs, strict=True):
        if isinstance(crc, OSError):
            problem = f"{role_dir / file.path}: cannot be read: {crc.strerror}"
            damages.append(replace(_damage(file, problem), unreadable=isinstance(crc, PermissionError)))
        elif crc != file.crc32:
            damages += _locate(role_dir, file)
    return damages


def find_damage(role_dir: Path, read_bytes: bool = True) -> list[Damage]:
    """Checks a role's committed checkpoint: its manifest, the existence and size of each file, and each file's CRC.

    The files' CRCs are checked only if `read_bytes` is set. Returns all damage found; an empty list if the checkpoint
    is intact. A missing or damaged manifest is damage, too.
    """
    try:
        manifest = read_manifest(role_dir)
    except (CheckpointCorruptError, CheckpointNotFoundError) as error:
        return [Damage.of(error, file_names.MANIFEST_FILE)]
    return verify_files(role_dir, manifest.files) if read_bytes else _wrong_sizes(role_dir, manifest.files)


def _wrong_sizes(role_dir: Path, files: Sequence[FileRecord]) -> list[Damage]:
    damages = []
    for file in files:
        try:
            with open_file(role_dir, file):
                pass
        except CheckpointCorruptError as error:
            damages.append(Damage.of(error, file.path, file.rank))
    return damages


def _damage(file: FileRecord, problem: str, tensor: str | None = None, span: tuple[int, int] | None = None) -> Damage:
    return Damage(problem, file.path, file.rank, tensor, span)


def _locate(role_dir: Path, file: FileRecord) -> list[Damage]:
    """Finds the damaged parts of a file that has a wrong CRC."""
    path = role_dir / file.path
    if file.index is None:
        return [_damage(file, wrong_crc(path))]
    try:
        shards = read_index(role_dir, file).shards
    except CheckpointCorruptError as error:
        return [_damage(file, str(error), None, (file.index.offset, file.index.offset + file.index.size))]
    try:
        found = [damage for shard in shards for damage in _bad_blocks(path, file, shard)]
    except OSError as error:
        return [_damage(file, f"{path}: cannot be read: {error.strerror}")]
    return found or [
        _damage(file, f"{path}: has a wrong CRC, though all tensors are intact: the zip directory or pickle is damaged")
    ]


def _bad_blocks(path: Path, file: FileRecord, shard: StoredShard) -> Iterator[Damage]:
    """Yields one `Damage` for each group of consecutive damaged blocks of a tensor."""
    assert shard.crc32 is not None, "a file that has an index has CRCs"
    found = block_crcs(path, shard.offset, shard.nbytes, BLOCK_BYTES)
    bad = [number for number, (crc, wanted) in enumerate(zip(found, shard.crc32, strict=True)) if crc != wanted]
    for _, group in itertools.groupby(enumerate(bad), lambda item: item[1] - item[0]):
        numbers = [number for _, number in group]
        start = shard.offset + numbers[0] * BLOCK_BYTES
        stop = min(shard.offset + (numbers[-1] + 1) * BLOCK_BYTES, shard.offset + shard.nbytes)
        problem = f"{path}: tensor {shard.key}: bytes [{start}, {stop}) have a wrong CRC: they are damaged"
        yield _damage(file, problem, str(shard.key), (start, stop))
