"""A checkpoint of this package as a source of global tensors, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import torch

from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.errors import CheckpointCorruptError, UnsupportedError
from mcore_ckpt.formats.contract import PartRead, TensorInfo
from mcore_ckpt.formats.locate import Sources, Wanted
from mcore_ckpt.formats.native.catalog import Catalog
from mcore_ckpt.formats.native.ranges import read_ranges
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.sharding.names import is_expert
from mcore_ckpt.sharding.plan import MODEL, PARAM, ReadRange, ShardKey, StoredShard
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows


class CheckpointSource:
    """The model of one role: its own tensors or, if they were not saved, the optimizer's main parameters.

    Args:
        role_dir: the folder that the files' paths are below; that of a save under way, too.
        manifest: what the folder holds; it need not be written yet.

    Example:
        >>> source = CheckpointSource(role_dir, read_manifest(role_dir))  # doctest: +SKIP
        >>> source.tensors()["decoder.final_layernorm.weight"].shape  # doctest: +SKIP
        (4096,)
    """

    def __init__(self, role_dir: Path, manifest: Manifest) -> None:
        self._role_dir = role_dir
        self._catalog = Catalog(role_dir, manifest)
        self._kind = MODEL if "model" in manifest.contents else PARAM

    @property
    def has_model(self) -> bool:
        """Whether the tensors are the model's own, in its dtype; else they are main parameters."""
        return self._kind == MODEL

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by global name.

        Raises:
            CheckpointCorruptError: an index is missing, cut or damaged.
            UnsupportedError: main parameters that mean nothing without the model's own.
        """
        return self._tensors

    @cached_property
    def _tensors(self) -> dict[str, TensorInfo]:
        found = {}
        for name in self._catalog.manifest.tensors:
            shard = self._first_shard(name)
            if shard is not None:
                found[name] = TensorInfo(self._dtype(shard), shard.region.global_shape)
        return found

    def _first_shard(self, name: str) -> StoredShard | None:
        key = ShardKey(name, self._kind)
        files = self._catalog.files(key)
        # One after the other: each that is asked has its index read.
        return next((shard for file in files for shard in self._catalog.shards(key, [file])), None)

    def _dtype(self, shard: StoredShard) -> torch.dtype:
        dtype = torch_dtype(shard.dtype)
        if self._kind == PARAM and not dtype.is_floating_point:
            raise UnsupportedError(
                f"{self._role_dir / shard.file}: tensor {shard.key} is {shard.dtype}: remainders of weights that were "
                'not saved: save with "model" in save_contents'
            )
        return dtype

    def read(self, parts: Iterable[PartRead]) -> int:
        """Fills all memories; how many bytes were read.

        Raises:
            CheckpointCorruptError: a block is damaged, a file is missing or cut, or elements are in none of the files.
            KeyError: there is no tensor of that name.
        """
        reads: list[tuple[ReadRange, torch.Tensor]] = []
        for part in parts:
            reads += [(read, part.memory) for read in self._ranges(part)]
        return read_ranges(self._role_dir, self._catalog.by_path, reads)

    def _ranges(self, part: PartRead) -> tuple[ReadRange, ...]:
        # Whoever wants a part has compared shapes: fewer rows of a vocabulary than are stored are all that is no
        # padding.
        rows = part.region.global_shape[0] if has_vocabulary_rows(part.name) else None
        sources = Sources(self._catalog, Topology(), RankCoordinates(), rows)
        file = f"a HuggingFace model made of {self._role_dir}"
        source = sources.find(Wanted(ShardKey(part.name, self._kind), part.region, is_expert(part.name), file))
        if source is None:
            raise KeyError(part.name)
        if source.outside or torch_dtype(source.dtype) != part.memory.dtype:
            raise CheckpointCorruptError(
                f"{self._role_dir}: tensor {part.name}: its files differ in what dtype or shape it has"
            )
        return source.reads
