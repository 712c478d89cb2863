"""Optimizer state as megatron-core stored it until 0.15 (`fully_sharded_model_space`): a grid of flat cells."""

import io
import pickle
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles, WantedPart

KEY = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
# Two layers, whose rows two tensor-parallel ranks have: gate and up apart, so four cells of three rows (0.15).
WHOLE, GRID, CELL = (2, 12, 5), (2, 4, 1), (1, 3, 5)
TENSOR = torch.arange(120, dtype=torch.float32).reshape(WHOLE)


def write(folder: Path, left_out: int = 0) -> TorchDistFiles:
    """A tensor that two data-parallel ranks wrote: of each cell one has 7 elements, the other the rest."""
    folder.mkdir()
    stream, parts, storage = io.BytesIO(), [], {}
    for place in product(*map(range, GRID)):
        cell = TENSOR
        for axis, (at, length) in enumerate(zip(place, CELL, strict=True)):
            cell = cell.narrow(axis, at * length, length)
        flat = cell.reshape(-1)
        for start, stop in ((0, 7), (7, len(flat) - left_out)):
            offset, at = torch.Size((*place, start)), stream.tell()
            torch.save(flat[start:stop].reshape(*(1 for _ in GRID), -1).clone(), stream)
            storage[MetadataIndex(KEY, offset)] = _StorageInfo("__0_0.distcp", at, stream.tell() - at)
            parts.append(ChunkStorageMetadata(offset, torch.Size((*(1 for _ in GRID), stop - start))))
    whole = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((*GRID, 15)), parts)
    (folder / "__0_0.distcp").write_bytes(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({KEY: whole}, storage_data=storage)))
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return TorchDistFiles(folder, [folder])


@pytest.mark.parametrize(
    ("offset", "shape"),
    [
        ((0, 0, 0), WHOLE),
        ((1, 3, 0), CELL),
        ((0, 6, 0), (2, 6, 5)),  # of two ranks, one has half of all rows
        ((0, 2, 1), (2, 5, 3)),  # cut anywhere
        ((1, 11, 4), (1, 1, 1)),
    ],
)
def test_any_box_is_read(tmp_path: Path, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    files, memory = write(tmp_path / "saved"), torch.full(shape, float("nan"))
    files.read(WantedPart(KEY, WHOLE, offset, memory))
    wanted = TENSOR[tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))]
    assert torch.equal(memory, wanted)
    assert files.names_not_in([files.positions_read()]) == []


def test_elements_that_nobody_wrote_are_missed(tmp_path: Path) -> None:
    files = write(tmp_path / "saved", left_out=1)
    with pytest.raises(CheckpointCorruptError, match=rf"{KEY}: .metadata lists only 14 of 15 wanted elements"):
        files.read(WantedPart(KEY, WHOLE, (0, 0, 0), torch.empty(WHOLE)))


@pytest.mark.parametrize("shape", [(2, 10, 6), (3, 12, 5), (2, 12, 6), (2, 24, 5), (12, 10)])
def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    files = write(tmp_path / "saved")
    with pytest.raises(CheckpointMismatchError, match=r"wanted \[.*\] torch.float32, found \[2, 4, 1, 15\]"):
        files.read(WantedPart(KEY, shape, tuple(0 for _ in shape), torch.empty(shape)))
