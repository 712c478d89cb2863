"""Finds the files of a native checkpoint that hold a tensor, and the tensor's place in these files. Reads no tensor.

A file's index is read only when a tensor is looked for in that file, because one rank needs only a few of a thousand
ranks' files. This module does not import torch, which would take more than a second: commands that show the contents of
a checkpoint, and read no tensor, use this module alone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Protocol

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.index_entries import IndexEntries
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.reading import read_entries, read_manifest
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.sharding.names import is_expert
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, PARAM, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region

# The version of the format that introduced bound state.
_BOUND_VERSION = 2
# The number of neighbouring tensors in the manifest's list that share one list of files.
_BLOCK = 16


class IndexFolder(Protocol):
    """The folder of one checkpoint's files, for reading their indexes. Messages show `str(folder)`."""

    @property
    def place(self) -> Path | str:
        """The folder's path, or its URL in a remote store."""

    def index(self, record: FileRecord) -> IndexEntries: ...


@dataclass(frozen=True)
class LocalIndexes:
    """The indexes in a folder on a file system."""

    place: Path

    def __str__(self) -> str:
        return str(self.place)

    def index(self, record: FileRecord) -> IndexEntries:
        return read_entries(self.place, record)


@dataclass(frozen=True, eq=False)
class _Opened:
    """The shards of one tensor in one file, according to the file's index."""

    shards: dict[ShardKey, StoredShard]
    aliases: dict[ShardKey, ShardKey]
    kinds: tuple[str, ...]
    alias_regions: dict[ShardKey, Region]
    bound_state: dict[ShardKey, tuple[StoredShard, ...]]

    def region(self, key: ShardKey) -> Region | None:
        shard = self.shards.get(key)
        return self.alias_regions.get(key) if shard is None else shard.region


class _Holders:
    """The files that hold each tensor.

    A few neighbouring tensors share one list, from which `of` selects the files that have the tensor. A list for each
    of 100,000 tensors would take a good part of a second to make.
    """

    def __init__(self, files: Sequence[FileRecord], tensors: int) -> None:
        self._files = files
        self._of_block = [array("I") for _ in range(0, tensors, _BLOCK)]
        for number, file in enumerate(files):
            done = -1  # the last block that has the file already; several of the file's runs can be in one block
            for first, last in file.holds:
                for block in range(max(first // _BLOCK, done + 1), last // _BLOCK + 1):
                    self._of_block[block].append(number)
                done = last // _BLOCK

    def of(self, position: int) -> list[FileRecord]:
        """Returns the files that hold the tensor at this position of the manifest's list, in the manifest's order."""
        near = (self._files[number] for number in self._of_block[position // _BLOCK])
        return [file for file in near if _has(file.holds.ends, position)]


def _has(ends: Sequence[int], position: int) -> bool:
    """Returns True if a position is in a run. `ends` has the first and last position of each run, ascending."""
    after = bisect_left(ends, position)
    return after % 2 == 1 or (after < len(ends) and ends[after] == position)


class StoredTensors:
    """Finds the shards of each tensor in a native checkpoint.

    Args:
        folder: the folder of the files, local or in a remote store.
        manifest: the checkpoint's manifest. During an in-line export, `manifest.json` is not in the folder yet.

    Example:
        >>> stored = StoredTensors.in_folder(Path("checkpoints/global_steps_100/actor"))  # doctest: +SKIP
        >>> len(stored.files(ShardKey("decoder.final_layernorm.weight", MODEL)))  # doctest: +SKIP
        2
    """

    def __init__(self, folder: IndexFolder, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._indexes: dict[str, IndexEntries] = {}
        self._opened: dict[tuple[str, str], _Opened] = {}

    @staticmethod
    def in_folder(role_dir: Path) -> StoredTensors:
        """Opens a local folder. Raises CheckpointNotFoundError or CheckpointCorruptError."""
        return StoredTensors(LocalIndexes(role_dir), read_manifest(role_dir))

    @property
    def place(self) -> Path | str:
        return self.folder.place

    @cached_property
    def names(self) -> Mapping[str, int]:
        """Maps the name of each tensor to its position in the manifest's list."""
        return {name: number for number, name in enumerate(self.manifest.tensors)}

    @property
    def weight_kind(self) -> str:
        return MODEL if "model" in self.manifest.contents else PARAM

    def tp_size(self, expert: bool) -> int:
        return self.manifest.topology.etp if expert else self.manifest.topology.tp

    def parts(self, key: ShardKey, position: RankPosition | None = None) -> Iterator[Sequence[StoredShard]]:
        for files in self._by_nearness(key, position):
            shards = self.shards(key, files)
            if not shards and key.kind == PARAM and (alias := self._alias(key, files)) is not None:
                yield from self.parts(alias, position)
                return
            yield shards

    def kinds(self, name: str, position: RankPosition | None = None) -> tuple[str, ...]:
        for files in self._by_nearness(ShardKey(name, PARAM), position):
            if kinds := self.kinds_in(name, files):
                return kinds
        return ()

    def bound_kinds(self, key: ShardKey) -> tuple[str, ...]:
        """Returns the kinds of the bound state that belongs to shards of the key."""
        opened = (self._open(file, key.name) for file in self.files(key))
        return tuple(dict.fromkeys(shard.key.kind for each in opened for shard in each.bound_state.get(key, ())))

    def bound_to(self, key: ShardKey, region: Region) -> dict[str, StoredShard] | None:
        """Returns the bound state that belongs to the key's shard of a region: its tensors, by kind.

        Returns None if no such shard is stored, although other shards of the key have bound state.
        """
        if self.manifest.format_version < _BOUND_VERSION:
            return {}  # older formats have no bound state, so no index need be read
        for file in self.files(key):
            opened = self._open(file, key.name)
            if opened.bound_state.get(key) and opened.region(key) == region:
                return {shard.key.kind: shard for shard in opened.bound_state[key]}
        return None if self.bound_kinds(key) else {}

    @cached_property
    def by_path(self) -> dict[str, FileRecord]:
        """The manifest's records of all files."""
        return {file.path: file for file in self.manifest.files}

    def file(self, path: str) -> FileRecord:
        """Returns the manifest's record of a file. Raises CheckpointCorruptError if the manifest does not list it."""
        if path not in self.by_path:
            raise CheckpointCorruptError(f"{self.folder}/{file_names.MANIFEST_FILE}: does not list {path}")
        return self.by_path[path]

    def files(self, key: ShardKey) -> list[FileRecord]:
        """Returns the files that can hold a shard of the key.

        These are model files for the kinds MODEL and OPAQUE, and optimizer files for all other kinds.
        """
        position = self.names.get(key.name)
        if position is None:
            return []
        model, optimizer = self._holders
        return (model if key.kind in (MODEL, OPAQUE) else optimizer).of(position)

    def shards(self, key: ShardKey, files: Iterable[FileRecord]) -> list[StoredShard]:
        """Returns the key's shards in these files. Raises CheckpointCorruptError if an index is damaged."""
        found = (self._open(file, key.name).shards.get(key) for file in files)
        return [shard for shard in found if shard is not None]

    def is_alias(self, key: ShardKey) -> bool:
        """Returns True if a main parameter shares the bytes of the model's tensor (fp32 training)."""
        files = self.files(key)
        return not self.shards(key, files) and self._alias(key, files) is not None

    def kinds_in(self, name: str, files: Iterable[FileRecord]) -> tuple[str, ...]:
        """Returns the kinds of a tensor's optimizer state that these files hold."""
        return tuple(dict.fromkeys(kind for file in files for kind in self._open(file, name).kinds))

    @cached_property
    def _holders(self) -> tuple[_Holders, _Holders]:
        """The model files and the optimizer files that hold each tensor."""
        optimizer = [file.kind == "optimizer" for file in self.manifest.files]
        model = [not each for each in optimizer]
        count = len(self.manifest.tensors)
        model_files, optimizer_files = (list(compress(self.manifest.files, kind)) for kind in (model, optimizer))
        return _Holders(model_files, count), _Holders(optimizer_files, count)

    def _alias(self, key: ShardKey, files: Iterable[FileRecord]) -> ShardKey | None:
        """Returns the key whose bytes this key shares, or None if these files list no alias for this key."""
        return next(
            (alias for file in files if (alias := self._open(file, key.name).aliases.get(key)) is not None), None
        )

    def _by_nearness(self, key: ShardKey, position: RankPosition | None) -> list[list[FileRecord]]:
        """Returns the sets of files to look into: first the files of the nearest ranks, then the files of all ranks.

        Each set is sorted by tensor-parallel rank, so that a tensor that is replicated over these ranks is read from
        one file. The last set is for tensors that are cut in an unusual way. If the checkpoint was saved under the
        present layout, the reading rank's own optimizer file is an additional first set. Without this set, the files of
        many data-parallel ranks would be opened, because each file has some of the tensor's state.
        """
        expert = is_expert(key.name)
        ranks = self.manifest.ranks

        def rank_of(file: FileRecord) -> int:
            return ranks[file.rank].etp if expert else ranks[file.rank].tp

        ordered = sorted(self.files(key), key=rank_of)
        if position is None:
            return [ordered]
        size, at, now = self.tp_size(expert), position.coordinates, position.topology
        rank, wanted_size = (at.etp, now.etp) if expert else (at.tp, now.tp)
        near = [
            file
            for file in ordered
            if rank_of(file) * wanted_size < (rank + 1) * size and rank * size < (rank_of(file) + 1) * wanted_size
        ]
        sets = [near, ordered] if len(near) < len(ordered) else [near]
        if now == self.manifest.topology:
            own = [file for file in near if file.path == file_names.optimizer_file(*at.place)]
            sets = [own, *sets] if own and len(near) > 1 else sets
        return [self._of_saving_expert_rank(sets[0], position), *sets] if key.kind == OPAQUE and expert else sets

    def _of_saving_expert_rank(self, files: Sequence[FileRecord], position: RankPosition) -> list[FileRecord]:
        """Returns the files of the expert-parallel rank that saved the reading rank's first expert.

        A module of grouped experts stores one `_extra_state` per expert-parallel rank, all under the same name.
        """
        ep = position.coordinates.ep * self.manifest.topology.ep // position.topology.ep
        return [file for file in files if self.manifest.ranks[file.rank].ep == ep]

    def _open(self, file: FileRecord, name: str) -> _Opened:
        opened = self._opened.get((file.path, name))
        if opened is None:
            if file.path not in self._indexes:
                self._indexes[file.path] = self.folder.index(file)
            index = self._indexes[file.path].of(name)
            aliases = {alias.key: ShardKey(alias.key.name, alias.same_as) for alias in index.aliases}
            regions = {alias.key: alias.region for alias in index.aliases}
            shards = {shard.key: shard for shard in index.shards}
            opened = _Opened(shards, aliases, _kinds(index.shards), regions, _bound_state(index.shards))
            self._opened[file.path, name] = opened
        return opened


def _kinds(shards: Sequence[StoredShard]) -> tuple[str, ...]:
    """Returns the kinds of a tensor's shards. Bound state, scales and upper halves of coded shards do not count."""
    codings = [shard.coding for shard in shards if shard.coding is not None]
    partners = {kind for coding in codings for kind in (coding.scale, coding.upper)}
    return tuple(shard.key.kind for shard in shards if shard.key.kind not in partners and shard.beside is None)


def _bound_state(shards: Sequence[StoredShard]) -> dict[ShardKey, tuple[StoredShard, ...]]:
    """Returns the bound state of each shard that has bound state."""
    found: dict[ShardKey, tuple[StoredShard, ...]] = {}
    for shard in shards:
        if shard.beside is not None:
            key = ShardKey(shard.key.name, shard.beside)
            found[key] = (*found.get(key, ()), shard)
    return found
