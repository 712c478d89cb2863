"""Finds the stored ranges that make up a wanted region, under whichever layout the checkpoint was saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.formats.contract import CheckpointReader, RankPosition, ReadTarget, RegionRead
from mcore_ckpt.io.tuning import CONVERT_BYTES
from mcore_ckpt.sharding.counterparts import Counterparts, Layers, find_counterparts, layers_of
from mcore_ckpt.sharding.names import is_expert
from mcore_ckpt.sharding.plan import OPAQUE, PARAM, ReadRange, ShardKey, StoredShard, plan_reads
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, may_be_same_vocabulary


@dataclass(frozen=True)
class Wanted:
    """A region of the training state to read.

    Attributes:
        key: the kind, and the tensor's global name. The checkpoint may store the tensor under a synonym of this name.
        file: a file or folder to name in messages, usually the file that this rank would save the region to.
    """

    key: ShardKey
    region: Region
    file: str


@dataclass(frozen=True)
class Located:
    """The stored ranges that fill a wanted region.

    Attributes:
        reads: the ranges. Each wanted element is in exactly one of them, except the elements that `outside` counts.
        outside: the number of wanted elements that are not stored because they are padding of the vocabulary.
    """

    reads: tuple[ReadRange, ...]
    dtype: torch.dtype
    outside: int


class Locator:
    """Finds the stored ranges of the regions that one rank reads.

    Args:
        position: the position of the reading rank. If it is None, the locator looks into the files of all ranks, and
            accepts any number of vocabulary rows. In this case the caller must have compared the vocabulary sizes.
        vocab_size: the number of tokens without padding; None if it is unknown.
        layers: all layers of the model to load. The checkpoint may have the same parts in other layers, if one of the
            two models is a GPTModel and the other a HybridModel. None if the checkpoint's layers have the same numbers
            as the model's.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        position: RankPosition | None,
        vocab_size: int | None = None,
        layers: Layers | None = None,
    ) -> None:
        self.reader = reader
        self._position = position
        self._vocab_size = vocab_size
        self._counterparts = Counterparts({}) if layers is None else find_counterparts(layers, layers_of(reader.names))

    @property
    def layer_mismatch(self) -> str | None:
        """Says why the checkpoint's layers do not match the model's, for messages about missing tensors.

        None if the layers match.
        """
        return self._counterparts.layer_mismatch

    def stored_key(self, key: ShardKey) -> ShardKey | None:
        """Returns the key under which the checkpoint stores the tensor, or None if the checkpoint lacks the tensor."""
        name = found_as(self._counterparts.stored_name(key.name), self.reader.names)
        return None if name is None else ShardKey(name, key.kind)

    def find(self, wanted: Wanted) -> Located | None:
        """Finds the ranges of a wanted region. Returns None if the checkpoint does not have the tensor.

        Raises:
            CheckpointMismatchError: the stored tensor has another shape.
            CheckpointCorruptError: some of the wanted elements are in no file, or the stored shards differ in dtype.
        """
        key = self.stored_key(wanted.key)
        if key is None:
            return None
        stored: Sequence[StoredShard] = ()
        missing = 0
        for stored in self.reader.parts(key, self._position):
            for shard in stored:
                self._check_shape(wanted, shard)
            plan = plan_reads(wanted.region, stored)
            missing = plan.missing
            if stored and not missing:
                return Located(plan.reads, _dtype(wanted, stored), plan.outside)
        if not stored:
            return None
        raise CheckpointCorruptError(
            f"{', '.join(sorted({shard.file for shard in stored}))}: tensor {wanted.key}: {missing} elements of "
            f"{wanted.region.describe()} are in none of these files"
        )

    def coded(self, wanted: Wanted) -> StoredShard | None:
        """Returns the coded shard that has exactly the wanted region, or None if there is no such shard."""
        key = self.stored_key(wanted.key)
        parts = () if key is None else self.reader.parts(key, self._position)
        # If this rank saved a shard of exactly this region, the shard is in the files of the nearest ranks (the first
        # set). So the later sets are not searched.
        near: Sequence[StoredShard] = next((shards for shards in parts if shards), ())
        return next((shard for shard in near if shard.coding is not None and shard.region == wanted.region), None)

    def opaque(self, key: ShardKey) -> StoredShard | None:
        """Finds the bytes of a module's `_extra_state`.

        Each tensor-parallel and expert-parallel rank stores its own `_extra_state`, all under the same name. If
        possible, the result comes from the saving rank that is nearest to the reading rank.
        """
        assert key.kind == OPAQUE
        stored = self.stored_key(key)
        parts = () if stored is None else self.reader.parts(stored, self._position)
        return next((shards[0] for shards in parts if shards), None)

    def moments(self, name: str) -> tuple[str, ...]:
        """Returns the stored kinds of a tensor's optimizer state, except the main parameter."""
        key = self.stored_key(ShardKey(name, PARAM))
        kinds = () if key is None else self.reader.kinds(key.name, self._position)
        return tuple(kind for kind in kinds if kind != PARAM)

    def _check_shape(self, wanted: Wanted, shard: StoredShard) -> None:
        mine, theirs = wanted.region.global_shape, shard.region.global_shape
        if mine == theirs:
            return
        described = f"wanted {wanted.region.describe()}, found {shard.region.describe()}"
        only_rows = len(mine) == len(theirs) > 0 and mine[1:] == theirs[1:]
        if not (only_rows and has_vocabulary_rows(wanted.key.name)):
            raise CheckpointMismatchError(
                f"{shard.file}: tensor {wanted.key}: {described}: build the model that was saved, with the same sizes"
            )
        if not self._may_be_same_vocabulary(wanted, theirs[0]):
            known = "" if self._vocab_size is None else f" (vocab_size is {self._vocab_size})"
            raise CheckpointMismatchError(
                f"{shard.file}: tensor {wanted.key}: {described}: the vocabularies seem to differ by more than padding"
                f"{known}. If only their padding differs, set CheckpointConfig.vocab_size to the number of tokens"
            )

    def _may_be_same_vocabulary(self, wanted: Wanted, rows: int) -> bool:
        if self._position is None:
            return True
        expert = is_expert(wanted.key.name)
        sizes = (self.reader.tp_size(expert), self._position.topology.tp)
        return may_be_same_vocabulary((rows, wanted.region.global_shape[0]), sizes, self._vocab_size)


def read_regions(reader: CheckpointReader, regions: Iterable[RegionRead]) -> int:
    """Reads regions of a model's tensors into memory and returns the number of bytes read.

    Raises:
        CheckpointMismatchError: a tensor is missing, or has another shape than its region or another dtype than its
            memory.
        CheckpointCorruptError: a file is missing or damaged, or some of the elements are in no file.
    """
    locator = Locator(reader, None)
    ranges: list[ReadTarget] = []
    for part in regions:
        wanted = Wanted(ShardKey(part.name, reader.weight_kind), part.region, str(reader.place))
        wants = f"{wanted.file}: tensor {wanted.key}: wanted {wanted.region.describe()} of {part.memory.dtype}"
        found = locator.find(wanted)
        if found is None:
            raise CheckpointMismatchError(f"{wants}, found no such tensor")
        if found.dtype != part.memory.dtype or found.outside:
            missing = f", but {found.outside} of the elements are missing" if found.outside else ""
            raise CheckpointMismatchError(f"{wants}, found {found.dtype}{missing}")
        ranges += ((read, part.memory) for read in found.reads)
    return reader.read(ranges) if ranges else 0


def same_bytes(reader: CheckpointReader, first: str, second: str) -> bool:
    """Returns True if two tensors of a checkpoint are equal bit for bit.

    The comparison uses at most CONVERT_BYTES of memory, even for larger tensors.
    """
    infos = [reader.info(ShardKey(name, reader.weight_kind)) for name in (first, second)]
    info = infos[0]
    if info is None or info != infos[1]:
        return False
    region = Region.whole(info.shape)
    step = CONVERT_BYTES // 2 // info.dtype.itemsize
    memory = torch.empty(2, min(step, region.numel), dtype=info.dtype)
    for start in range(0, region.numel, step):
        part = region.with_flat(start, min(start + step, region.numel))
        left, right = memory[:, : part.numel]
        read_regions(reader, [RegionRead(first, part, left), RegionRead(second, part, right)])
        if not torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
            return False
    return True


def _dtype(wanted: Wanted, stored: Sequence[StoredShard]) -> torch.dtype:
    dtypes = {shard.dtype for shard in stored}
    if len(dtypes) > 1:
        raise CheckpointCorruptError(f"tensor {wanted.key} is stored with several dtypes: {', '.join(sorted(dtypes))}")
    return torch_dtype(dtypes.pop())
