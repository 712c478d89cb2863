"""What travels between planning and I/O, so that each can be tested alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mcore_ckpt.checkpoint.index import Alias
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region


@dataclass(frozen=True, eq=False)
class TensorWrite:
    """One tensor of a file: where it stands in the pickled tree, and what it is.

    Attributes:
        is_buffer: neither parameter nor optimizer state: it may change at any point of a training step.
        refresh: makes the tensor anew, where the live one is another (`_extra_state`); None if there is none any more.
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
    """One indexed `.pt` file: `path` below the role's folder, its tensors, and the aliases its index names.

    Attributes:
        tree: dicts that are there even if empty.
        writers: world ranks that hold all of its tensors and may write a part of it each; the first owns the file.
            Empty: this rank alone.
    """

    path: str
    kind: str
    tensors: tuple[TensorWrite, ...]
    aliases: tuple[Alias, ...] = ()
    tree: tuple[str, ...] = ()
    writers: tuple[int, ...] = ()
