"""Lists the tensors that a checkpoint of this package holds, without reading their bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, PARAM, ShardKey


@dataclass(frozen=True)
class TensorSummary:
    """One tensor of a checkpoint.

    Attributes:
        name: its global name.
        dtype: its dtype without "torch."; None if no file holds a part of it.
        shape: its global shape; None in the same case.
        optimizer: the kinds of optimizer state that are stored for it, such as "exp_avg".
    """

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    optimizer: tuple[str, ...]


def list_tensors(role_dir: Path, pattern: str = "") -> Iterator[TensorSummary]:
    """Yields the tensors whose name matches, in natural order: layer 2 before layer 10.

    Args:
        role_dir: the folder of a committed role.
        pattern: a regular expression that must match somewhere in the name.

    Raises:
        CheckpointNotFoundError: the folder has no manifest.
        CheckpointCorruptError: the manifest or an index is damaged.

    Example:
        >>> [tensor.name for tensor in list_tensors(role_dir, "embedding")]  # doctest: +SKIP
        ['embedding.word_embeddings.weight']
    """
    reader = NativeReader.open(role_dir)
    for name in sorted((name for name in reader.manifest.tensors if re.search(pattern, name)), key=natural_order):
        optimizer = reader.files(ShardKey(name, "optimizer"))
        kinds = [kind for kind in reader.kinds_in(name, optimizer) if kind not in (MODEL, OPAQUE)]
        bound = reader.bound_kinds(ShardKey(name, PARAM))
        keys = [ShardKey(name, kind) for kind in (MODEL, OPAQUE, *kinds)]
        shard = next((shard for key in keys for shard in reader.shards(key, reader.files(key)[:1])), None)
        if shard is None:
            yield TensorSummary(name, None, None, (*kinds, *bound))
        else:
            yield TensorSummary(name, shard.dtype, shard.region.global_shape, (*kinds, *bound))
