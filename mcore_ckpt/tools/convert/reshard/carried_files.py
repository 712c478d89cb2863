"""Plans and writes the files without named tensors, so that each rank of the new layout finds its small files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, WrittenFile
from mcore_ckpt.checkpoint.plain_files import pickle_plain, read_plain, write_plain
from mcore_ckpt.checkpoint.reading import check_crc, open_file
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import make_folders, read_exact, write_file
from mcore_ckpt.ranks.topology import Topology, coordinates_of
from mcore_ckpt.sharding.stored_positions import positions_in, replaced_at, states_at
from mcore_ckpt.state.rng import seed_of

_COPY_BYTES = 16 << 20

Place = tuple[int, int, int, int]
Extra = dict[str, Any]


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
    """Files of the new checkpoint that have no named tensors.

    Attributes:
        copies: the files to copy.
        seeded: the files of random number generators that start from a seed: (path, rank, seed).
        positioned: the files with data positions, which are written anew: (path, rank, `extra_state`).
    """

    copies: tuple[Copy, ...]
    seeded: tuple[tuple[str, int, int], ...]
    positioned: tuple[tuple[str, int, Extra], ...] = ()


def plan_carried_files(role_dir: Path, reader: NativeReader, new: Topology) -> CarriedFiles:
    """Plans the CarriedFiles of a new layout, by the same rules as a load under another layout.

    Each new rank gets the files of one saved rank, whose coordinates are the new rank's coordinates modulo the saved
    sizes. If the random number generators cannot continue under the new layout, each rank gets the saved seed instead
    of the generators' states.

    Raises CheckpointCorruptError: a file is missing, has another size, or is damaged.
    """
    manifest = reader.manifest
    copies = [Copy(file, file.path, 0) for file in manifest.files if file.kind in ("common", "huggingface")]
    positioned: list[tuple[str, int, Extra]] = []
    extra_at = cache(partial(_extra_at, role_dir, reader))
    places = [coordinates_of(rank, new).place for rank in range(new.world_size)]
    for rank, place in enumerate(places):
        in_turn = manifest.topology.place_in_turn(place)
        if (record := reader.by_path.get(file_names.extra_file(*in_turn))) is None:
            continue
        if (
            new.dp != manifest.topology.dp
            and (extra := _with_all_positions(in_turn, manifest.topology.dp, extra_at)) is not None
        ):
            positioned.append((file_names.extra_file(*place), rank, extra))
        else:
            copies.append(Copy(record, file_names.extra_file(*place), rank))
    copies += [Copy(file, file.path, min(file.rank, new.world_size - 1)) for file in manifest.files_of("part")]
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
    return CarriedFiles(tuple(copies), tuple(seeded), tuple(positioned))


def _with_all_positions(place: Place, dp: int, extra_at: Callable[[Place], Extra | None]) -> Extra | None:
    """Returns the `extra_state` of a saved place, with the data positions of all data-parallel ranks.

    With all positions, a load of the new checkpoint can divide the positions among the loading ranks. Returns None if
    there are no data positions.
    """
    extra = extra_at(place)
    found = [(keys, record) for keys, record in positions_in(extra) if "ranks" not in record]
    if extra is None or not found:
        return None
    by_rank = [extra_at((*place[:3], rank)) for rank in range(dp)]
    for keys, record in found:
        extra = replaced_at(extra, keys, {**record, "ranks": list(states_at(keys, by_rank))})
    return extra


def _extra_at(role_dir: Path, reader: NativeReader, place: Place) -> Extra | None:
    record = reader.by_path.get(file_names.extra_file(*place))
    return None if record is None else read_plain(role_dir, record)


def copy_file(role_dir: Path, copy: Copy, folder: Path) -> None:
    """Copies a file durably into the folder of the new checkpoint.

    Raises CheckpointCorruptError if the file's CRC differs from the CRC in the manifest, and OSError if writing failed.
    """
    make_folders(folder, copy.path)
    write_file(folder / copy.path, checked_bytes(role_dir, copy.record))


def write_made(carried: CarriedFiles, folder: Path) -> list[tuple[int, WrittenFile]]:
    """Durably writes the `seeded` and `positioned` files. Returns each file with its writer in the new manifest."""
    made = [(path, "rng", rank, {"seed": seed}) for path, rank, seed in carried.seeded]
    made += [(path, "extra", rank, extra) for path, rank, extra in carried.positioned]
    return [(rank, write_plain(folder, path, kind, pickle_plain(value))) for path, kind, rank, value in made]


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
