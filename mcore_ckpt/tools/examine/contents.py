"""Lists the tensors of a checkpoint of this package without reading the tensors' bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.native.stored_tensors import StoredTensors
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, PARAM, ReadRange, ShardKey, StoredShard, plan_reads
from mcore_ckpt.sharding.regions import Region


@dataclass(frozen=True)
class TensorSummary:
    """One tensor of a checkpoint.

    Attributes:
        dtype, shape: the tensor's dtype without "torch.", and its global shape; None if no file has a part of the
            tensor.
        optimizer: the kinds of the tensor's stored optimizer state, such as "exp_avg".
    """

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    optimizer: tuple[str, ...]


def list_tensors(role_dir: Path, pattern: str = "") -> Iterator[TensorSummary]:
    """Yields the tensors whose names match, in natural order: layer 2 before layer 10.

    A name matches if it contains a match of the regular expression `pattern`.

    Raises:
        CheckpointNotFoundError: the folder has no manifest.
        CheckpointCorruptError: the manifest or an index is damaged.

    Example:
        >>> [tensor.name for tensor in list_tensors(role_dir, "embedding")]  # doctest: +SKIP
        ['embedding.word_embeddings.weight']
    """
    stored = StoredTensors.in_folder(role_dir)
    for name in sorted((name for name in stored.manifest.tensors if re.search(pattern, name)), key=natural_order):
        optimizer = stored.files(ShardKey(name, "optimizer"))
        kinds = [kind for kind in stored.kinds_in(name, optimizer) if kind not in (MODEL, OPAQUE)]
        bound = stored.bound_kinds(ShardKey(name, PARAM))
        keys = [ShardKey(name, kind) for kind in (MODEL, OPAQUE, *kinds)]
        shard = next((shard for key in keys for shard in stored.shards(key, stored.files(key)[:1])), None)
        if shard is None:
            yield TensorSummary(name, None, None, (*kinds, *bound))
        else:
            yield TensorSummary(name, shard.dtype, shard.region.global_shape, (*kinds, *bound))


def keys_of(stored: StoredTensors, name: str) -> list[ShardKey]:
    """Returns the keys under which a tensor is stored: the model's key, then the keys of the optimizer's state.

    The keys include a main parameter whose bytes are stored only as bytes of the model (`StoredTensors.is_alias`).
    """
    param = ShardKey(name, PARAM)
    moments = stored.kinds_in(name, stored.files(param))
    kinds = dict.fromkeys((MODEL, OPAQUE, PARAM, *moments, *stored.bound_kinds(param)))
    return [key for kind in kinds if shards_of(stored, key := ShardKey(name, kind))]


def shards_of(stored: StoredTensors, key: ShardKey) -> Sequence[StoredShard]:
    """Returns all stored shards of a key; for a main parameter that is an alias, the model's shards."""
    *_, found = [(), *stored.parts(key)]
    return found


def reads_of(
    stored: StoredTensors, key: ShardKey, region: Region, shards: Sequence[StoredShard]
) -> tuple[ReadRange, ...]:
    """Returns ranges of the shards that together contain each element of a region exactly once.

    Raises CheckpointCorruptError if an element is in no shard.
    """
    plan = plan_reads(region, shards)
    if plan.missing:
        raise CheckpointCorruptError(
            f"{stored.place}: tensor {key}: {plan.missing} elements are in none of the tensor's files"
        )
    return plan.reads
