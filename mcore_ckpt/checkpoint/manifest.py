"""Encodes and decodes `manifest.json`, which makes a folder a checkpoint. See docs/format.md.

This module only translates between bytes and dataclasses. It reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.ranks.topology import RankCoordinates, Topology

FORMAT = "mcore_ckpt"
# The newest version. A checkpoint has the oldest version that can say all of it, so that older readers read it, too.
FORMAT_VERSION = 2

# The longest name, in bytes, that Linux accepts between two slashes of a path.
_MOST_PART_BYTES = 255


class NewerFormatError(ValueError):
    """The manifest has a format version that is newer than this package."""


@dataclass(frozen=True)
class StageRecord:
    """The global layer numbers of one virtual pipeline stage."""

    pp: int
    vp: int
    decoder: tuple[int, ...]
    mtp: tuple[int, ...]


@dataclass(frozen=True)
class IndexPlace:
    """The place of an index in its file, in bytes, the CRC-32 of the index, and the version of its format."""

    offset: int
    size: int
    crc32: int
    version: int = 1


@dataclass(frozen=True)
class FileRecord:
    """The manifest's entry for one file of a checkpoint.

    `path` is relative to the role's folder. `rank` is the world rank that wrote the file. `holds` lists the tensors in
    the file as runs `(first, last)` of positions in the manifest's `tensors`, `last` included.
    """

    path: str
    kind: str
    rank: int
    size: int
    crc32: int
    index: IndexPlace | None = None
    holds: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class AdapterSettings:
    """What the tensors of low-rank adapters (LoRA, DoRA) do not show, the same for all adapters of a model.

    Attributes:
        alpha: an adapter of rank r is scaled by alpha / r.
        dropout: the probability with which training drops an adapter's input.
    """

    alpha: float
    dropout: float = 0.0


@dataclass(frozen=True)
class WrittenFile:
    """A rank's description of a file that it has written, from which rank 0 makes the manifest's entry.

    `holds` is the digest of the list of global tensors in the file.
    """

    path: str
    kind: str
    size: int
    crc32: int
    index: IndexPlace | None = None
    holds: str = ""


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`. See docs/format.md for every field."""

    step: int
    role: str
    roles: tuple[str, ...]
    attempt: str
    created: str
    versions: Mapping[str, str]
    contents: tuple[str, ...]
    topology: Topology
    ranks: tuple[RankCoordinates, ...]
    stages: tuple[StageRecord, ...]
    tensors: tuple[str, ...]
    files: tuple[FileRecord, ...]
    adapters: AdapterSettings | None = None

    def files_of(self, kind: str) -> list[FileRecord]:
        """Returns the files of one kind."""
        return [file for file in self.files if file.kind == kind]

    @property
    def format_version(self) -> int:
        """The version of the format that a reader needs."""
        return max((file.index.version for file in self.files if file.index is not None), default=1)

    @property
    def nbytes(self) -> int:
        """The size of all files together, in bytes."""
        return sum(file.size for file in self.files)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encodes a manifest as one line of JSON with a checksum."""
    record = asdict(manifest)
    if manifest.adapters is None:
        del record["adapters"]
    for file in record["files"]:
        if file["index"] is None:
            del file["index"], file["holds"]
        elif file["index"]["version"] == 1:
            del file["index"]["version"]
    record |= {"format": FORMAT, "format_version": manifest.format_version}
    return fields.encode(record | {"crc32": crc32(fields.encode(record))}) + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Decodes a manifest and checks its checksum and every field.

    Raises:
        NewerFormatError: the manifest has a newer format version than this package reads.
        FieldError: the manifest was cut or damaged, has another format, or names a path outside its folder.
    """
    record = fields.decode(data)
    if record.get("format") != FORMAT:
        raise fields.FieldError("not a manifest of mcore_ckpt")
    version = fields.get_int(record, "format_version")
    if version < 1:
        raise fields.FieldError(f"format version {version} does not exist")
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"format version {version} is newer than {FORMAT_VERSION}, the newest version that this mcore_ckpt reads: "
            "upgrade mcore_ckpt"
        )
    stored = fields.get_int(record, "crc32")
    if crc32(fields.encode({k: v for k, v in record.items() if k != "crc32"})) != stored:
        raise fields.FieldError("the manifest's checksum is wrong: the manifest was damaged or edited")
    manifest = _read_manifest(record)
    _check_manifest(manifest)
    return manifest


def _read_manifest(record: Mapping[str, Any]) -> Manifest:
    versions = fields.get_dict(record, "versions")
    return Manifest(
        step=fields.get_int(record, "step"),
        role=fields.get_name(record, "role"),
        roles=fields.get_names(record, "roles"),
        attempt=fields.get_name(record, "attempt"),
        created=fields.get_name(record, "created"),
        versions={fields.as_name(key, "versions"): fields.get_name(versions, key) for key in versions},
        contents=fields.get_names(record, "contents"),
        topology=Topology(**_ints_of(Topology, fields.get_dict(record, "topology"))),
        ranks=tuple(RankCoordinates(**_ints_of(RankCoordinates, item)) for item in fields.get_list(record, "ranks")),
        stages=tuple(_read_stage(item) for item in fields.get_list(record, "stages")),
        tensors=fields.get_names(record, "tensors"),
        files=tuple(_read_file(item) for item in fields.get_list(record, "files")),
        adapters=_read_adapters(record["adapters"]) if "adapters" in record else None,
    )


def _read_adapters(item: Any) -> AdapterSettings:
    record = fields.as_dict(item, "adapters")
    return AdapterSettings(fields.get_number(record, "alpha"), fields.get_number(record, "dropout"))


def _ints_of(cls: type, item: Any) -> dict[str, int]:
    record = fields.as_dict(item, cls.__name__)
    return {name: fields.get_int(record, name) for name in cls.__dataclass_fields__}  # type: ignore[attr-defined]


def _read_stage(item: Any) -> StageRecord:
    record = fields.as_dict(item, "stages")
    return StageRecord(
        fields.get_int(record, "pp"),
        fields.get_int(record, "vp"),
        fields.get_ints(record, "decoder"),
        fields.get_ints(record, "mtp"),
    )


def _read_file(item: Any) -> FileRecord:
    record = fields.as_dict(item, "files")
    index, holds = None, tuple[tuple[int, int], ...]()
    if "index" in record:
        place = fields.as_dict(record["index"], "index")
        index = IndexPlace(**_ints_of(IndexPlace, {"version": 1, **place}))
        holds = tuple(_read_run(run) for run in fields.get_list(record, "holds"))
    return FileRecord(
        path=fields.get_name(record, "path"),
        kind=fields.get_name(record, "kind"),
        rank=fields.get_int(record, "rank"),
        size=fields.get_int(record, "size"),
        crc32=fields.get_int(record, "crc32"),
        index=index,
        holds=holds,
    )


def _read_run(item: Any) -> tuple[int, int]:
    run = fields.as_ints(item, "holds")
    if len(run) != 2:
        raise fields.FieldError(f"'holds' has {run}, not [first, last]")
    return run[0], run[1]


def _check_manifest(manifest: Manifest) -> None:
    for role in (manifest.role, *manifest.roles):
        if not file_names.is_role(role):
            raise fields.FieldError(f"role {role!r} is not a folder name")
    _check_topology(manifest)
    if len(set(manifest.tensors)) != len(manifest.tensors):
        raise fields.FieldError("the manifest lists a tensor twice")
    seen: set[str] = set()
    held = 0
    for file in manifest.files:
        _check_path(file.path, seen)
        if file.rank >= len(manifest.ranks):
            raise fields.FieldError(
                f"{file.path} is listed as written by rank {file.rank}, but there are {len(manifest.ranks)} ranks"
            )
        if file.index is not None and file.index.offset + file.index.size > file.size:
            raise fields.FieldError(f"the index of {file.path} reaches past the end of the file")
        held += _count_held(file, len(manifest.tensors))
    if held > limits.MANIFEST_HELD:
        raise fields.FieldError(f"the files hold {held} tensors together, more than {limits.MANIFEST_HELD}")


def _check_topology(manifest: Manifest) -> None:
    sizes, ranks = asdict(manifest.topology), manifest.ranks
    world = sizes.pop("world_size")
    if len(ranks) != world:
        raise fields.FieldError(f"the manifest lists {len(ranks)} ranks, but its world size is {world}")
    virtual = sizes.pop("vpp")
    if virtual < 1 or any(not 1 <= size <= world for size in sizes.values()):
        raise fields.FieldError(f"{world} ranks cannot have the layout {manifest.topology}")
    for number, rank in enumerate(ranks):
        if any(at >= sizes[name] for name, at in vars(rank).items()):
            raise fields.FieldError(f"rank {number} cannot be at {rank} in the layout {manifest.topology}")


def _count_held(file: FileRecord, count: int) -> int:
    """Returns how many tensors a file holds.

    Raises FieldError unless the runs ascend and are in range. In ascending runs no tensor is counted twice.
    """
    held, least = 0, 0
    for first, last in file.holds:
        if not least <= first <= last < count:
            raise fields.FieldError(
                f"{file.path} lists tensors {first} to {last} of {count}, which are out of order or out of range"
            )
        held += last + 1 - first
        least = last + 1
    return held


def _check_path(path: str, seen: set[str]) -> None:
    """Checks that a path names a file below the role's folder, and not the same file as a path in `seen`."""
    parts = path.split("/")
    if "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise fields.FieldError(f"path {path!r} is not a plain path below the checkpoint's folder")
    if any(len(part.encode()) > _MOST_PART_BYTES for part in parts):
        raise fields.FieldError(f"path {path!r} has a part of more than {_MOST_PART_BYTES} bytes")
    # On some file systems, names that differ only in upper and lower case name the same file.
    if path.casefold() in seen:
        raise fields.FieldError(f"path {path!r} is listed twice")
    seen.add(path.casefold())
