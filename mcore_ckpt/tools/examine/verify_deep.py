"""Reads an intact file again with torch, and compares the tensors with the file's index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint.damage import Damage
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.index import BLOCK_BYTES
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.checkpoint.plain_files import read_plain
from mcore_ckpt.checkpoint.reading import read_index
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.torch_save_files import read_pt
from mcore_ckpt.io import _native
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, StoredShard


def as_torch_sees_it(role_dir: Path, file: FileRecord) -> list[Damage]:
    """Opens a `.pt` file with `weights_only=True` and compares each tensor's bytes with the CRCs in the index.

    Returns the differences; none if the file is not a `.pt` file.
    """
    if not file.path.endswith(".pt"):
        return []
    try:
        if file.index is None:
            read_plain(role_dir, file)
            problems: list[str] = []
        else:
            problems = list(_differences(role_dir, file))
    except CheckpointCorruptError as error:
        problems = [str(error)]
    except Exception as error:  # a damaged file can contain anything, so the comparison can raise any error
        problems = [f"{role_dir / file.path}: does not have the expected tensors: {type(error).__name__}: {error}"]
    return [Damage(problem, file.path, file.rank) for problem in problems]


def _differences(role_dir: Path, file: FileRecord) -> Iterator[str]:
    path = role_dir / file.path
    # First read the file with our own unpickler (checkpoint/unpickling.py), because a hostile file can make torch's
    # unpickler use any amount of memory or time. Our unpickler also refuses compressed entries.
    read_pt(path)
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises many types of errors for a bad file
        raise CheckpointCorruptError(f"{path}: cannot be opened with weights_only=True: {error}") from error
    shards = {(shard.key.name, shard.key.kind): shard.as_stored for shard in read_index(role_dir, file).shards}
    found = dict(_tensors(state))
    for name in sorted(found.keys() ^ shards.keys()):
        yield f"{path}: tensor {name[0]} ({name[1]}) is {'not in the index' if name in found else 'only in the index'}"
    for name in found.keys() & shards.keys():
        if problem := _difference(found[name], shards[name]):
            yield f"{path}: tensor {shards[name].key}: {problem}"


def _tensors(state: Any) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Yields each tensor with its name and kind. An optimizer's file contains `{"state": {name: {kind: tensor}}}`."""
    of_optimizer = set(state) == {"state"} and isinstance(state["state"], dict)
    for name, value in (state["state"] if of_optimizer else state).items():
        kind_in_model = OPAQUE if name.endswith("_extra_state") else MODEL
        for kind, tensor in value.items() if of_optimizer else ((kind_in_model, value),):
            yield (name, kind), tensor


def _difference(tensor: torch.Tensor, shard: StoredShard) -> str | None:
    if tensor.dtype != torch_dtype(shard.dtype) or tensor.numel() != shard.region.numel:
        wanted = f"{shard.region.numel} of {shard.dtype}"
        return f"torch reads {tensor.numel()} elements of {tensor.dtype}, but the index has {wanted}"
    if not tensor.is_contiguous():
        return "torch reads a tensor that is not row-major"
    crcs = _native.crc32_blocks(tensor.data_ptr(), tensor.nbytes, BLOCK_BYTES) if tensor.nbytes else []
    if crcs != list(shard.crc32 or ()):
        return "torch reads bytes whose CRCs differ from the CRCs in the index"
    return None
