"""The files of the new layout, each tensor's place in them, and where its bytes are: before a byte is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.index import Alias
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.formats.locate import Source, Sources, Wanted
from mcore_ckpt.formats.native.catalog import Catalog
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.ranks.topology import RankCoordinates, Topology, coordinates_of
from mcore_ckpt.sharding.cuts import Cut, find_cut
from mcore_ckpt.sharding.names import expert_of
from mcore_ckpt.sharding.placement import PipelinePlacement, even_ranges
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, PARAM, ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, padded_rows
from mcore_ckpt.tools.reshard.survey import SavedTensor
from mcore_ckpt.tools.reshard.target import Target, WantedLayout

_EMBEDDING = "word_embeddings.weight"


@dataclass(frozen=True, eq=False)
class PlannedFile:
    """One indexed file to write, and the world rank that would write it. Its tensors are on `meta`."""

    request: WriteRequest
    rank: int


class Regions:
    """What each rank of the new layout has of each tensor.

    Args:
        tensors: all there are.
        saved, new: the two layouts.
        wanted: for the size of the vocabulary.

    Raises:
        CheckpointMismatchError: the vocabulary is smaller than asked for.
    """

    def __init__(self, tensors: Iterable[SavedTensor], saved: Topology, new: Topology, wanted: WantedLayout) -> None:
        self._saved, self._new = saved, new
        embedding = next((t for t in tensors if t.name.endswith(_EMBEDDING) and t.seen), None)
        self._saved_rows = None if embedding is None else embedding.shape[0]
        self._rows = self._padded_rows(embedding, wanted)
        self._cuts: dict[str, Cut] = {}
        self._found: dict[tuple[str, int], Region] = {}

    @property
    def known_vocabulary(self) -> int | None:
        """Rows that both layouts have: what lies beyond is padding."""
        return None if self._rows is None or self._saved_rows is None else min(self._rows, self._saved_rows)

    def of(self, tensor: SavedTensor, at: RankCoordinates) -> Region:
        """The local region of the rank at `at`.

        Raises:
            CheckpointMismatchError: it does not divide, is not cut as its name says, or it is not known how.
        """
        rank = at.etp if tensor.expert else at.tp
        key = (tensor.name, rank)
        if key not in self._found:
            self._found[key] = self._region(tensor, rank)
        return self._found[key]

    def _padded_rows(self, embedding: SavedTensor | None, wanted: WantedLayout) -> int | None:
        if embedding is None:
            return None
        try:
            return padded_rows(embedding.shape[0], self._new.tp, wanted.vocab_size, wanted.vocab_divisor)
        except ValueError as error:
            raise CheckpointMismatchError(f"{embedding.file}: tensor {embedding.name}: {error}") from None

    def _region(self, tensor: SavedTensor, rank: int) -> Region:
        saved, new = (self._saved.etp, self._new.etp) if tensor.expert else (self._saved.tp, self._new.tp)
        shape = tensor.shape
        if has_vocabulary_rows(tensor.name) and self._rows is not None and shape[0] == self._saved_rows:
            shape = (self._rows, *shape[1:])
        if saved == new and shape == tensor.shape and rank in tensor.seen:
            # The checkpoint itself says it: tensors of any kind can stay as they are.
            return tensor.seen[rank]
        try:
            return self._cut(tensor, saved).region(shape, rank, new)
        except ValueError as error:
            what = "etp" if tensor.expert else "tp"
            raise CheckpointMismatchError(f"{tensor.file}: tensor {tensor.name}: {what} = {new}: {error}") from None

    def _cut(self, tensor: SavedTensor, saved: int) -> Cut:
        if tensor.name not in self._cuts:
            # A value head is called like the output layer; it has few rows, and is not cut.
            is_value_head = tensor.name.startswith("output_layer.") and tensor.shape[0] != self._saved_rows
            self._cuts[tensor.name] = find_cut(
                tensor.name, tensor.seen, saved, replicated=is_value_head and self._saved_rows is not None
            )
        return self._cuts[tensor.name]


@dataclass(frozen=True)
class _Experts:
    """How many experts there are below each module called `experts`, and how they are divided."""

    counts: dict[str, int]
    ep: int

    @staticmethod
    def of(tensors: Iterable[SavedTensor], ep: int) -> _Experts:
        counts: dict[str, int] = {}
        for tensor in tensors:
            if (expert := expert_of(tensor.name)) is not None:
                counts[expert[0]] = max(counts.get(expert[0], 0), expert[1] + 1)
        for module, count in counts.items():
            if count % ep:
                raise CheckpointMismatchError(f"{module}: {count} experts cannot be divided among ep = {ep} ranks")
        return _Experts(counts, ep)

    def holds(self, name: str, ep_rank: int) -> bool:
        """Whether an expert-parallel rank has a tensor; each has what is not one expert's."""
        expert = expert_of(name)
        return expert is None or expert[1] // (self.counts[expert[0]] // self.ep) == ep_rank


class Planner:
    """Plans the files of a new layout.

    Args:
        catalog: the checkpoint.
        tensors: what it holds.
        target: the layout.
        wanted: for the size of the vocabulary.

    Raises:
        CheckpointMismatchError: experts or vocabulary do not fit the layout, or a tensor's stage is not known.
    """

    def __init__(self, catalog: Catalog, tensors: Sequence[SavedTensor], target: Target, wanted: WantedLayout) -> None:
        self._catalog = catalog
        self._topology = target.topology
        self._regions = Regions(tensors, catalog.manifest.topology, target.topology, wanted)
        self._experts = _Experts.of(tensors, target.topology.ep)
        self._by_stage = _by_stage(catalog, tensors, target)

    def sources(self, rank: int) -> Sources:
        """Finds the bytes of what a rank of the new layout has."""
        at = coordinates_of(rank, self._topology)
        return Sources(self._catalog, self._topology, at, self._regions.known_vocabulary)

    def files(self) -> list[PlannedFile]:
        """All indexed files.

        Raises:
            CheckpointMismatchError: a tensor does not divide.
            CheckpointCorruptError: elements are in none of the files.
        """
        contents = self._catalog.manifest.contents
        return [
            *(self._model_files() if "model" in contents else ()),
            *(self._optimizer_files() if "optimizer" in contents else ()),
        ]

    # -- model ---------------------------------------------------------------------------------------------

    def _model_files(self) -> Iterator[PlannedFile]:
        size = self._topology
        for pp in range(size.pp):
            members = [tensor for tensor in self._by_stage[pp] if tensor.model is not None]
            dense = [tensor for tensor in members if not (size.experts_apart and tensor.expert)]
            experts = [tensor for tensor in members if size.experts_apart and tensor.expert]
            for tp in range(size.tp):
                yield self._model_file(
                    file_names.model_file(tp, pp), "model", pp * (size.world_size // size.pp) + tp, dense
                )
            for ep in range(size.ep if experts else 0):
                here = [tensor for tensor in experts if self._experts.holds(tensor.name, ep)]
                for etp in range(size.etp):
                    rank = pp * (size.world_size // size.pp) + ep * size.etp + etp
                    yield self._model_file(file_names.expert_file(etp, pp, ep), "experts", rank, here)

    def _model_file(self, path: str, kind: str, rank: int, tensors: Iterable[SavedTensor]) -> PlannedFile:
        sources = self.sources(rank)
        writes = []
        for tensor in tensors:
            assert tensor.model is not None
            key = ShardKey(tensor.name, tensor.model)
            if tensor.model == OPAQUE:
                writes.append(_opaque_write(key, tensor, path, sources))
            else:
                region = self._regions.of(tensor, coordinates_of(rank, self._topology))
                writes.append(_write((tensor.name,), key, region, region.local_shape, tensor, path, sources))
        return PlannedFile(WriteRequest(path, kind, tuple(writes)), rank)

    # -- optimizer -----------------------------------------------------------------------------------------

    def _optimizer_files(self) -> Iterator[PlannedFile]:
        for rank in range(self._topology.world_size):
            at = coordinates_of(rank, self._topology)
            path = file_names.optimizer_file(*at.place)
            sources = self.sources(rank)
            writes: list[TensorWrite] = []
            aliases: list[Alias] = []
            for tensor, region in self._owned(at):
                self._add_state(tensor, region, path, sources, writes, aliases)
            yield PlannedFile(WriteRequest(path, "optimizer", tuple(writes), tuple(aliases), tree=("state",)), rank)

    def _owned(self, at: RankCoordinates) -> Iterator[tuple[SavedTensor, Region]]:
        """This rank's even part of the dense parameters of its (pp, tp), and of the experts of its (pp, etp, ep)."""
        trained = [tensor for tensor in self._by_stage[at.pp] if tensor.main]
        dense = [tensor for tensor in trained if not tensor.expert]
        experts = [tensor for tensor in trained if tensor.expert and self._experts.holds(tensor.name, at.ep)]
        size = self._topology
        for members, part, parts in (
            (dense, at.dp * size.cp + at.cp, size.dp * size.cp),
            (experts, at.edp, size.edp),
        ):
            regions = [self._regions.of(tensor, at) for tensor in members]
            for number, start, stop in even_ranges([region.numel for region in regions], parts)[part]:
                yield members[number], regions[number].with_flat(start, stop)

    def _add_state(
        self,
        tensor: SavedTensor,
        region: Region,
        path: str,
        sources: Sources,
        writes: list[TensorWrite],
        aliases: list[Alias],
    ) -> None:
        main = ShardKey(tensor.name, PARAM)
        if tensor.aliased:
            source = _find(Wanted(main, region, tensor.expert, path), tensor, sources)
            aliases.append(Alias(main, MODEL, region, source.dtype))
        for kind in (*(() if tensor.aliased else (PARAM,)), *tensor.moments):
            key = ShardKey(tensor.name, kind)
            where = ("state", tensor.name, kind)
            writes.append(_write(where, key, region, (region.numel,), tensor, path, sources))


def _write(
    where: tuple[str, ...],
    key: ShardKey,
    region: Region,
    shape: tuple[int, ...],
    tensor: SavedTensor,
    path: str,
    sources: Sources,
) -> TensorWrite:
    source = _find(Wanted(key, region, tensor.expert, path), tensor, sources)
    return TensorWrite(where, key, region, torch.empty(shape, dtype=torch_dtype(source.dtype), device="meta"), shape)


def _find(wanted: Wanted, tensor: SavedTensor, sources: Sources) -> Source:
    source = sources.find(wanted)
    if source is None:
        raise CheckpointCorruptError(f"{tensor.file}: tensor {wanted.key}: is in none of the files that should have it")
    return source


def _opaque_write(key: ShardKey, tensor: SavedTensor, path: str, sources: Sources) -> TensorWrite:
    found = sources.opaque(Wanted(key, Region.whole((0,)), tensor.expert, path))
    assert found is not None, "it has been seen"
    meta = torch.empty(found.region.local_shape, dtype=torch_dtype(found.dtype), device="meta")
    return TensorWrite((tensor.name,), key, found.region, meta, found.region.local_shape)


def _by_stage(catalog: Catalog, tensors: Iterable[SavedTensor], target: Target) -> dict[int, list[SavedTensor]]:
    """The tensors of each pipeline rank."""
    saved = {(stage.pp, stage.vp): (stage.decoder, stage.mtp) for stage in catalog.manifest.stages}
    as_saved = saved == {place: (stage.decoder, stage.mtp) for place, stage in target.stages.items()}
    placement = PipelinePlacement(target.stages)
    by_stage: dict[int, list[SavedTensor]] = defaultdict(list)
    for tensor in tensors:
        pp = tensor.pp if as_saved else placement.rank_of(tensor.name)
        if pp is None:
            raise CheckpointMismatchError(
                f"{tensor.file}: tensor {tensor.name}: its name does not tell which of {target.topology.pp} pipeline "
                f"ranks has it: keep pp = {catalog.manifest.topology.pp}, or load it directly under the new layout"
            )
        by_stage[pp].append(tensor)
    return by_stage
