"""What of a file is not as it was written, by tensor and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint.index import BLOCK_BYTES
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.checkpoint.reading import open_file, read_index
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io.checksums import block_crcs, file_crcs
from mcore_ckpt.sharding.plan import StoredShard

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


def _of(file: FileRecord, problem: str, tensor: str | None = None, span: tuple[int, int] | None = None) -> Damage:
    return Damage(problem, file.path, file.rank, tensor, span)


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
