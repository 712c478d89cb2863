"""The requests that planning hands to the writer, so that each can be tested alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mcore_ckpt.checkpoint.index import Alias
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region


@dataclass(frozen=True, eq=False)
class TensorWrite:
    """One tensor to write, and its place in the file's pickled tree.

    Attributes:
        path: the keys from the root of the tree to the tensor.
        key: the global name and the kind.
        region: the tensor's region of the global tensor.
        tensor: the live tensor.
        shape: the shape that the file stores.
        is_buffer: True for tensors that are neither parameters nor optimizer state, and that may change at any point
            of a training step.
        refresh: makes the tensor anew at each save, for state that is not a live tensor (`_extra_state`). It returns
            None if the module has no such state any more.
    """

    path: tuple[str, ...]
    key: ShardKey
    region: Region
    tensor: torch.Tensor
    shape: tuple[int, ...]
    is_buffer: bool = False
    refresh: Callable[[], torch.Tensor | None] | None = None


@dataclass(frozen=True, eq=False)
class WriteRequest:
    """One indexed `.pt` file to write.

    Attributes:
        path: the file's path below the role's folder.
        kind: the kind of file in the manifest.
        tensors: the tensors, in the order of the tree.
        aliases: the keys whose bytes are those of another key.
        tree: the names of dicts at the root that are written even if they are empty.
        writers: the world ranks that hold all of the tensors and may each write a part; the first owns the file. Empty
            if this rank alone writes the file.
    """

    path: str
    kind: str
    tensors: tuple[TensorWrite, ...]
    aliases: tuple[Alias, ...] = ()
    tree: tuple[str, ...] = ()
    writers: tuple[int, ...] = ()
