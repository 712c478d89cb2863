"""Reads a checkpoint of this package: finds the files that hold a tensor and its place in them, and reads its bytes.

It reads a file's index only when it looks for a tensor in that file, because one rank needs only a few of a thousand
ranks' files.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.index_entries import IndexEntries
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.contract import Fill, RankPosition, TensorInfo
from mcore_ckpt.formats.native.coded import Partners, read_coded
from mcore_ckpt.formats.native.folder import Folder, LocalFolder
from mcore_ckpt.sharding.names import is_expert
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, PARAM, ReadRange, ShardKey, StoredShard, plan_reads
from mcore_ckpt.sharding.regions import Region

# The version of the format that has tensors that belong to shards.
_BOUND_VERSION = 2
# The dtype of upper halves.
_UPPER = "bfloat16"


@dataclass(frozen=True, eq=False)
class _Opened:
    """What one file has of one tensor, according to the file's index."""

    shards: dict[ShardKey, StoredShard]
    aliases: dict[ShardKey, ShardKey]
    kinds: tuple[str, ...]
    alias_regions: dict[ShardKey, Region]
    beside: dict[ShardKey, tuple[StoredShard, ...]]

    def region(self, key: ShardKey) -> Region | None:
        shard = self.shards.get(key)
        return self.alias_regions.get(key) if shard is None else shard.region


@dataclass(frozen=True, eq=False)
class _Holders:
    """The files that hold each tensor.

    The numbers of the files that hold tensor `position` are `numbers[starts[position] : starts[position + 1]]`. A list
    for each of 100,000 tensors would take a good part of a second to make, most of it for garbage collections.
    """

    files: Sequence[FileRecord]
    numbers: torch.Tensor
    starts: torch.Tensor

    @staticmethod
    def among(files: Sequence[FileRecord], tensors: int) -> _Holders:
        ends = array("I")
        for file in files:
            ends += file.holds.ends
        firsts, lasts = torch.tensor(ends, dtype=torch.int32).view(len(ends) // 2, 2).unbind(1)
        counts = torch.tensor([len(file.holds) for file in files], dtype=torch.int32)
        by_run = torch.repeat_interleave(torch.arange(len(files), dtype=torch.int32), counts)
        lengths = lasts - firsts + 1
        before = torch.cumsum(lengths, 0, dtype=torch.int32) - lengths
        held = torch.repeat_interleave(firsts - before, lengths)
        held += torch.arange(len(held), dtype=torch.int32)
        held, order = torch.sort(held, stable=True)
        starts = torch.searchsorted(held, torch.arange(tensors + 1, dtype=torch.int32))
        return _Holders(files, torch.repeat_interleave(by_run, lengths)[order], starts)

    def of(self, position: int) -> list[FileRecord]:
        start, stop = self.starts[position : position + 2].tolist()
        return [self.files[number] for number in self.numbers[start:stop].tolist()]


class NativeReader:
    """Reads one native checkpoint; implements `formats.contract.CheckpointReader`.

    Args:
        folder: the folder of the files, local or in a remote store.
        manifest: the checkpoint's manifest. During an in-line export, `manifest.json` is not in the folder yet.

    Example:
        >>> reader = NativeReader.open(Path("checkpoints/global_steps_100/actor"))  # doctest: +SKIP
        >>> reader.info(ShardKey("decoder.final_layernorm.weight", MODEL)).shape  # doctest: +SKIP
        (4096,)
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._indexes: dict[str, IndexEntries] = {}
        self._opened: dict[tuple[str, str], _Opened] = {}
        self._partners: dict[tuple[ShardKey, str], Partners] = {}

    @staticmethod
    def open(role_dir: Path) -> NativeReader:
        """Opens a local folder. Raises CheckpointNotFoundError or CheckpointCorruptError."""
        return NativeReader(LocalFolder(role_dir), read_manifest(role_dir))

    @property
    def place(self) -> Path | str:
        return self.folder.place

    @cached_property
    def names(self) -> Mapping[str, int]:
        """The names of all tensors, and for each its position in the manifest's list."""
        return {name: number for number, name in enumerate(self.manifest.tensors)}

    @property
    def weight_kind(self) -> str:
        return MODEL if "model" in self.manifest.contents else PARAM

    def tp_size(self, expert: bool) -> int:
        return self.manifest.topology.etp if expert else self.manifest.topology.tp

    def info(self, key: ShardKey) -> TensorInfo | None:
        """Returns the dtype and the global shape of a tensor, or None if the checkpoint does not have the tensor.

        Raises:
            CheckpointCorruptError: an index is missing, truncated or damaged.
        """
        # One file at a time, because looking into a file means reading its index.
        shard = next((shard for file in self.files(key) for shard in self.shards(key, [file])), None)
        if shard is None:
            return None
        return TensorInfo(torch_dtype(shard.dtype), shard.region.global_shape)

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

    def read(self, ranges: Fill, check: bool = True) -> int:
        plain: list[tuple[ReadRange, torch.Tensor]] = []
        coded: list[tuple[ReadRange, torch.Tensor]] = []
        for part in ranges:
            (plain if part[0].stored.coding is None else coded).append(part)

        def fill(parts: Sequence[tuple[ReadRange, torch.Tensor]]) -> int:
            return self.folder.fill(self.by_path, parts, check)

        return fill(plain) + (read_coded(coded, fill, self.partners) if coded else 0)

    def bound_kinds(self, key: ShardKey) -> tuple[str, ...]:
        """Returns the kinds of the tensors that belong to shards of the key as a whole."""
        found = (shard.key.kind for file in self.files(key) for shard in self._open(file, key.name).beside.get(key, ()))
        return tuple(dict.fromkeys(found))

    def bound_to(self, key: ShardKey, region: Region) -> dict[str, StoredShard] | None:
        """Returns the tensors that belong to the key's shard of a region as a whole, by kind.

        Returns None if no such shard is stored, although other shards of the key have such tensors.
        """
        if self.manifest.format_version < _BOUND_VERSION:
            return {}  # without reading the indexes of all ranks
        for file in self.files(key):
            opened = self._open(file, key.name)
            if opened.beside.get(key) and opened.region(key) == region:
                return {shard.key.kind: shard for shard in opened.beside[key]}
        return None if self.bound_kinds(key) else {}

    def partners(self, shard: StoredShard) -> Partners:
        """Finds what the values of a coded shard follow from, besides its own elements.

        Raises:
            CheckpointCorruptError: upper halves of some elements are in no file.
        """
        found = self._partners.get((shard.key, shard.file))
        if found is None:
            found = self._partners[shard.key, shard.file] = self._find_partners(shard)
        return found

    def _find_partners(self, shard: StoredShard) -> Partners:
        coding, name, file = shard.coding, shard.key.name, self.file(shard.file)
        assert coding is not None
        if coding.scale is not None:
            return Partners(scale=self._open(file, name).shards[ShardKey(name, coding.scale)])
        assert coding.upper is not None
        if coding.upper != MODEL:
            upper = self._open(file, name).shards[ShardKey(name, coding.upper)]
            return Partners(upper=(ReadRange.whole(upper),))
        manifest = self.manifest
        position = RankPosition(manifest.topology, manifest.ranks[file.rank])
        for stored in self.parts(ShardKey(name, MODEL), position):
            plan = plan_reads(shard.region, stored)
            if not (plan.missing or plan.outside) and {each.dtype for each in stored} == {_UPPER}:
                return Partners(upper=plan.reads)
        raise CheckpointCorruptError(
            f"{self.folder}/{shard.file}: tensor {shard.key}: has the lower 16 bits of each value, but the model's "
            f"files do not have all of the upper ones as {_UPPER}"
        )

    # -- files ---------------------------------------------------------------------------------------------

    @cached_property
    def by_path(self) -> dict[str, FileRecord]:
        """The manifest's records of all files."""
        return {file.path: file for file in self.manifest.files}

    def file(self, path: str) -> FileRecord:
        """Returns the manifest's record of a file. Raises CheckpointCorruptError if the manifest does not list it."""
        if path not in self.by_path:
            raise CheckpointCorruptError(f"{self.folder}/{file_names.MANIFEST_FILE}: does not list {path}")
        return self.by_path[path]

    def plain(self, path: str) -> dict[str, Any]:
        """Reads the values in a small file. Raises CheckpointCorruptError if the file is missing or damaged."""
        return self.folder.plain(self.file(path))

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
        """Returns True if a main parameter has no bytes of its own because it is the model's tensor (fp32 training)."""
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
        return _Holders.among(model_files, count), _Holders.among(optimizer_files, count)

    def _alias(self, key: ShardKey, files: Iterable[FileRecord]) -> ShardKey | None:
        """Returns the key whose bytes this key shares, or None if these files list no alias for this key."""
        return next(
            (alias for file in files if (alias := self._open(file, key.name).aliases.get(key)) is not None), None
        )

    def _by_nearness(self, key: ShardKey, position: RankPosition | None) -> list[list[FileRecord]]:
        """Returns the sets of files to look into: first the files of the nearest ranks, then the files of all ranks.

        Each set is sorted by tensor-parallel rank, so that a tensor that is replicated over these ranks is read from
        one file. The last set is for tensors that are cut in an unusual way. Under the layout of the checkpoint, the
        first set is this rank's own optimizer file, because a tensor's state is in the files of many data-parallel
        ranks.
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
        return [self._in_place(sets[0], position), *sets] if key.kind == OPAQUE and expert else sets

    def _in_place(self, files: Sequence[FileRecord], position: RankPosition) -> list[FileRecord]:
        """Returns the files of the expert-parallel rank that, when saving, held the reading rank's first expert.

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
            opened = _Opened(shards, aliases, _kinds(index.shards), regions, _beside(index.shards))
            self._opened[file.path, name] = opened
        return opened


def _kinds(shards: Sequence[StoredShard]) -> tuple[str, ...]:
    """Returns the kinds of a tensor, but for those that others follow from, or that belong to a shard as a whole."""
    codings = [shard.coding for shard in shards if shard.coding is not None]
    partners = {kind for coding in codings for kind in (coding.scale, coding.upper)}
    return tuple(shard.key.kind for shard in shards if shard.key.kind not in partners and shard.beside is None)


def _beside(shards: Sequence[StoredShard]) -> dict[ShardKey, tuple[StoredShard, ...]]:
    """Returns, for each shard that others belong to, these others."""
    found: dict[ShardKey, tuple[StoredShard, ...]] = {}
    for shard in shards:
        if shard.beside is not None:
            key = ShardKey(shard.key.name, shard.beside)
            found[key] = (*found.get(key, ()), shard)
    return found
