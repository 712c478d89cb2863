"""What of a file is not as it was written, by tensor and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.index import BLOCK_BYTES
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.checkpoint.reading import open_file, read_index, read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
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
    damages = _wrong_sizes(role_dir, files)
    damaged = {damage.file for damage in damages}
    sound = [file for file in files if file.path not in damaged]
    crcs = file_crcs([(role_dir / file.path, file.size) for file in sound], progress)
    for file, crc in zip(sound, crcs, strict=True):
        if isinstance(crc, OSError):
            damages.append(_of(file, f"{role_dir / file.path}: cannot be read: {crc.strerror}"))
        elif crc != file.crc32:
            damages += _locate(role_dir, file)
    return damages


def find_damage(role_dir: Path, read_bytes: bool = True) -> list[Damage]:
    """Checks a committed role: its manifest, that each file is there with its size, and each file's CRC.

    Args:
        role_dir: the role's folder.
        read_bytes: read the files whole and check their CRCs. Without it only the manifest is read.

    Returns:
        What is damaged; empty if the role is intact. A missing or damaged manifest is a damage, too.
    """
    try:
        manifest = read_manifest(role_dir)
    except (CheckpointCorruptError, CheckpointNotFoundError) as error:
        return [Damage(str(error), file_names.MANIFEST_FILE)]
    return verify_files(role_dir, manifest.files) if read_bytes else _wrong_sizes(role_dir, manifest.files)


def _wrong_sizes(role_dir: Path, files: Sequence[FileRecord]) -> list[Damage]:
    damages = []
    for file in files:
        try:
            with open_file(role_dir, file):
                pass
        except CheckpointCorruptError as error:
            damages.append(Damage(str(error), file.path, file.rank))
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
