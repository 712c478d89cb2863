"""Encodes and decodes `manifest.json`, which makes a folder a checkpoint. See docs/format.md.

This module only translates between bytes and objects. It reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

import msgspec

from mcore_ckpt.checkpoint import file_names, manifest_text, provenance
from mcore_ckpt.checkpoint import placement as placements
from mcore_ckpt.checkpoint.manifest_text import ENTRY_LIST, NO_TENSORS, Entry, Holds, Members
from mcore_ckpt.checkpoint.metrics import decode_metrics
from mcore_ckpt.checkpoint.placement import Placement
from mcore_ckpt.checkpoint.provenance import Commit, Run
from mcore_ckpt.checkpoint.timeline import SaveTimeline, decode_timeline, encoded_timeline
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.typed_json import LongList, Natural
from mcore_ckpt.ranks.topology import RankCoordinates, Topology

FORMAT = "mcore_ckpt"
# The newest version of the format. Each manifest is written in the oldest version that can express its contents, so
# that older readers can read it, too.
FORMAT_VERSION = 2

# The longest name, in bytes, that Linux accepts between two slashes of a path.
_MOST_NAME_BYTES = 255


# Maps the name of each part of a step to the ranks that have saved files for the part. The ranks are given as ranges
# `(first, last)` that include `last`.
Parts = Mapping[str, Sequence[tuple[int, int]]]


class NewerFormatError(ValueError):
    """The manifest has a newer format version than this package can read."""


@dataclass(frozen=True)
class StageRecord:
    """The global layer numbers of one virtual pipeline stage."""

    pp: int
    vp: int
    decoder: tuple[int, ...]
    mtp: tuple[int, ...]


# A manifest has tens of thousands of objects of the next two classes. Objects of dataclasses would take ten times as
# long to make, and Python's garbage collector would visit each object.
class IndexPlace(msgspec.Struct, frozen=True, gc=False):
    """The place (`offset` and `size` in bytes), the CRC-32 and the format version of a file's index."""

    offset: int
    size: int
    crc32: int
    version: int = 1


class FileRecord(msgspec.Struct, frozen=True, gc=False):
    """The manifest's entry for one file of a checkpoint.

    `path` is relative to the role's folder. `rank` is the world rank that wrote the file. `size` is in bytes. `holds`
    lists the tensors in the file, by their positions in the manifest's `tensors`.
    """

    path: str
    kind: str
    rank: int
    size: int
    crc32: int
    index: IndexPlace | None = None
    holds: Holds = NO_TENSORS


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of low-rank adapters (LoRA, DoRA) that tensors do not show.

    All adapters of a model share these settings.

    Attributes:
        alpha: an adapter of rank r is scaled by alpha / r.
        dropout: the probability with which training drops an adapter's input.
        trained: the names of the parameters that are trained in addition to the adapters. None if they are not known.
    """

    alpha: float
    dropout: float = 0.0
    trained: tuple[str, ...] | None = None


@dataclass(frozen=True)
class WrittenFile:
    """A rank's description of a file that it has written.

    `size` is in bytes. `holds` is the digest of the file's list of global tensors.
    """

    path: str
    kind: str
    size: int
    crc32: int
    index: IndexPlace | None = None
    holds: str = ""


class _Rank(msgspec.Struct, gc=False):
    """A rank's coordinates, as the manifest spells them. The members are in the order of the JSON text."""

    cp: Natural
    dp: Natural
    edp: Natural
    ep: Natural
    etp: Natural
    pp: Natural
    tp: Natural


_AXES = tuple(RankCoordinates.__dataclass_fields__)
_coordinates_in_order = attrgetter(*_AXES)
_RANK_LIST: LongList[_Rank] = LongList(_Rank, b"},{")


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
    model: Mapping[str, Any] | None = None
    save_timeline: SaveTimeline | None = None
    placement: Placement | None = None
    run: Run | None = None
    commit: Commit | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    parts: Parts = field(default_factory=dict)

    def part_sizes(self) -> dict[str, tuple[int, int]]:
        """Returns, for each part of the step, the number of the part's files and their total size in bytes."""
        sizes = dict.fromkeys(self.parts, (0, 0))
        for file in self.files_of("part"):
            if (place := file_names.parse_part(file.path)) is not None and place[0] in sizes:
                count, nbytes = sizes[place[0]]
                sizes[place[0]] = count + 1, nbytes + file.size
        return sizes

    def files_of(self, kind: str) -> list[FileRecord]:
        """Returns the files of one kind."""
        return [file for file in self.files if file.kind == kind]

    @property
    def format_version(self) -> int:
        """The format version that a reader of the manifest must support."""
        return max((file.index.version for file in self.files if file.index is not None), default=1)

    @property
    def nbytes(self) -> int:
        """The size of all files together, in bytes."""
        return sum(file.size for file in self.files)

    @property
    def head(self) -> ManifestSummary:
        """The part of the manifest that a listing needs."""
        return ManifestSummary(
            self.step,
            self.role,
            self.roles,
            self.attempt,
            self.created,
            self.run,
            self.commit,
            self.contents,
            self.metrics,
            self.dropped,
        )


@dataclass(frozen=True)
class ManifestSummary:
    """The part of a manifest that a listing needs. The number of ranks, tensors and files does not change its size.

    `metrics` also has the metrics that were set after the save. `dropped` has the contents that retention has removed.
    """

    step: int
    role: str
    roles: tuple[str, ...]
    attempt: str
    created: str
    run: Run | None = None
    commit: Commit | None = None
    contents: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """The commit's number; for a checkpoint that an older version saved without such a number, the step."""
        return self.step if self.commit is None else self.commit.number


def encode_manifest(manifest: Manifest) -> bytes:
    """Encodes a manifest as one line of JSON with a checksum."""
    return _encode(manifest, _ranks_of(manifest), _entries_of(manifest))


def encode_readable(manifest: Manifest) -> bytes:
    """Encodes a manifest, and proves that `decode_manifest` will read it.

    Raises what `decode_manifest` would raise, and FieldError if `decode_manifest` would read values that differ from
    `manifest`.

    The text is decoded as in `decode_manifest`. The decoded ranks, files and tensors must be equal to the encoded ones.
    The later checks use the ranks, files and tensors of `manifest`, so no decoded copies of them are made.
    """
    ranks, entries = _ranks_of(manifest), _entries_of(manifest)
    data = _encode(manifest, ranks, entries)
    members = _checked_members(data)
    decoded = list(members.objects("ranks", _RANK_LIST)), list(members.objects("files", ENTRY_LIST))
    if decoded != (ranks, entries) or members.names("tensors") != tuple(manifest.tensors):
        raise fields.FieldError("ranks, files or tensors are not decoded as they were encoded")
    fields.as_names([entry.path for entry in entries], "path")
    fields.as_names(list({entry.kind for entry in entries}), "kind")
    _check_manifest(_read_manifest(members, manifest))
    return data


def _encode(manifest: Manifest, ranks: Sequence[_Rank], entries: Sequence[Entry]) -> bytes:
    # Use `vars`, because `asdict` would copy every value of thousands of ranks and files, which takes longer than the
    # rest of this function.
    record = {**vars(manifest), "format": FORMAT, "format_version": manifest.format_version}
    record["topology"] = vars(manifest.topology)
    record["ranks"] = ranks
    record["stages"] = [vars(stage) for stage in manifest.stages]
    adapters = manifest.adapters
    record["adapters"] = adapters and {key: value for key, value in vars(adapters).items() if value is not None}
    record["save_timeline"] = manifest.save_timeline and encoded_timeline(manifest.save_timeline)
    record["placement"] = manifest.placement and placements.encoded(manifest.placement)
    record["run"] = manifest.run and provenance.encoded_run(manifest.run)
    record["commit"] = manifest.commit and provenance.encoded_commit(manifest.commit)
    record["metrics"], record["dropped"] = dict(manifest.metrics) or None, manifest.dropped or None
    record["parts"] = manifest.parts or None
    record = {key: value for key, value in record.items() if value is not None}
    del record["files"]
    return manifest_text.encode(record, entries)


def _ranks_of(manifest: Manifest) -> list[_Rank]:
    return [_Rank(at.cp, at.dp, at.edp, at.ep, at.etp, at.pp, at.tp) for at in manifest.ranks]


def _entries_of(manifest: Manifest) -> list[Entry]:
    return list(map(_entry, manifest.files))


def _entry(file: FileRecord) -> Entry:
    entry = Entry(crc32=file.crc32, kind=file.kind, path=file.path, rank=file.rank, size=file.size)
    if (index := file.index) is not None:
        entry.set_index(index.offset, index.size, index.crc32, index.version)
        entry.holds = file.holds.text
    return entry


def decode_manifest(data: bytes) -> Manifest:
    """Decodes a manifest and checks its checksum and every field.

    Raises NewerFormatError if the format version is newer than this package reads. Raises FieldError if the manifest
    was cut or damaged, has another format, or names a path outside its folder.
    """
    members = _checked_members(data)
    manifest = _read_manifest(members)
    _check_manifest(manifest)
    return manifest


def decode_summary(data: bytes) -> ManifestSummary:
    """Decodes the part of a manifest that a listing needs. Does not check the entries of ranks and files.

    Checks the checksum. Raises NewerFormatError and FieldError like `decode_manifest`.
    """
    record = _checked_members(data).small
    step, role = fields.get_int(record, "step"), fields.get_name(record, "role")
    roles, attempt = fields.get_names(record, "roles"), fields.get_name(record, "attempt")
    _check_roles(role, roles)
    contents, created = fields.get_names(record, "contents"), fields.get_name(record, "created")
    run, commit = provenance.optional(record)
    metrics, dropped = decode_metrics(record), _read_dropped(record)
    return ManifestSummary(step, role, roles, attempt, created, run, commit, contents, metrics, dropped)


def _checked_members(data: bytes) -> Members:
    members = manifest_text.read(data)
    if members.small.get("format") != FORMAT:
        raise fields.FieldError("not a manifest of mcore_ckpt")
    version = fields.get_int(members.small, "format_version")
    if version < 1:
        raise fields.FieldError(f"format version {version} does not exist")
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"format version {version} is newer than {FORMAT_VERSION}, the newest version that this mcore_ckpt reads: "
            "upgrade mcore_ckpt"
        )
    if not members.is_intact:
        raise fields.FieldError("the manifest's checksum is wrong: the manifest was damaged or edited")
    return members


def _read_manifest(members: Members, known: Manifest | None = None) -> Manifest:
    """Reads a manifest. If `known` is given, takes the ranks, tensors and files from `known`, not from the text.

    The caller must have checked that the text has the same ranks, tensors and files.
    """
    record = members.small
    versions = fields.get_dict(record, "versions")
    topology = Topology(**_ints_of(Topology, fields.get_dict(record, "topology")))
    if known is None:
        same: dict[Any, Any] = {}  # keeps each distinct kind and number once, because files and ranks repeat them
        ranks = tuple(_coordinates(rank, topology, same) for rank in members.objects("ranks", _RANK_LIST))
        files = tuple(_file_record(entry, holds, same) for entry, holds in members.entries())
        tensors = members.names("tensors")
    else:
        ranks, files, tensors = known.ranks, known.files, known.tensors
    timeline, placement = members.text("save_timeline"), members.text("placement")
    run, commit = provenance.optional(record)
    return Manifest(
        step=fields.get_int(record, "step"),
        role=fields.get_name(record, "role"),
        roles=fields.get_names(record, "roles"),
        attempt=fields.get_name(record, "attempt"),
        created=fields.get_name(record, "created"),
        versions={fields.as_name(key, "versions"): fields.get_name(versions, key) for key in versions},
        contents=fields.get_names(record, "contents"),
        topology=topology,
        ranks=ranks,
        stages=tuple(_read_stage(item) for item in fields.get_list(record, "stages")),
        tensors=tensors,
        files=files,
        adapters=_read_adapters(record["adapters"]) if "adapters" in record else None,
        model=_read_model(record["model"]) if "model" in record else None,
        save_timeline=decode_timeline(timeline, len(ranks)) if timeline else None,
        placement=placements.decode(placement, len(files)) if placement else None,
        run=run,
        commit=commit,
        metrics=decode_metrics(record),
        dropped=_read_dropped(record),
        parts=_read_parts(record["parts"]) if "parts" in record else {},
    )


def _coordinates(rank: _Rank, topology: Topology, same: dict[Any, Any]) -> RankCoordinates:
    found = msgspec.structs.asdict(rank)
    if max(found.values()) >= topology.world_size:
        raise fields.FieldError(f"no rank can be at {found} in the layout {topology}")
    return RankCoordinates(**{axis: same.setdefault(at, at) for axis, at in found.items()})


def _file_record(entry: Entry, holds: Holds, same: dict[Any, Any]) -> FileRecord:
    place = None
    if (index := entry.index) is not msgspec.UNSET:
        place = IndexPlace(index.offset, index.size, index.crc32, index.version)
    return FileRecord(
        path=fields.as_name(entry.path, "path"),
        kind=same.setdefault(entry.kind, fields.as_name(entry.kind, "kind")),
        rank=same.setdefault(entry.rank, entry.rank),
        size=entry.size,
        crc32=entry.crc32,
        index=place,
        holds=holds,
    )


def _read_dropped(record: Mapping[str, Any]) -> tuple[str, ...]:
    return fields.get_names(record, "dropped") if "dropped" in record else ()


def _read_adapters(item: Any) -> AdapterSettings:
    record = fields.as_dict(item, "adapters")
    trained = fields.get_names(record, "trained") if record.get("trained") is not None else None
    return AdapterSettings(fields.get_number(record, "alpha"), fields.get_number(record, "dropout"), trained)


def _read_model(item: Any) -> dict[str, Any]:
    record = fields.as_dict(item, "model")
    return {fields.as_name(name, "model"): _read_fact(value, name) for name, value in record.items()}


def _read_fact(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_read_fact(each, name) for each in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return fields.as_name(value, name)


def _read_parts(item: Any) -> dict[str, list[tuple[int, int]]]:
    record, parts = fields.as_dict(item, "parts"), dict[str, list[tuple[int, int]]]()
    for name in record:
        if not file_names.is_part(name):
            raise fields.FieldError(f"part {fields.shown(name)} is not a folder name")
        parts[name], least = [], 0
        for run in fields.get_list(record, name):
            first, last = fields.as_ints(run, name) if isinstance(run, list) and len(run) == 2 else (1, 0)
            # These are the ranks of the original save. A step that was resharded later may have fewer ranks, so the
            # check does not use the manifest's own number of ranks.
            if not least <= first <= last < limits.PART_RANKS:
                raise fields.FieldError(
                    f"part {name!r} lists ranks {fields.shown(run)}, which are out of order, out of range, or not a "
                    "pair (first, last)"
                )
            parts[name].append((first, last))
            least = last + 2
    return parts


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


def _check_roles(role: str, roles: Sequence[str]) -> None:
    for each in (role, *roles):
        if not file_names.is_role(each):
            raise fields.FieldError(f"role {each!r} is not a folder name")


def _check_manifest(manifest: Manifest) -> None:
    _check_roles(manifest.role, manifest.roles)
    _check_topology(manifest)
    if len(set(manifest.tensors)) != len(manifest.tensors):
        raise fields.FieldError("the manifest lists a tensor twice")
    _check_paths(manifest.files)
    held, counts = 0, dict[int, int]()
    for file in manifest.files:
        if file.rank >= len(manifest.ranks):
            raise fields.FieldError(
                f"{file.path} is listed as written by rank {file.rank}, but there are {len(manifest.ranks)} ranks"
            )
        if file.index is not None and file.index.offset + file.index.size > file.size:
            raise fields.FieldError(f"the index of {file.path} reaches past the end of the file")
        # Files that hold the same tensors share one `Holds`. The tensors of a shared `Holds` are counted once, and the
        # count is added for each of its files.
        if id(file.holds) not in counts:
            counts[id(file.holds)] = _count_held(file, len(manifest.tensors))
        held += counts[id(file.holds)]
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
    most = dict(zip(_AXES, map(max, zip(*map(_coordinates_in_order, ranks), strict=True)), strict=True))
    for number, rank in enumerate(ranks):
        if all(most[name] < sizes[name] for name in _AXES):
            break  # true for nearly all manifests: their ranks need not be checked one by one
        if any(at >= sizes[name] for name, at in rank.by_axis.items()):
            raise fields.FieldError(f"rank {number} cannot be at {rank} in the layout {manifest.topology}")


def _count_held(file: FileRecord, count: int) -> int:
    """Returns how many tensors a file holds. Raises FieldError unless the ranges of tensors ascend and are in range."""
    held = file.holds.count_of(count)
    if held is None:
        runs = fields.shown([list(run) for run in file.holds])
        raise fields.FieldError(f"{file.path} lists tensors {runs} of {count}, which are out of order or out of range")
    return held


def _check_paths(files: Sequence[FileRecord]) -> None:
    """Checks that each path names a file below the role's folder, and that no two paths name the same file."""
    seen: set[str] = set()
    for file in files:
        path = file.path
        framed = f"/{path}/"
        if "\\" in path or "//" in framed or "/./" in framed or "/../" in framed:
            raise fields.FieldError(f"path {path!r} is not a plain path below the checkpoint's folder")
        if len(path) > _MOST_NAME_BYTES // 4 and any(len(name.encode()) > _MOST_NAME_BYTES for name in path.split("/")):
            raise fields.FieldError(f"path {path!r} has a part of more than {_MOST_NAME_BYTES} bytes")
        # On some file systems, names that differ only in upper and lower case name the same file.
        folded = path.casefold()
        if folded in seen:
            raise fields.FieldError(f"path {path!r} is listed twice")
        seen.add(path if path == folded else folded)  # most paths equal `folded`, and need no second copy in memory
