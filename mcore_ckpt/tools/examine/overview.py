"""Gathers the content of the page that `mcore-ckpt inspect --html` writes about a checkpoint.

No bytes of tensors are read, except for the diff that an `Overview` may contain.

The result keeps the numbers of all shards in columns, because a checkpoint has hundreds of thousands of shards.

`cli/page/build.py` compresses the columns and puts them, with the style and a script for each section, into
`page.html`. `geometry.js` repeats the arithmetic of `sharding/regions.py`, so that the page computes boxes only when
they are looked at; a test compares both computations for every shard. Names in a checkpoint may be hostile. The page
stores the names compressed and in base 64, so a name cannot end the HTML element that contains it. Scripts put names
into text nodes only. A policy in the page's head forbids all other scripts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint.index import FileIndex
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.checkpoint.reading import read_index, read_manifest
from mcore_ckpt.checkpoint.timeline import encoded_timeline
from mcore_ckpt.io import tuning
from mcore_ckpt.io.threads import results_of
from mcore_ckpt.ranks.topology import RankCoordinates
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.steps.later_metrics import metrics_of
from mcore_ckpt.tools.examine.diff import RoleDiff
from mcore_ckpt.tools.examine.differences import finite_or_none
from mcore_ckpt.tools.examine.progress import Progress, no_progress

# The value of `ShardColumns.same_as` for a shard with its own bytes.
NO_ALIAS = -1
# The axes of a rank's coordinates, in the order of `RoleOverview.ranks`.
AXES = tuple(RankCoordinates.__dataclass_fields__)


@dataclass(frozen=True)
class ShardColumns:
    """All shards of a checkpoint, ordered by tensor; item i of each column belongs to shard i.

    Attributes:
        tensor, file: positions in the tensors and files of the checkpoint.
        kind, dtype, region: positions in the tables of `RoleOverview`.
        start, stop: the shard's flat range in the region's local tensor, in elements.
        offset, nbytes: where the shard's bytes are in the file.
        same_as: the kind under which the bytes are stored, as a position in the table of kinds; NO_ALIAS if that is the
            shard's own kind.
    """

    tensor: tuple[int, ...]
    file: tuple[int, ...]
    kind: tuple[int, ...]
    dtype: tuple[int, ...]
    region: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: tuple[int, ...]
    nbytes: tuple[int, ...]
    same_as: tuple[int, ...]


@dataclass(frozen=True)
class RoleOverview:
    """One role's checkpoint.

    Attributes:
        tensors: the global names of the tensors, in natural order.
        kinds, dtypes, regions: the tables that the columns of `shards` refer to. The regions in the table have no flat
            ranges.
        shards: where each part of each tensor is.
        metrics: all metrics by name, including those that were set after the save.
    """

    path: Path
    manifest: Manifest
    tensors: tuple[str, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    regions: tuple[Region, ...]
    shards: ShardColumns
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        manifest = self.manifest
        return {
            "path": str(self.path),
            "role": manifest.role,
            "roles": list(manifest.roles),
            "created": manifest.created,
            "versions": dict(manifest.versions),
            "contents": list(manifest.contents),
            "metrics": dict(self.metrics),
            "topology": asdict(manifest.topology),
            "axes": list(AXES),
            "ranks": [list(rank.by_axis.values()) for rank in manifest.ranks],
            "stages": [asdict(stage) for stage in manifest.stages],
            "files": [[file.path, file.kind, file.rank, file.size] for file in manifest.files],
            "timeline": None if manifest.save_timeline is None else encoded_timeline(manifest.save_timeline),
            "tensors": list(self.tensors),
            "kinds": list(self.kinds),
            "dtypes": list(self.dtypes),
            "regions": [_region(region) for region in self.regions],
            "shards": {name: list(column) for name, column in vars(self.shards).items()},
        }


@dataclass(frozen=True)
class Overview:
    """The content of a page: one step, its roles and, after a comparison, the differences from another checkpoint.

    Attributes:
        compared_with: the checkpoint that the roles were compared with; None if there was no comparison.
        diffs: the differences of each role that both checkpoints have, by the role's folder.
        only_in_other: the roles that only the other checkpoint has.
    """

    step: int
    roles: tuple[RoleOverview, ...]
    compared_with: str | None = None
    diffs: Mapping[Path, RoleDiff] = field(default_factory=dict)
    only_in_other: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "roles": [role.to_json() | {"diff": _diff(self.diffs.get(role.path))} for role in self.roles],
            "comparedWith": self.compared_with,
            "onlyInB": list(self.only_in_other),
        }


def overview_of_role(role_dir: Path, progress: Progress = no_progress) -> RoleOverview:
    """Reads the manifest and all indexes of a role's checkpoint. `progress` counts the bytes of the indexes.

    Raises:
        CheckpointNotFoundError: the folder has no manifest.
        CheckpointCorruptError: the manifest or an index is damaged.

    Example:
        >>> overview_of_role(role_dir).tensors[0]  # doctest: +SKIP
        'embedding.word_embeddings.weight'
    """
    manifest = read_manifest(role_dir)
    indexed = [(number, file) for number, file in enumerate(manifest.files) if file.index is not None]
    tables = _Tables(manifest)
    read = partial(read_index, role_dir)
    sizes = [0 if file.index is None else file.index.size for _, file in indexed]
    # Read a few files at a time, because all indexes together could need much memory.
    for first in range(0, len(indexed), tuning.LOOK_THREADS):
        last = first + tuning.LOOK_THREADS
        indexes = results_of([file for _, file in indexed[first:last]], read, tuning.LOOK_THREADS)
        for (number, _), index in zip(indexed[first:last], indexes, strict=True):
            tables.add(number, index)
        progress(sum(sizes[:last]), sum(sizes))
    return tables.overview(role_dir)


class _Tables:
    """Collects the shards of the indexes, and numbers their kinds, dtypes and regions."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._tensors = tuple(sorted(manifest.tensors, key=natural_order))
        self._number = {name: number for number, name in enumerate(self._tensors)}
        self._kinds: dict[str, int] = {}
        self._dtypes: dict[str, int] = {}
        self._regions: dict[Region, int] = {}
        self._rows: list[tuple[int, ...]] = []

    def add(self, file: int, index: FileIndex) -> None:
        for shard in index.shards:
            place = (shard.offset, shard.nbytes, NO_ALIAS)
            self._add(file, shard.key.name, shard.key.kind, shard.as_stored.dtype, shard.region, place)
        for alias in index.aliases:
            place = (0, 0, _number_of(self._kinds, alias.same_as))
            self._add(file, alias.key.name, alias.key.kind, alias.dtype, alias.region, place)

    def _add(self, file: int, name: str, kind: str, dtype: str, region: Region, place: tuple[int, int, int]) -> None:
        tensor = self._number.get(name)
        if tensor is None:
            return  # readers do not see a tensor that the manifest does not list
        local = Region(region.global_shape, region.local_shape, region.pieces, (0, 0))
        numbers = (_number_of(self._kinds, kind), _number_of(self._dtypes, dtype), _number_of(self._regions, local))
        self._rows.append((tensor, file, *numbers, *region.flat, *place))

    def overview(self, role_dir: Path) -> RoleOverview:
        columns = zip(*sorted(self._rows), strict=True) if self._rows else [()] * len(ShardColumns.__dataclass_fields__)
        tables = tuple(self._kinds), tuple(self._dtypes), tuple(self._regions)
        metrics = metrics_of(role_dir, self._manifest)
        return RoleOverview(role_dir, self._manifest, self._tensors, *tables, ShardColumns(*columns), metrics)


def _number_of(table: dict[Any, int], item: Any) -> int:
    return table.setdefault(item, len(table))


def _region(region: Region) -> list[Any]:
    pieces = [[list(piece.local_offset), list(piece.shape), list(piece.global_offset)] for piece in region.pieces]
    return [list(region.global_shape), list(region.local_shape), pieces]


def _diff(diff: RoleDiff | None) -> dict[str, Any] | None:
    """Returns a diff as JSON values. JSON has no infinity, so infinity becomes null."""
    if diff is None:
        return None
    return {
        "with": str(diff.right),
        "compared": diff.compared,
        "tensors": [
            [
                *(each.name, each.kind, each.problem, *each.sides, each.numel, each.differing),
                *map(finite_or_none, (each.max_abs, each.max_rel)),
            ]
            for each in diff.tensors
        ],
        "values": [[value.name, value.left, value.right] for value in diff.values],
        "notes": list(diff.notes),
    }
