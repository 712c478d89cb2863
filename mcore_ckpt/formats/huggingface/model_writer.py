"""Writes the folder of a HuggingFace model, or of an adapter for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mcore_ckpt.formats.contract import CheckpointReader, FileReport, FileToWrite
from mcore_ckpt.formats.huggingface.adapter_folder import AdapterFolder, write_adapter_config
from mcore_ckpt.formats.huggingface.assets import write_config
from mcore_ckpt.formats.huggingface.export_plan import ExportPlan
from mcore_ckpt.formats.huggingface.side_files import CONFIG_FILE, copy_side_files
from mcore_ckpt.formats.huggingface.weights_check import check_weights
from mcore_ckpt.formats.huggingface.writer import write_index, write_weights
from mcore_ckpt.models.architecture import HfModel, read_config
from mcore_ckpt.models.quantization import quantization_of


@dataclass(frozen=True, eq=False)
class _WeightsWriter:
    """Writes weights. Subclasses add `finish` to satisfy `formats.contract.CheckpointWriter`.

    Attributes:
        plan: the files of the weights.
        reader: the reader of the tensors.
        allow_nan: whether to write NaN instead of refusing it.
    """

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
        check_weights(self.plan, range(part, len(self.files), parts), self.reader, folder)


@dataclass(frozen=True, eq=False)
class ModelWriter(_WeightsWriter):
    """Writes a model: weights, index, configuration and the other assets.

    Attributes:
        model: the model, which `config.json` will describe.
        config_dir: the folder with the configuration, the tokenizer and the other files to copy.
    """

    model: HfModel
    config_dir: Path

    @property
    def quantizes_as_before(self) -> bool:
        """True if the weights are quantized by the method in `config_dir`, so that the files there describe them."""
        before = quantization_of(read_config(self.config_dir))
        return before is not None and (self.plan.quantization or {}).get("quant_method") == before.method

    def finish(self, reports: Sequence[FileReport], folder: Path) -> None:
        write_index(self.plan, folder)
        copy_side_files(self.config_dir, folder, without=(CONFIG_FILE,), quantized=self.quantizes_as_before)
        write_config(folder, self.model, self.plan.dtype, self.plan.has_mtp, self.plan.quantization)


@dataclass(frozen=True, eq=False)
class AdapterWriter(_WeightsWriter):
    """Writes an adapter in PEFT's form.

    Attributes:
        adapter: the planned folder. Its weights are in `plan`.
    """

    adapter: AdapterFolder

    def finish(self, reports: Sequence[FileReport], folder: Path) -> None:
        write_adapter_config(self.adapter, folder)
