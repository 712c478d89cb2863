"""Plans the files of the new layout: the tensors of each file, and the stored ranges that fill them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import dtype_name, torch_dtype
from mcore_ckpt.checkpoint.index import Alias
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.formats.contract import CheckpointReader, RankPosition
from mcore_ckpt.formats.locate import Located, Locator, Wanted
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.ranks.topology import RankCoordinates, Topology, coordinates_of
from mcore_ckpt.sharding.assignment import PipelineAssignment, even_ranges
from mcore_ckpt.sharding.cuts import Cut, find_cut
from mcore_ckpt.sharding.names import expert_of
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, PARAM, ReadRange, ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.sharding.towers import split_language_model
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, padded_rows
from mcore_ckpt.tools.convert.reshard.saved_tensors import SavedTensor
from mcore_ckpt.tools.convert.reshard.target import SavedLayout, Target, WantedLayout

_EMBEDDING = "word_embeddings.weight"
# A tensor to write, and the stored ranges that fill it.
_PlannedWrite: TypeAlias = tuple[TensorWrite, Located]


@dataclass(frozen=True, eq=False)
class PlannedFile:
    """One indexed file to write.

    Attributes:
        request: the tensors of the file, as tensors on the `meta` device.
        located: the stored ranges of each tensor, in the order of the tensors in `request`.
        rank: the world rank that would write this file in a save under the new layout.
    """

    request: WriteRequest
    located: tuple[Located, ...]
    rank: int

    @property
    def nbytes(self) -> int:
        return sum(write.tensor.nbytes for write in self.request.tensors)


class Regions:
    """Computes, for a tensor and a rank of the new layout, the region of the tensor that the rank holds.

    Raises CheckpointMismatchError: the checkpoint has fewer vocabulary rows than `wanted.vocab_size`.
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
        """The number of vocabulary rows that both layouts have; all later rows are padding. None if unknown."""
        return None if self._rows is None or self._saved_rows is None else min(self._rows, self._saved_rows)

    def check_tokens(self, tokens: int | None) -> None:
        """Raises CheckpointMismatchError if the new vocabulary lacks rows that `tokens` tokens of a tokenizer need."""
        kept = self.known_vocabulary
        if tokens is not None and kept is not None and kept < tokens <= (self._saved_rows or 0):
            raise CheckpointMismatchError(
                f"the checkpoint's tokenizer has {tokens} tokens, but only {kept} of {self._saved_rows} rows of the "
                "vocabulary would be kept: choose a larger --vocab-size"
            )

    def of(self, tensor: SavedTensor, at: RankCoordinates) -> Region:
        """Returns the local region of a tensor on the rank at the coordinates `at`.

        Raises CheckpointMismatchError: the new layout does not divide the tensor, the tensor is cut in another way than
        its name implies, or its cut is unknown.
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
            # Keep the cut of the checkpoint. So tensors whose names do not show their cuts can be planned, too.
            return tensor.seen[rank]
        try:
            return self._cut(tensor, saved).region(shape, rank, new)
        except ValueError as error:
            what = "etp" if tensor.expert else "tp"
            raise CheckpointMismatchError(f"{tensor.file}: tensor {tensor.name}: {what} = {new}: {error}") from None

    def _cut(self, tensor: SavedTensor, saved: int) -> Cut:
        if tensor.name not in self._cuts:
            # A value head has the output layer's name, but is not cut: it has only a few rows, and each rank holds all
            # these rows.
            is_head = split_language_model(tensor.name)[1].startswith("output_layer.")
            is_value_head = is_head and tensor.shape[0] != self._saved_rows
            self._cuts[tensor.name] = find_cut(
                tensor.name, tensor.seen, saved, replicated=is_value_head and self._saved_rows is not None
            )
        return self._cuts[tensor.name]


@dataclass(frozen=True)
class _Experts:
    """The number of experts in each module called `experts`, and the new expert-parallel size."""

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
                raise CheckpointMismatchError(
                    f"{module}: {count} experts cannot be divided among ep = {ep} ranks: choose another ep"
                )
        return _Experts(counts, ep)

    def holds(self, name: str, ep_rank: int) -> bool:
        """Returns True if an expert-parallel rank holds a tensor. Tensors outside of experts are on each rank."""
        expert = expert_of(name)
        return expert is None or expert[1] // (self.counts[expert[0]] // self.ep) == ep_rank


class Planner:
    """Plans the files of a new layout. `wanted` gives the size of the vocabulary.

    Raises CheckpointMismatchError: the experts or the vocabulary do not fit the layout, or a tensor's pipeline rank is
    unknown.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        saved: SavedLayout,
        contents: Sequence[str],
        tensors: Sequence[SavedTensor],
        target: Target,
        wanted: WantedLayout,
    ) -> None:
        self._reader = reader
        self._contents = contents
        self._topology = target.topology
        self.regions = Regions(tensors, saved.topology, target.topology, wanted)
        self._experts = _Experts.of(tensors, target.topology.ep)
        self._by_stage = _by_stage(saved, tensors, target)

    def _locator(self, rank: int) -> Locator:
        position = RankPosition(self._topology, coordinates_of(rank, self._topology))
        return Locator(self._reader, position, self.regions.known_vocabulary)

    def files(self) -> list[PlannedFile]:
        """Plans all files that hold tensors.

        Raises CheckpointMismatchError if the new layout does not divide a tensor, and CheckpointCorruptError if some
        elements are in no file.
        """
        model = self._model_files() if "model" in self._contents else ()
        return [*model, *(self._optimizer_files() if "optimizer" in self._contents else ())]

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
                held = [tensor for tensor in experts if self._experts.holds(tensor.name, ep)]
                for etp in range(size.etp):
                    rank = pp * (size.world_size // size.pp) + ep * size.etp + etp
                    yield self._model_file(file_names.expert_file(etp, pp, ep), "experts", rank, held)

    def _model_file(self, path: str, kind: str, rank: int, tensors: Iterable[SavedTensor]) -> PlannedFile:
        locator = self._locator(rank)
        writes = []
        for tensor in tensors:
            assert tensor.model is not None
            key = ShardKey(tensor.name, tensor.model)
            if tensor.model == OPAQUE:
                writes.append(_opaque_write(key, tensor, locator))
            else:
                region = self.regions.of(tensor, coordinates_of(rank, self._topology))
                writes.append(_write((tensor.name,), key, region, region.local_shape, tensor, path, locator))
        return _planned_file(path, kind, rank, writes)

    def _optimizer_files(self) -> Iterator[PlannedFile]:
        for rank in range(self._topology.world_size):
            at = coordinates_of(rank, self._topology)
            path = file_names.optimizer_file(*at.place)
            locator = self._locator(rank)
            writes: list[_PlannedWrite] = []
            aliases: list[Alias] = []
            for tensor, region in self._owned(at):
                self._add_state(tensor, region, path, locator, writes, aliases)
            yield _planned_file(path, "optimizer", rank, writes, tuple(aliases), tree=("state",))

    def _owned(self, at: RankCoordinates) -> Iterator[tuple[SavedTensor, Region]]:
        """Yields the parameters for which a rank owns optimizer state, each with the owned region.

        At each (pp, tp), the data-parallel ranks divide the elements of all dense parameters evenly. In the same way,
        at each (pp, etp, ep), the data-parallel ranks divide the elements of all expert parameters.
        """
        trained = [tensor for tensor in self._by_stage[at.pp] if tensor.main]
        dense = [tensor for tensor in trained if not tensor.expert]
        experts = [tensor for tensor in trained if tensor.expert and self._experts.holds(tensor.name, at.ep)]
        size = self._topology
        for members, index, count in (
            (dense, at.dp * size.cp + at.cp, size.dp * size.cp),
            (experts, at.edp, size.edp),
        ):
            regions = [self.regions.of(tensor, at) for tensor in members]
            for number, start, stop in even_ranges([region.numel for region in regions], count)[index]:
                yield members[number], regions[number].with_flat(start, stop)

    def _add_state(
        self,
        tensor: SavedTensor,
        region: Region,
        path: str,
        locator: Locator,
        writes: list[_PlannedWrite],
        aliases: list[Alias],
    ) -> None:
        main = ShardKey(tensor.name, PARAM)
        if tensor.aliased:
            located = _locate(Wanted(main, region, path), tensor, locator)
            aliases.append(Alias(main, MODEL, region, dtype_name(located.dtype)))
        for kind in (*(() if tensor.aliased else (PARAM,)), *tensor.moments):
            key = ShardKey(tensor.name, kind)
            where = ("state", tensor.name, kind)
            writes.append(_write(where, key, region, (region.numel,), tensor, path, locator))


def _planned_file(
    path: str,
    kind: str,
    rank: int,
    planned: Sequence[_PlannedWrite],
    aliases: tuple[Alias, ...] = (),
    tree: tuple[str, ...] = (),
) -> PlannedFile:
    request = WriteRequest(path, kind, tuple(write for write, _ in planned), aliases, tree=tree)
    return PlannedFile(request, tuple(located for _, located in planned), rank)


def _write(
    where: tuple[str, ...],
    key: ShardKey,
    region: Region,
    shape: tuple[int, ...],
    tensor: SavedTensor,
    path: str,
    locator: Locator,
) -> _PlannedWrite:
    located = _locate(Wanted(key, region, path), tensor, locator)
    meta = torch.empty(shape, dtype=located.dtype, device="meta")
    return TensorWrite(where, key, region, meta, shape), located


def _locate(wanted: Wanted, tensor: SavedTensor, locator: Locator) -> Located:
    located = locator.find(wanted)
    if located is None:
        raise CheckpointCorruptError(
            f"{tensor.file}: tensor {wanted.key}: is in none of the files that should have it according to the "
            "manifest: use another copy of the checkpoint"
        )
    return located


def _opaque_write(key: ShardKey, tensor: SavedTensor, locator: Locator) -> _PlannedWrite:
    found = locator.opaque(key)
    assert found is not None, "`saved_tensors` found the tensor in this checkpoint"
    dtype, shape = torch_dtype(found.dtype), found.region.local_shape
    meta = torch.empty(shape, dtype=dtype, device="meta")
    located = Located((ReadRange.whole(found),), dtype, 0)
    return TensorWrite((tensor.name,), key, found.region, meta, shape), located


def _by_stage(saved: SavedLayout, tensors: Iterable[SavedTensor], target: Target) -> dict[int, list[SavedTensor]]:
    """Groups the tensors by the pipeline rank of the new layout that holds them."""
    stages = {(stage.pp, stage.vp): (stage.decoder, stage.mtp) for stage in saved.stages}
    as_saved = stages == {place: (stage.decoder, stage.mtp) for place, stage in target.stages.items()}
    placement = PipelineAssignment(target.stages)
    by_stage: dict[int, list[SavedTensor]] = defaultdict(list)
    for tensor in tensors:
        pp = tensor.pp if as_saved else placement.rank_of(tensor.name)
        if pp is None:
            raise CheckpointMismatchError(
                f"{tensor.file}: tensor {tensor.name}: the tensor's name does not show which of {target.topology.pp} "
                f"pipeline ranks holds the tensor: keep pp = {saved.topology.pp}, or load the checkpoint directly "
                "under the new layout"
            )
        by_stage[pp].append(tensor)
    return by_stage
