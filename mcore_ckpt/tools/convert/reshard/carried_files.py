"""Copies the files that hold no named tensors, and gives each rank of the new layout its own small files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, WrittenFile
from mcore_ckpt.checkpoint.plain_files import pickle_plain, read_plain, write_plain
from mcore_ckpt.checkpoint.reading import check_crc, open_file
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import make_folders, read_exact, write_file
from mcore_ckpt.ranks.topology import Topology, coordinates_of
from mcore_ckpt.state.rng import seed_of

_COPY_BYTES = 16 << 20


@dataclass(frozen=True)
class Copy:
    """A saved file, its path in the new checkpoint, and the rank that the new manifest records as its writer."""

    record: FileRecord
    path: str
    rank: int

    @property
    def written(self) -> WrittenFile:
        return WrittenFile(self.path, self.record.kind, self.record.size, self.record.crc32)


@dataclass(frozen=True)
class CarriedFiles:
    """Files to copy, and the files of random number generators that start from a seed: (path, rank, seed)."""

    copies: tuple[Copy, ...]
    seeded: tuple[tuple[str, int, int], ...]


def plan_carried_files(role_dir: Path, reader: NativeReader, new: Topology) -> CarriedFiles:
    """Plans which of these files each rank of the new layout gets, by the same rules as a load under another layout.

    Each rank gets the files of the saved rank at its own coordinates modulo the saved sizes. If the random number
    generators cannot continue under the new layout, each rank gets the saved seed instead of their states.

    Raises CheckpointCorruptError: a file is missing, has another size, or is damaged.
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
            seed = seed_of(read_plain(role_dir, record), f"{role_dir}/{record.path}")
            seeded.append((file_names.rng_file(*place), rank, seed))
    for copy in copies:
        with open_file(role_dir, copy.record):
            pass
    return CarriedFiles(tuple(copies), tuple(seeded))


def copy_file(role_dir: Path, copy: Copy, folder: Path) -> None:
    """Copies a file durably into the folder of the new checkpoint.

    Raises CheckpointCorruptError if the file's CRC is not the one in the manifest, and OSError if writing failed.
    """
    make_folders(folder, copy.path)
    write_file(folder / copy.path, checked_bytes(role_dir, copy.record))


def write_seeds(seeded: Iterable[tuple[str, int, int]], folder: Path) -> list[tuple[int, WrittenFile]]:
    """Writes the seeds durably. Returns each file with the rank that the manifest records as its writer."""
    return [(rank, write_plain(folder, path, "rng", pickle_plain({"seed": seed}))) for path, rank, seed in seeded]


def checked_bytes(role_dir: Path, record: FileRecord) -> Iterator[bytes]:
    """Yields the bytes of a file in blocks, and checks their CRC at the end.

    Raises CheckpointCorruptError: the file is missing or has another size, or, after the last block, its CRC is wrong.
    """
    crc = 0
    with open_file(role_dir, record) as descriptor:
        for at in range(0, record.size, _COPY_BYTES):
            data = read_exact(descriptor, min(_COPY_BYTES, record.size - at), at, role_dir / record.path)
            crc = crc32(data, crc)
            yield data
    check_crc(crc, record, role_dir / record.path)
