"""Writes the folder of a HuggingFace model or of a PEFT adapter, and compares the folder with its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.contract import CheckpointReader, FileReport, FileToWrite
from mcore_ckpt.formats.huggingface.adapter_folder import AdapterFolder, write_adapter_config
from mcore_ckpt.formats.huggingface.assets import write_config
from mcore_ckpt.formats.huggingface.elements import Elements, Scratch, fill
from mcore_ckpt.formats.huggingface.export_plan import ExportPlan, FileTensor
from mcore_ckpt.formats.huggingface.safetensors_files import HfStored, read_file
from mcore_ckpt.formats.huggingface.side_files import CONFIG_FILE, copy_side_files
from mcore_ckpt.formats.huggingface.writer import write_index, write_weights
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import opened, read_exact
from mcore_ckpt.models.architecture import HfModel, read_config
from mcore_ckpt.models.quantization import quantization_of


@dataclass(frozen=True, eq=False)
class _WeightsWriter:
    """Writes weights. Subclasses add `finish` to implement `formats.contract.CheckpointWriter`."""

    plan: ExportPlan
    reader: CheckpointReader
    allow_nan: bool

    @cached_property
    def files(self) -> Sequence[FileToWrite]:
        return [FileToWrite(file.name, file.nbytes) for file in self.plan.files]

    def write(self, numbers: Sequence[int], folder: Path, progress: Callable[[int], None]) -> list[FileReport]:
        written = write_weights(self.plan, numbers, self.reader, folder, progress, allow_nan=self.allow_nan)
        return [FileReport(number, file.size) for number, file in zip(numbers, written, strict=True)]

    def check(self, folder: Path, part: int, parts: int) -> None:
        _check_weights(self.plan, range(part, len(self.files), parts), self.reader, folder)


@dataclass(frozen=True, eq=False)
class ModelWriter(_WeightsWriter):
    """Writes a model: weights, index, configuration and the other assets.

    Attributes:
        config_dir: the folder with the configuration, the tokenizer and the other files to copy.
    """

    model: HfModel
    config_dir: Path

    @property
    def quantizes_as_before(self) -> bool:
        """True if the weights are quantized by the method that the files in `config_dir` describe."""
        before = quantization_of(read_config(self.config_dir))
        return before is not None and (self.plan.quantization or {}).get("quant_method") == before.method

    def finish(self, reports: Sequence[FileReport], folder: Path) -> None:
        write_index(self.plan, folder)
        copy_side_files(self.config_dir, folder, without=(CONFIG_FILE,), quantized=self.quantizes_as_before)
        write_config(folder, self.model, self.plan.dtype, self.plan.has_mtp, self.plan.quantization)


@dataclass(frozen=True, eq=False)
class AdapterWriter(_WeightsWriter):
    """Writes an adapter in PEFT's form: the planned folder `adapter`, whose weights are in `plan`."""

    adapter: AdapterFolder

    def finish(self, reports: Sequence[FileReport], folder: Path) -> None:
        write_adapter_config(self.adapter, folder)


def _check_weights(plan: ExportPlan, numbers: Iterable[int], reader: CheckpointReader, folder: Path) -> None:
    """Compares some of the planned files with the source, bit for bit. Needs a few times SCATTER_BYTES of memory.

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
    with opened(stored.path) as (descriptor, _):
        for first in range(0, tensor.nbytes // item, step):
            wanted = torch.empty(min(step, tensor.nbytes // item - first), dtype=tensor.dtype)
            fill(reader, [Elements(tensor, first, wanted)], scratch)
            found = read_exact(descriptor, wanted.nbytes, stored.offset + first * item, stored.path)
            if not torch.equal(torch.frombuffer(bytearray(found), dtype=torch.uint8), wanted.view(torch.uint8)):
                raise CheckpointMismatchError(
                    f"{stored.path}: tensor {stored.name}: the written bits differ from {reader.place}: check the "
                    "disks and convert again"
                )
