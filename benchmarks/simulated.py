"""Writes the manifest and indexes of a checkpoint of very many ranks, in sparse files without tensor bytes."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.index import FileIndex, block_count, encode_index
from mcore_ckpt.checkpoint.manifest import FileRecord, IndexPlace, Manifest, encode_manifest
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.sharding.plan import MODEL, PARAM, ShardKey, StoredShard, runs
from mcore_ckpt.sharding.regions import Piece, Region, Shape

KINDS = (PARAM, "exp_avg", "exp_avg_sq")
ROW = 0
COLUMN = 1

# Megatron's bucket size for few data-parallel ranks. Each bucket is cut over all of them.
BUCKET_ELEMENTS = 40_000_000


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
    """The sizes of a GPT with GQA and a gated MLP, in bfloat16 with Adam's state in float32."""

    layers: int
    hidden: int
    vocabulary: int

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
        yield Parameter(f"{name}.mlp.linear_fc1.weight", (6 * hidden, hidden), ROW, fused=True)
        yield Parameter(f"{name}.mlp.linear_fc2.weight", (hidden, 3 * hidden), COLUMN)


@dataclass(frozen=True)
class Layout:
    """A parallel layout without expert and context parallelism."""

    tp: int
    pp: int
    dp: int

    @property
    def topology(self) -> Topology:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "etp": self.tp, "edp": self.dp}
        return Topology(world_size=self.tp * self.pp * self.dp, **sizes)

    def ranks(self) -> list[RankCoordinates]:
        """Returns all ranks in megatron's order: tp changes fastest, then dp, then pp."""
        return [
            RankCoordinates(tp=tp, pp=pp, dp=dp, etp=tp, edp=dp)
            for pp in range(self.pp)
            for dp in range(self.dp)
            for tp in range(self.tp)
        ]

    def model_parts(self, model: Model, at: RankCoordinates) -> list[Part]:
        stage = model.stage(at.pp, self.pp)
        return [Part(parameter.name, _region(parameter, self.tp, at.tp)) for parameter in stage]

    def optimizer_parts(self, parts: Sequence[Part], dp: int) -> list[Part]:
        """Returns the flat ranges of one data-parallel rank: the same share of every bucket."""
        found = []
        for bucket in _buckets(parts):
            ends = [0]
            for part in bucket:
                ends.append(ends[-1] + part.region.numel)
            share = -(-ends[-1] // self.dp)
            for part, (start, stop) in zip(bucket, pairwise(ends), strict=True):
                low, high = max(dp * share, start), min((dp + 1) * share, stop)
                if low < high:
                    found.append(Part(part.name, part.region.with_flat(low - start, high - start)))
        return found


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


def _buckets(parts: Sequence[Part]) -> Iterator[list[Part]]:
    bucket: list[Part] = []
    numel = 0
    for part in parts:
        bucket.append(part)
        numel += part.region.numel
        if numel >= BUCKET_ELEMENTS:
            yield bucket
            bucket, numel = [], 0
    if bucket:
        yield bucket


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
    ranks = saved.ranks()
    names = [parameter.name for pp in range(saved.pp) for parameter in model.stage(pp, saved.pp)]
    positions = {name: number for number, name in enumerate(names)}
    parts = {(at.pp, at.tp): saved.model_parts(model, at) for at in ranks if at.dp == 0}
    files = []
    for rank, at in enumerate(ranks):
        local = parts[at.pp, at.tp]
        mine = [(file_names.optimizer_file(*at.place), "optimizer", saved.optimizer_parts(local, at.dp))]
        if at.dp == 0:
            mine.append((file_names.model_file(at.tp, at.pp), "model", local))
        for path, kind, held in mine:
            holds = tuple(runs(positions[part.name] for part in held))
            record = FileRecord(path, kind, rank, 1, 0, IndexPlace(0, 1, 0), holds)
            if indexed(at):
                record = _write_file(role_dir, record, _shards(held, kind, path))
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
        ranks=tuple(ranks),
        stages=(),
        tensors=tuple(names),
        files=tuple(files),
    )
    (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return manifest


def _shards(parts: Sequence[Part], file_kind: str, path: str) -> list[StoredShard]:
    kinds, dtype, item = ((MODEL,), "bfloat16", 2) if file_kind == "model" else (KINDS, "float32", 4)
    shards, offset = [], 0
    for part in parts:
        for kind in kinds:
            nbytes = part.region.numel * item
            # As many checksums as a real save has.
            crcs = (0xDEADBEEF,) * block_count(nbytes)
            shards.append(StoredShard(ShardKey(part.name, kind), part.region, dtype, path, offset, nbytes, crcs))
            offset += nbytes
    return shards


def _write_file(role_dir: Path, record: FileRecord, shards: Sequence[StoredShard]) -> FileRecord:
    data = encode_index(FileIndex(tuple(shards), ()))
    offset = sum(shard.nbytes for shard in shards)
    path = role_dir / record.path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        os.truncate(file.fileno(), offset)
        file.seek(offset)
        file.write(data)
    place = IndexPlace(offset, len(data), zlib.crc32(data))
    return replace(record, size=offset + len(data), index=place)
