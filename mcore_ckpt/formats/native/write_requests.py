"""Defines the requests that planning hands to writing, so that planning and writing can be tested separately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mcore_ckpt.checkpoint.index import Alias
from mcore_ckpt.sharding.plan import Coding, ShardKey
from mcore_ckpt.sharding.regions import Region


@dataclass(frozen=True, eq=False)
class TensorWrite:
    """One tensor to write, and its place in the file's pickled tree.

    Attributes:
        path: the keys that lead from the root of the tree to the tensor.
        key: the global name and the kind.
        region: the region of the global tensor that this tensor holds.
        shape: the tensor's shape in the file.
        is_buffer: True for a tensor that is neither a parameter nor optimizer state. Such a tensor can change at any
            point of a training step.
        refresh: a function that makes the tensor again at each save, if no live tensor holds the state
            (`_extra_state`). It returns None if the module no longer has this state.
        coding: how the values follow from the tensor's elements. None if the elements are the values.
        beside: for bound state, the kind of the shard that this tensor belongs to; see StoredShard. That shard is in
            the same file.
    """

    path: tuple[str, ...]
    key: ShardKey
    region: Region
    tensor: torch.Tensor
    shape: tuple[int, ...]
    is_buffer: bool = False
    refresh: Callable[[], torch.Tensor | None] | None = None
    coding: Coding | None = None
    beside: str | None = None


@dataclass(frozen=True, eq=False)
class WriteRequest:
    """One indexed `.pt` file to write.

    Attributes:
        path: the file's path below the role's folder.
        tensors: the tensors, in the order of the tree.
        aliases: the keys that share the bytes of another key.
        tree: keys at the root of the tree whose dicts are written even if the dicts are empty.
        writers: the world ranks that hold all of the tensors, so that each can write a part of the file. The first of
            these ranks owns the file. Empty if only this rank writes the file.
    """

    path: str
    kind: str
    tensors: tuple[TensorWrite, ...]
    aliases: tuple[Alias, ...] = ()
    tree: tuple[str, ...] = ()
    writers: tuple[int, ...] = ()
