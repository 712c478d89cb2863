"""Writes the manifest and indexes of a checkpoint of very many ranks, in sparse files without tensor bytes."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.index import FileIndex, block_count, encode_index
from mcore_ckpt.checkpoint.manifest import FileRecord, IndexPlace, Manifest, encode_manifest
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.formats.native.replica_shares import share_out
from mcore_ckpt.io import tuning
from mcore_ckpt.ranks.topology import RankCoordinates, Topology, coordinates_of
from mcore_ckpt.sharding.names import is_expert
from mcore_ckpt.sharding.plan import MODEL, PARAM, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Piece, Region, Shape

KINDS = (PARAM, "exp_avg", "exp_avg_sq")
ROW = 0
COLUMN = 1

# The size of buckets in `DistributedDataParallel`: the first for few data-parallel ranks, the second for each of many.
# Each bucket is cut over all of them.
BUCKET_ELEMENTS = 40_000_000
BUCKET_ELEMENTS_PER_RANK = 1_000_000


class Parameter(NamedTuple):
    """A parameter. Tensor parallelism cuts `axis` (None: replicated); `fused` means that gate and up are one tensor."""

    name: str
    shape: Shape
    axis: int | None
    fused: bool = False


class Part(NamedTuple):
    """The region of a parameter that one rank has."""

    name: str
    region: Region


@dataclass(frozen=True)
class Model:
    """The sizes of a GPT with GQA and a gated MLP, in bfloat16 with Adam's state in float32.

    With `experts`, each layer has a router and as many grouped experts of a quarter of the MLP's size.
    """

    layers: int
    hidden: int
    vocabulary: int
    experts: int = 0

    @staticmethod
    def of_tensors(count: int, hidden: int, experts: int = 0) -> Model:
        """Returns a model that has at least `count` tensors, with a vocabulary of 131,072 tokens."""
        in_layer = 5 + 2 * experts if experts else 6
        return Model(-(-(count - 3) // in_layer), hidden, 131072, experts)

    @lru_cache(maxsize=64)  # noqa: B019 -- a benchmark has few models
    def stage(self, number: int, count: int) -> list[Parameter]:
        """Returns the parameters of one of `count` pipeline stages."""
        first, last = number * self.layers // count, (number + 1) * self.layers // count
        found = [parameter for layer in range(first, last) for parameter in self._layer(layer)]
        if number == 0:
            found.insert(0, Parameter("embedding.word_embeddings.weight", (self.vocabulary, self.hidden), ROW))
        if number == count - 1:
            found.append(Parameter("decoder.final_layernorm.weight", (self.hidden,), None))
            found.append(Parameter("output_layer.weight", (self.vocabulary, self.hidden), ROW))
        return found

    def _layer(self, number: int) -> Iterator[Parameter]:
        name, hidden = f"decoder.layers.{number}", self.hidden
        yield Parameter(f"{name}.input_layernorm.weight", (hidden,), None)
        yield Parameter(f"{name}.self_attention.linear_proj.weight", (hidden, hidden), COLUMN)
        yield Parameter(f"{name}.self_attention.linear_qkv.weight", (hidden + hidden // 2, hidden), ROW)
        yield Parameter(f"{name}.pre_mlp_layernorm.weight", (hidden,), None)
        if not self.experts:
            yield Parameter(f"{name}.mlp.linear_fc1.weight", (6 * hidden, hidden), ROW, fused=True)
            yield Parameter(f"{name}.mlp.linear_fc2.weight", (hidden, 3 * hidden), COLUMN)
            return
        yield Parameter(f"{name}.mlp.router.weight", (self.experts, hidden), None)
        inner = 3 * hidden // 4
        for expert in range(self.experts):
            yield Parameter(f"{name}.mlp.experts.linear_fc1.weight{expert}", (2 * inner, hidden), ROW, fused=True)
            yield Parameter(f"{name}.mlp.experts.linear_fc2.weight{expert}", (hidden, inner), COLUMN)


@dataclass(frozen=True)
class Layout:
    """A parallel layout without context parallelism. Without expert parallelism, experts are cut like other tensors."""

    tp: int
    pp: int
    dp: int
    ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def etp(self) -> int:
        """Tensor parallelism of the experts. With expert parallelism, each expert is whole, as large runs have it."""
        return self.tp if self.ep == 1 else 1

    @property
    def edp(self) -> int:
        return self.world // (self.pp * self.ep * self.etp)

    @property
    def topology(self) -> Topology:
        return Topology(self.world, self.tp, self.pp, dp=self.dp, ep=self.ep, etp=self.etp, edp=self.edp)

    def ranks(self) -> list[RankCoordinates]:
        """Returns all ranks in megatron's order: tp changes fastest, then dp, then pp."""
        topology = self.topology
        return [coordinates_of(rank, topology) for rank in range(self.world)]

    def dense_parts(self, model: Model, at: RankCoordinates) -> list[Part]:
        """Returns what a rank has of the tensors that are in its model file."""
        stage = model.stage(at.pp, self.pp)
        return [Part(p.name, _region(p, self.tp, at.tp)) for p in stage if self.ep == 1 or not is_expert(p.name)]

    def expert_parts(self, model: Model, at: RankCoordinates) -> list[Part]:
        """Returns what a rank has of the experts, if they have files of their own."""
        if self.ep == 1:
            return []
        each = model.experts // self.ep
        own = range(at.ep * each, (at.ep + 1) * each)
        stage = (p for p in model.stage(at.pp, self.pp) if is_expert(p.name))
        return [Part(p.name, Region.whole(p.shape)) for p in stage if int(p.name.rpartition("weight")[2]) in own]

    def model_parts(self, model: Model, at: RankCoordinates) -> list[Part]:
        return self.dense_parts(model, at) + self.expert_parts(model, at)

    def optimizer_parts(self, parts: Sequence[Part], at: RankCoordinates) -> list[Part]:
        """Returns the flat ranges of one data-parallel rank: the same share of every bucket."""
        apart = [part for part in parts if self.ep > 1 and is_expert(part.name)]
        dense = [part for part in parts if self.ep == 1 or not is_expert(part.name)]
        return [*_shares(dense, at.dp, self.dp), *_shares(apart, at.edp, self.edp)]


def _shares(parts: Sequence[Part], rank: int, ranks: int) -> Iterator[Part]:
    for bucket in _buckets(parts, max(BUCKET_ELEMENTS, ranks * BUCKET_ELEMENTS_PER_RANK)):
        ends = [0]
        for part in bucket:
            ends.append(ends[-1] + part.region.numel)
        share = -(-ends[-1] // ranks)
        for part, (start, stop) in zip(bucket, pairwise(ends), strict=True):
            low, high = max(rank * share, start), min((rank + 1) * share, stop)
            if low < high:
                yield Part(part.name, part.region.with_flat(low - start, high - start))


def _region(parameter: Parameter, tp: int, rank: int) -> Region:
    shape, axis = parameter.shape, parameter.axis
    if axis is None or tp == 1:
        return Region.whole(shape)
    count = 2 if parameter.fused else 1
    length = shape[axis] // count // tp
    part = _at(shape, axis, length)
    zero = (0,) * len(shape)
    pieces = tuple(
        Piece(_at(zero, axis, k * length), part, _at(zero, axis, k * (shape[axis] // count) + rank * length))
        for k in range(count)
    )
    local = _at(shape, axis, count * length)
    return Region(shape, local, pieces, (0, prod(local)))


def _at(shape: Shape, axis: int, value: int) -> Shape:
    return (*shape[:axis], value, *shape[axis + 1 :])


def _buckets(parts: Sequence[Part], size: int) -> Iterator[list[Part]]:
    bucket: list[Part] = []
    numel = 0
    for part in parts:
        bucket.append(part)
        numel += part.region.numel
        if numel >= size:
            yield bucket
            bucket, numel = [], 0
    if bucket:
        yield bucket


class SavedFile(NamedTuple):
    """One indexed file, and the parts in it.

    `writers` are all ranks that write a part of it, its owner last.
    """

    path: str
    kind: str
    parts: Sequence[Part]
    writers: tuple[int, ...]


class SavedFiles:
    """The indexed files that each rank of a layout writes for a model."""

    def __init__(self, model: Model, layout: Layout) -> None:
        self.ranks = layout.ranks()
        self._model, self._layout = model, layout
        self._dense: dict[tuple[int, int], list[Part]] = {}
        self._experts: dict[tuple[int, int, int], list[Part]] = {}
        self._replicas: dict[str, list[int]] = {}
        for rank, at in enumerate(self.ranks):
            for path in self._model_paths(at):
                self._replicas.setdefault(path, []).append(rank)

    def of(self, rank: int) -> list[SavedFile]:
        """Returns the files that a rank writes, or of which it writes a part together with its replicas."""
        at = self.ranks[rank]
        stored = (self._dense_of(at), self._experts_of(at))
        _, held = self.parts(rank)
        files = [SavedFile(file_names.optimizer_file(*at.place), "optimizer", held, (rank,))]
        for path, kind, parts in zip(self._model_paths(at), ("model", "experts"), stored, strict=False):
            *starts, nbytes = itertools.accumulate((2 * part.region.numel for part in parts), initial=0)
            writers = share_out(tuple(self._replicas[path]), nbytes, tuning.SHARE_BYTES, starts).writers
            if rank in writers:
                files.append(SavedFile(path, kind, parts, writers))
        return files

    def parts(self, rank: int) -> tuple[list[Part], list[Part]]:
        """Returns the parts of the model that a rank has, and those of the optimizer's state."""
        at = self.ranks[rank]
        model = self._dense_of(at) + self._experts_of(at)
        return model, self._layout.optimizer_parts(model, at)

    def _model_paths(self, at: RankCoordinates) -> list[str]:
        apart = [file_names.expert_file(at.etp, at.pp, at.ep)] if self._layout.ep > 1 else []
        return [file_names.model_file(at.tp, at.pp), *apart]

    def _dense_of(self, at: RankCoordinates) -> list[Part]:
        if (at.pp, at.tp) not in self._dense:
            self._dense[at.pp, at.tp] = self._layout.dense_parts(self._model, at)
        return self._dense[at.pp, at.tp]

    def _experts_of(self, at: RankCoordinates) -> list[Part]:
        if (at.pp, at.etp, at.ep) not in self._experts:
            self._experts[at.pp, at.etp, at.ep] = self._layout.expert_parts(self._model, at)
        return self._experts[at.pp, at.etp, at.ep]


def write_checkpoint(
    role_dir: Path, model: Model, saved: Layout, indexed: Callable[[RankCoordinates], bool] = lambda _: True
) -> Manifest:
    """Writes a checkpoint whose manifest, indexes and sizes are real, and returns the manifest.

    Args:
        role_dir: the folder of the checkpoint.
        model: the model that was saved.
        saved: the layout of the ranks that saved it.
        indexed: selects the ranks whose files are written. The manifest lists the files of all ranks.
    """
    saved_files = SavedFiles(model, saved)
    names = [parameter.name for pp in range(saved.pp) for parameter in model.stage(pp, saved.pp)]
    positions = {name: number for number, name in enumerate(names)}
    files = []
    for rank, at in enumerate(saved_files.ranks):
        for file in saved_files.of(rank):
            if file.writers[-1] != rank:
                continue
            holds = Holds.of(positions[part.name] for part in file.parts)
            record = FileRecord(file.path, file.kind, rank, 1, 0, IndexPlace(0, 1, 0), holds)
            if indexed(at):
                size, place = write_sparse(role_dir, file)
                record = structs.replace(record, size=size, index=place)
            files.append(record)
    manifest = Manifest(
        step=1,
        role=role_dir.name,
        roles=(role_dir.name,),
        attempt="a" * 32,
        created="2026-01-01T00:00:00+00:00",
        versions={},
        contents=("model", "optimizer"),
        topology=saved.topology,
        ranks=tuple(saved_files.ranks),
        stages=(),
        tensors=tuple(names),
        files=tuple(files),
    )
    (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return manifest


def _shards(parts: Sequence[Part], file_kind: str, path: str) -> list[StoredShard]:
    kinds, dtype, item = (KINDS, "float32", 4) if file_kind == "optimizer" else ((MODEL,), "bfloat16", 2)
    shards, offset = [], 0
    for part in parts:
        for kind in kinds:
            nbytes = part.region.numel * item
            # As many checksums as a real save has.
            crcs = (0xDEADBEEF,) * block_count(nbytes)
            shards.append(StoredShard(ShardKey(part.name, kind), part.region, dtype, path, offset, nbytes, crcs))
            offset += nbytes
    return shards


def write_sparse(role_dir: Path, file: SavedFile) -> tuple[int, IndexPlace]:
    """Writes a sparse file with a real index behind a hole, and returns its size and the place of the index."""
    shards = _shards(file.parts, file.kind, file.path)
    data = encode_index(FileIndex(tuple(shards), ()))
    offset = sum(shard.nbytes for shard in shards)
    path = role_dir / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        os.truncate(out.fileno(), offset)
        out.seek(offset)
        out.write(data)
    return offset + len(data), IndexPlace(offset, len(data), zlib.crc32(data))
