"""What is not made of named tensors: copied, or of another layout's ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt import layout
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.state.rng import seed_of
from mcore_ckpt.storage.files import make_folders, read_exact, write_file
from mcore_ckpt.storage.manifest import FileRecord, Manifest
from mcore_ckpt.storage.reader import open_file, read_plain
from mcore_ckpt.storage.requests import WrittenFile
from mcore_ckpt.storage.writer import pickle_plain, write_plain
from mcore_ckpt.topology import Topology, coordinates_of

_COPY_BYTES = 16 << 20


@dataclass(frozen=True)
class Copy:
    """A file that becomes another one of the same content, and the rank that counts as its writer."""

    record: FileRecord
    path: str
    rank: int


@dataclass(frozen=True)
class SmallFiles:
    """Files to copy, and the places whose generators start from a seed instead: (path, rank)."""

    copies: tuple[Copy, ...]
    seeded: tuple[tuple[str, int], ...]
    seed: int | None

    @property
    def nbytes(self) -> int:
        return sum(copy.record.size for copy in self.copies)


def plan_small_files(role_dir: Path, manifest: Manifest, new: Topology) -> SmallFiles:
    """What of each rank's small files the ranks of the new layout get.

    The generators go on where they were if pipeline and tensor-parallel sizes stay and each new place was there before;
    all of them start anew otherwise. A rank gets the extra_state of the one whose coordinates are its own modulo the
    saved sizes, as a load under another layout does.

    Raises:
        CheckpointCorruptError: a file is missing, of another size, or damaged.
    """
    files = {file.path: file for file in manifest.files}
    copies = [Copy(file, file.path, 0) for file in manifest.files if file.kind in ("common", "huggingface")]
    places = [coordinates_of(rank, new).place for rank in range(new.world_size)]
    for rank, place in enumerate(places):
        if (record := files.get(layout.extra_file(*_saved_place(place, manifest.topology)))) is not None:
            copies.append(Copy(record, layout.extra_file(*place), rank))
    seeded: list[tuple[str, int]] = []
    seed = None
    if manifest.files_of("rng"):
        generators = [files.get(layout.rng_file(*place)) for place in places]
        as_saved = (manifest.topology.pp, manifest.topology.tp) == (new.pp, new.tp)
        if as_saved and all(generators):
            copies += [Copy(record, record.path, rank) for rank, record in enumerate(generators) if record is not None]
        else:
            first = files.get(layout.rng_file(0, 0, 0, 0))
            if first is None:
                raise CheckpointCorruptError(f"{role_dir}: the manifest does not list {layout.rng_file(0, 0, 0, 0)}")
            seed = seed_of(read_plain(role_dir, first))
            seeded = [(layout.rng_file(*place), rank) for rank, place in enumerate(places)]
    for copy in copies:
        with open_file(role_dir, copy.record):
            pass
    return SmallFiles(tuple(copies), tuple(seeded), seed)


def _saved_place(place: tuple[int, int, int, int], saved: Topology) -> tuple[int, int, int, int]:
    pp, tp, cp, dp = place
    return pp % saved.pp, tp % saved.tp, cp % saved.cp, dp % saved.dp


def write_small_files(role_dir: Path, small: SmallFiles, staging: Path) -> Iterator[tuple[int, WrittenFile]]:
    """Writes them durably; yields each with its rank.

    Raises:
        CheckpointCorruptError: the content of a file is not the manifest's.
        OSError: writing failed.
    """
    for copy in small.copies:
        make_folders(staging, copy.path)
        write_file(staging / copy.path, _checked(role_dir, copy.record))
        yield copy.rank, WrittenFile(copy.path, copy.record.kind, copy.record.size, copy.record.crc32)
    for path, rank in small.seeded:
        yield rank, write_plain(staging, path, "rng", pickle_plain({"seed": small.seed}))


def _checked(role_dir: Path, record: FileRecord) -> Iterator[bytes]:
    crc = 0
    with open_file(role_dir, record) as descriptor:
        for at in range(0, record.size, _COPY_BYTES):
            data = read_exact(descriptor, min(_COPY_BYTES, record.size - at), at, role_dir / record.path)
            crc = zlib.crc32(data, crc)
            yield data
    if crc != record.crc32:
        raise CheckpointCorruptError(
            f"{role_dir / record.path}: has a wrong CRC: damaged, or another file of that name"
        )
