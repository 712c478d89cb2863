"""What is not made of named tensors: copied, or of another layout's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, WrittenFile
from mcore_ckpt.checkpoint.plain_files import pickle_plain, write_plain
from mcore_ckpt.checkpoint.reading import open_file, read_plain
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import make_folders, read_exact, write_file
from mcore_ckpt.ranks.topology import Topology, coordinates_of
from mcore_ckpt.state.rng import seed_of

_COPY_BYTES = 16 << 20


@dataclass(frozen=True)
class Copy:
    """A file that becomes another one of the same content, and the rank that counts as its writer."""

    record: FileRecord
    path: str
    rank: int


@dataclass(frozen=True)
class SmallFiles:
    """Files to copy, and the places whose generators start from a seed instead: (path, rank, seed)."""

    copies: tuple[Copy, ...]
    seeded: tuple[tuple[str, int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(copy.record.size for copy in self.copies)


def plan_small_files(role_dir: Path, reader: NativeReader, new: Topology) -> SmallFiles:
    """What of each rank's small files the ranks of the new layout get.

    As in a load under another layout: each those of the rank whose coordinates are its own modulo the saved sizes;
    where generators cannot go on, the saved seed.

    Raises:
        CheckpointCorruptError: a file is missing, of another size, or damaged.
    """
    manifest = reader.manifest
    copies = [Copy(file, file.path, 0) for file in manifest.files if file.kind in ("common", "huggingface")]
    places = [coordinates_of(rank, new).place for rank in range(new.world_size)]
    for rank, place in enumerate(places):
        if (record := reader.by_path.get(file_names.extra_file(*manifest.topology.place_in_turn(place)))) is not None:
            copies.append(Copy(record, file_names.extra_file(*place), rank))
    seeded: list[tuple[str, int, int]] = []
    goes_on = new.has_generators_of(manifest.topology)
    for rank, place in enumerate(places if manifest.files_of("rng") else ()):
        in_turn = manifest.topology.place_in_turn(place)
        record = reader.file(file_names.rng_file(*in_turn) if goes_on else file_names.rng_file(0, 0, *in_turn[2:]))
        if goes_on:
            copies.append(Copy(record, file_names.rng_file(*place), rank))
        else:
            seeded.append((file_names.rng_file(*place), rank, seed_of(read_plain(role_dir, record))))
    for copy in copies:
        with open_file(role_dir, copy.record):
            pass
    return SmallFiles(tuple(copies), tuple(seeded))


def write_small_files(role_dir: Path, small: SmallFiles, staging: Path) -> Iterator[tuple[int, WrittenFile]]:
    """Writes them durably; yields each with its rank.

    Raises:
        CheckpointCorruptError: the content of a file is not the manifest's.
        OSError: writing failed.
    """
    for copy in small.copies:
        make_folders(staging, copy.path)
        write_file(staging / copy.path, checked_bytes(role_dir, copy.record))
        yield copy.rank, WrittenFile(copy.path, copy.record.kind, copy.record.size, copy.record.crc32)
    for path, rank, seed in small.seeded:
        yield rank, write_plain(staging, path, "rng", pickle_plain({"seed": seed}))


def checked_bytes(role_dir: Path, record: FileRecord) -> Iterator[bytes]:
    """A file's bytes, piece by piece. Raises CheckpointCorruptError behind the last if they are not what they were."""
    crc = 0
    with open_file(role_dir, record) as descriptor:
        for at in range(0, record.size, _COPY_BYTES):
            data = read_exact(descriptor, min(_COPY_BYTES, record.size - at), at, role_dir / record.path)
            crc = crc32(data, crc)
            yield data
    if crc != record.crc32:
        raise CheckpointCorruptError(
            f"{role_dir / record.path}: has a wrong CRC: it is damaged, or another file with this name"
        )
