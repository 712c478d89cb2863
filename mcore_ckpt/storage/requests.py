"""What travels between planning and I/O, so that each can be tested alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.storage.index import Alias
from mcore_ckpt.storage.manifest import IndexPlace


@dataclass(frozen=True, eq=False)
class TensorWrite:
    """One tensor of a file: where it stands in the pickled tree, and what it is."""

    path: tuple[str, ...]
    key: ShardKey
    region: Region
    tensor: torch.Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class WriteRequest:
    """One indexed `.pt` file: `path` below the role's folder, its tensors, and the aliases its index names."""

    path: str
    kind: str
    tensors: tuple[TensorWrite, ...]
    aliases: tuple[Alias, ...] = ()
    tree: tuple[str, ...] = ()  # dicts that are there even if empty


@dataclass(frozen=True)
class WrittenFile:
    """What was written, for the manifest. `names` are the global tensors the file holds."""

    path: str
    kind: str
    size: int
    crc32: int
    index: IndexPlace | None = None
    names: tuple[str, ...] = ()
