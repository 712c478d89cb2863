"""A small torch_dist checkpoint, written without megatron."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


def make_torch_dist(folder: Path, common_object: Any = {"iteration": 4}) -> None:  # noqa: B006  # not changed
    """As `dist_checkpointing.save` writes: layers that are alike in one tensor, and an object.

    What all ranks share is in `common.pt`, as until megatron-core 0.18, and in an object, as since 0.19.
    """
    folder.mkdir()
    name, parts = "decoder.layers.mlp.linear_fc2.weight", []
    storage: dict[MetadataIndex, _StorageInfo] = {}
    stream = io.BytesIO()
    for layer in range(2):
        start = stream.tell()
        torch.save(torch.full((1, 4, 3), float(layer)), stream)
        offset = torch.Size((layer, 0, 0))
        storage[MetadataIndex(name, offset)] = _StorageInfo("__0_0.distcp", start, stream.tell() - start)
        parts.append(ChunkStorageMetadata(offset, torch.Size((1, 4, 3))))
    objects: dict[str, Any] = {"rng": {"seed": 1}, "common_state/shard_0_1": common_object}
    for key, value in objects.items():
        start = stream.tell()
        torch.save([value], stream)
        storage[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", start, stream.tell() - start)
    whole = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((2, 4, 3)), parts)
    described = {name: whole, **{key: BytesStorageMetadata() for key in objects}}
    metadata = Metadata(described, storage_data=storage)
    (folder / "__0_0.distcp").write_bytes(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    common = io.BytesIO()
    torch.save({"iteration": 3}, common)
    (folder / "common.pt").write_bytes(common.getvalue())
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
