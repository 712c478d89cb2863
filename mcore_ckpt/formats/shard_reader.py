"""Tensors that lie in files as shards, read where they are wanted: what sources of foreign checkpoints share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from mcore_ckpt.checkpoint.dtypes import dtype_name
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.contract import PartRead, TensorInfo, TensorSource
from mcore_ckpt.formats.huggingface.safetensors_files import HfStored
from mcore_ckpt.formats.native.ranges import read_stored
from mcore_ckpt.formats.pt_files import PtTensor
from mcore_ckpt.io.tuning import CONVERT_BYTES
from mcore_ckpt.sharding.plan import MODEL, ReadRange, ShardKey, StoredShard, plan_reads
from mcore_ckpt.sharding.regions import Region


class ShardSource:
    """A `TensorSource` over shards in files without CRCs.

    Reads only the bytes that are wanted, on several threads, straight to where they are wanted.

    Args:
        where: the checkpoint, for messages.
        tensors: what there is.
        shards: those of a tensor, of which each element is taken from the first that has it.
    """

    def __init__(
        self, where: Path, tensors: Mapping[str, TensorInfo], shards: Callable[[str], Sequence[StoredShard]]
    ) -> None:
        self.where = where
        self._tensors = dict(tensors)
        self._shards = shards

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, parts: Iterable[PartRead]) -> int:
        """Fills all memories; how many bytes were read.

        Raises:
            CheckpointMismatchError: there is no such tensor, or it has fewer elements or another dtype than the memory.
            CheckpointCorruptError: a file cannot be read, or a part of the tensor is in none of them.
        """
        reads: list[tuple[ReadRange, torch.Tensor]] = []
        for part in parts:
            reads += ((read, part.memory) for read in self._plan(part))
        # Files are named by whole paths: those of one checkpoint may be in several folders.
        return read_stored(Path("/"), reads) if reads else 0

    def _plan(self, part: PartRead) -> Sequence[ReadRange]:
        info = self._tensors.get(part.name)
        wanted = f"{self.where}: tensor {part.name}: wanted {part.region.describe()} of {part.memory.dtype}"
        if info is None:
            raise CheckpointMismatchError(f"{wanted}, found no such tensor")
        plan = None
        if info.dtype == part.memory.dtype and len(info.shape) == len(part.region.global_shape):
            plan = plan_reads(part.region, self._shards(part.name))
        if plan is None or plan.outside:
            raise CheckpointMismatchError(f"{wanted}, found {list(info.shape)} of {info.dtype}")
        if plan.missing:
            raise CheckpointCorruptError(f"{wanted}, but {plan.missing} elements of it are in no file")
        return plan.reads


def source_of_folder(folder: Path, tensors: Mapping[str, HfStored]) -> ShardSource:
    """The tensors of safetensors files, under their own names."""
    infos = {name: TensorInfo(stored.dtype, stored.shape) for name, stored in tensors.items()}
    return ShardSource(folder, infos, lambda name: (_whole_shard(tensors[name]),))


def _whole_shard(stored: HfStored) -> StoredShard:
    return StoredShard(
        ShardKey(stored.name, MODEL),
        Region.whole(stored.shape),
        dtype_name(stored.dtype),
        str(stored.path.absolute()),
        stored.offset,
        stored.nbytes,
        None,
    )


def stored_shard(name: str, tensor: PtTensor, region: Region) -> StoredShard:
    """A tensor of a `.pt` file as a shard: `region` says what it is of the whole. Raises UnsupportedError."""
    if not tensor.is_dense:
        raise UnsupportedError(
            f"{tensor.path}: tensor {name}: is stored with strides {tensor.stride}, not row by row: save it again, "
            "made contiguous"
        )
    path = str(tensor.path.absolute())
    return StoredShard(
        ShardKey(name, MODEL), region, dtype_name(tensor.dtype), path, tensor.offset, tensor.nbytes, None
    )


def same_bytes(source: TensorSource, first: str, second: str) -> bool:
    """Whether two tensors of a source are the same, bit for bit. Takes CONVERT_BYTES, whatever their sizes."""
    infos = source.tensors()
    info = infos[first]
    if info != infos[second]:
        return False
    region = Region.whole(info.shape)
    step = CONVERT_BYTES // 2 // info.dtype.itemsize
    memory = torch.empty(2, min(step, region.numel), dtype=info.dtype)
    for start in range(0, region.numel, step):
        part = region.with_flat(start, min(start + step, region.numel))
        left, right = memory[:, : part.numel]
        source.read([PartRead(first, part, left), PartRead(second, part, right)])
        if not torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
            return False
    return True
