"""Writes the folder of an adapter in PEFT's form: `adapter_model.safetensors` and `adapter_config.json`.

The folder also has the weights that were trained in full (embedding, head, norms, routers). A module whose tensors were
all trained in full is listed in `modules_to_save`. Other weights that were trained in full have the base model's names,
and PEFT reads them into the base model. The optimizer's state and the manifest (`adapters.trained`) show which weights
were trained. PEFT has no place for trained experts, for biases of adapted layers, and for multi-token prediction, so an
adapter with such weights is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint.manifest import AdapterSettings, WrittenFile
from mcore_ckpt.formats.contract import CheckpointReader, TensorInfo
from mcore_ckpt.formats.huggingface.export_plan import ExportPlan, plan_tensors
from mcore_ckpt.formats.huggingface.writer import KIND, write_weights
from mcore_ckpt.io.checksums import Progress, crc32
from mcore_ckpt.io.files import write_file
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import HfTensor
from mcore_ckpt.models.peft_adapters import FullyTrained, peft_config, peft_tensors

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"

_ALL_IN_ONE = 1 << 62


@dataclass(frozen=True)
class AdapterFolder:
    """The planned folder of an adapter: the plan of its only file of weights, and its `adapter_config.json`."""

    plan: ExportPlan
    config: Mapping[str, Any]


def plan_adapter_folder(
    model: HfModel,
    adapted: Sequence[HfTensor],
    tensors: Mapping[str, TensorInfo],
    settings: AdapterSettings,
    *,
    dtype: torch.dtype | None = None,
    base: str | None = None,
    beside: FullyTrained | None = None,
) -> AdapterFolder:
    """Plans the folder of an adapter.

    Args:
        adapted: the HuggingFace tensors. Their slabs have the adapters (`models.peft_adapters.with_adapters`).
        tensors: the tensors of the source by name.
        dtype: the dtype to write; None keeps the stored dtypes.
        base: the name or folder of the base model, for `adapter_config.json`.
        beside: the weights that were trained in full.

    Raises UnsupportedError: PEFT has no name for an adapter, or safetensors files cannot store the adapter's dtype.
    """
    beside = beside or FullyTrained()
    plan = plan_tensors([*peft_tensors(adapted), *beside.tensors], tensors, dtype=dtype, max_shard_bytes=_ALL_IN_ONE)
    plan = replace(plan, files=(replace(plan.files[0], name=ADAPTER_FILE),))
    return AdapterFolder(plan, peft_config(model, adapted, settings.dropout, base, beside.modules))


def write_adapter_folder(
    folder: AdapterFolder,
    reader: CheckpointReader,
    path: Path,
    progress: Progress = lambda nbytes: None,
    *,
    allow_nan: bool = False,
) -> list[WrittenFile]:
    """Writes both files durably into an existing folder. See `write_weights` for arguments and errors."""
    weights = write_weights(folder.plan, [0], reader, path, progress, allow_nan=allow_nan)
    return [*weights, write_adapter_config(folder, path)]


def write_adapter_config(folder: AdapterFolder, path: Path) -> WrittenFile:
    """Writes `adapter_config.json` durably. Raises OSError."""
    data = json.dumps(folder.config, indent=2, sort_keys=True).encode() + b"\n"
    write_file(path / ADAPTER_CONFIG_FILE, [data])
    return WrittenFile(ADAPTER_CONFIG_FILE, KIND, len(data), crc32(data))
