"""Compares written `.safetensors` files with the reader that their weights came from, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.contract import CheckpointReader
from mcore_ckpt.formats.huggingface.elements import Elements, Scratch, fill
from mcore_ckpt.formats.huggingface.export_plan import ExportPlan, FileTensor
from mcore_ckpt.formats.huggingface.safetensors_files import HfStored, read_file
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import open_regular, read_exact


def check_weights(plan: ExportPlan, numbers: Iterable[int], reader: CheckpointReader, folder: Path) -> None:
    """Compares some of the planned files. It needs memory for a few times SCATTER_BYTES.

    Args:
        plan: the plan of the files.
        numbers: the indices, in `plan.files`, of the files to compare.
        reader: the reader of the tensors.
        folder: the folder with the files.

    Raises:
        CheckpointMismatchError: the bits of a tensor differ.
        CheckpointCorruptError: a file or the source cannot be read.
    """
    scratch = Scratch()
    for file in (plan.files[number] for number in numbers):
        stored = {tensor.name: tensor for tensor in read_file(folder / file.name)}
        for tensor in file.tensors:
            _check_tensor(tensor, stored[tensor.name], reader, scratch)


def _check_tensor(tensor: FileTensor, stored: HfStored, reader: CheckpointReader, scratch: Scratch) -> None:
    item = tensor.dtype.itemsize
    step = max(1, tuning.SCATTER_BYTES // item)
    descriptor = open_regular(stored.path)
    try:
        for first in range(0, tensor.nbytes // item, step):
            wanted = torch.empty(min(step, tensor.nbytes // item - first), dtype=tensor.dtype)
            fill(reader, [Elements(tensor, first, wanted)], scratch)
            found = read_exact(descriptor, wanted.nbytes, stored.offset + first * item, stored.path)
            if not torch.equal(torch.frombuffer(bytearray(found), dtype=torch.uint8), wanted.view(torch.uint8)):
                raise CheckpointMismatchError(
                    f"{stored.path}: tensor {stored.name}: the written bits differ from {reader.place}: check the "
                    "disks and convert again"
                )
    finally:
        os.close(descriptor)
