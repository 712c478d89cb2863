"""Compares written tensors bit for bit with the tensors of the reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.contract import CheckpointReader
from mcore_ckpt.sharding.plan import MODEL, ReadRange, ShardKey
from mcore_ckpt.sharding.regions import Region


def check_written(reader: CheckpointReader, names: Iterable[str], read: Callable[[str, Region], torch.Tensor]) -> None:
    """Compares tensors of the model, one stored shard at a time.

    `read` returns a region of a written tensor, flattened.

    Raises CheckpointMismatchError: the bits differ from the bits that `reader` reads.
    """
    for name in names:
        key = ShardKey(name, MODEL)
        for shard in (shard for shards in list(reader.parts(key))[-1:] for shard in shards):
            wanted = torch.empty(shard.region.numel, dtype=torch_dtype(shard.dtype))
            reader.read([(ReadRange.whole(shard), wanted)])
            found = read(name, shard.region)
            if found.dtype != wanted.dtype or not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
                raise CheckpointMismatchError(
                    f"{reader.place}/{shard.file}: tensor {name} ({MODEL}), {shard.region.describe()}: the written "
                    "bits differ from those in this file: check the disks and convert again"
                )
