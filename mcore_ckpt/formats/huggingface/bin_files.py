"""Reads the weights that `torch.save` has written into old HuggingFace folders: `pytorch_model*.bin`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.formats.huggingface.safetensors_files import read_weight_map
from mcore_ckpt.formats.shard_reader import ShardReader, stored_shard
from mcore_ckpt.formats.torch_save_files import as_state_dict, as_tensor, read_pt
from mcore_ckpt.sharding.plan import StoredShard
from mcore_ckpt.sharding.regions import Region

_FILE, _INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def open_bins(folder: Path) -> ShardReader:
    """Opens the `pytorch_model*.bin` of a folder.

    Raises:
        CheckpointNotFoundError: the folder has no such file.
        CheckpointCorruptError: a file is missing or damaged, or holds values that are not tensors.
    """
    shards = _read_bins(folder)
    return ShardReader(folder, {name: info for name, (info, _) in shards.items()}, lambda name: (shards[name][1],))


def _read_bins(folder: Path) -> dict[str, tuple[TensorInfo, StoredShard]]:
    index = folder / _INDEX
    if index.exists():
        where = read_weight_map(index)
        files = sorted(set(where.values()))
    elif (folder / _FILE).exists():
        where, files = {}, [_FILE]
    else:
        raise CheckpointNotFoundError(
            f"{folder}: has neither model*.safetensors nor pytorch_model*.bin, so it has no weights: name the folder "
            "of a HuggingFace model"
        )
    found = {name: shard for file in files for name, shard in _read_bin(folder / file)}
    if missing := sorted(where.keys() - found.keys()):
        raise CheckpointCorruptError(
            f"{folder / where[missing[0]]}: lacks {missing[0]}, which {_INDEX} lists for this file: copy the file again"
        )
    return found


def _read_bin(path: Path) -> Iterator[tuple[str, tuple[TensorInfo, StoredShard]]]:
    for name, value in as_state_dict(read_pt(path), str(path)).items():
        tensor = as_tensor(value, f"{path}: {name}")
        shard = stored_shard(str(name), tensor, Region.whole(tensor.shape))
        yield str(name), (TensorInfo(tensor.dtype, tensor.shape), shard)
