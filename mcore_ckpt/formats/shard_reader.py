"""Reads shards from files without CRCs. The readers of all kinds except native build on this module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from mcore_ckpt.checkpoint.dtypes import dtype_name
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.contract import RankPosition, ReadTargets, TensorInfo
from mcore_ckpt.formats.native.ranges import read_stored
from mcore_ckpt.formats.torch_save_files import PtTensor
from mcore_ckpt.sharding.plan import MODEL, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region


class ShardReader:
    """Reads shards of model tensors; implements `formats.contract.CheckpointReader`.

    A `ShardReader` reads only the wanted bytes, on several threads, directly into the target memory.

    Args:
        tensors: the dtype and the global shape of each tensor.
        shards: a function that returns the shards of a tensor. If shards overlap, an element is read from the first
            shard that has it.

    Attributes:
        copies: the names of the tensors that the reader leaves out because they are equal to other tensors.
    """

    weight_kind = MODEL

    def __init__(
        self, place: Path, tensors: Mapping[str, TensorInfo], shards: Callable[[str], Sequence[StoredShard]]
    ) -> None:
        self.place = place
        self._tensors = dict(tensors)
        self._shards = shards
        self.copies: tuple[str, ...] = ()

    @cached_property
    def names(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self._tensors)}

    def info(self, key: ShardKey) -> TensorInfo | None:
        return self._tensors.get(key.name) if key.kind == MODEL else None

    def kinds(self, name: str, position: RankPosition | None = None) -> tuple[str, ...]:
        return ()

    def parts(self, key: ShardKey, position: RankPosition | None = None) -> Iterator[Sequence[StoredShard]]:
        if key.kind == MODEL and key.name in self._tensors:
            yield self._shards(key.name)

    def tp_size(self, expert: bool) -> int:
        return 1

    def read(self, ranges: ReadTargets, check: bool = True) -> int:
        """Does the same as `CheckpointReader.read`, but ignores `check`, because the files have no CRCs."""
        wanted = list(ranges)
        # The folder is the root "/", because shards name their files by absolute paths: one checkpoint can have several
        # folders.
        return read_stored(Path("/"), wanted) if wanted else 0

    def without(self, names: Sequence[str]) -> ShardReader:
        """Returns a reader of the checkpoint that leaves out the tensors `names`, which are equal to other tensors."""
        kept = {name: info for name, info in self._tensors.items() if name not in names}
        other = ShardReader(self.place, kept, self._shards)
        other.copies = (*self.copies, *names)
        return other


def stored_shard(name: str, tensor: PtTensor, region: Region, number: int = 0, key: str = "") -> StoredShard:
    """Describes a tensor of a `.pt` file as the shard that holds `region` of the global tensor `name`.

    The file may hold several shards of this tensor, all under one `key`. `number` is the shard's position among them.

    Raises UnsupportedError: the tensor is not stored row by row.
    """
    if not tensor.is_dense:
        raise UnsupportedError(
            f"{tensor.path}: tensor {key or name}: is stored with strides {tensor.stride}, not row by row: make it "
            "contiguous and save it again"
        )
    nbytes = region.numel * tensor.dtype.itemsize
    place = str(tensor.path.absolute()), tensor.offset + number * nbytes, nbytes
    return StoredShard(ShardKey(name, MODEL), region, dtype_name(tensor.dtype), *place, None)
