"""Plans merges of checkpoints with low-rank adapters: into the weights, beside them, or the adapters alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mcore_ckpt.checkpoint.manifest import AdapterSettings
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    UnsupportedError,
)
from mcore_ckpt.formats.contract import CheckpointReader, TensorInfo, weights_of
from mcore_ckpt.formats.fsdp.adapters import adapted_weights, is_peft_adapter
from mcore_ckpt.formats.huggingface.adapter_folder import AdapterFolder, plan_adapter_folder
from mcore_ckpt.formats.huggingface.export_plan import ExportOptions, ExportPlan
from mcore_ckpt.formats.huggingface.safetensors_files import read_folder
from mcore_ckpt.formats.huggingface.stored_weights import DequantizingReader
from mcore_ckpt.formats.joined_reader import JoinedReader
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import read_small
from mcore_ckpt.models.adapters import has_adapter, with_adapters
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import HfTensor, Slab, hf_tensors, hf_tensors_in
from mcore_ckpt.sharding.adapters import is_adapter, permuted_in_bridge
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region, Shape
from mcore_ckpt.tools.find import FoundCheckpoint
from mcore_ckpt.tools.merge_plan import plan_copies, plan_model

Adapters = Literal["merge", "beside", "only"]

# verl (0.5 to 0.9) writes alpha and the rank here: FSDP's manager beside the shards, and the SFT trainer into the step.
_LORA_META = "lora_train_meta.json"
_WEIGHT = re.compile(r".*weight\d*")


@dataclass(frozen=True, eq=False)
class AdaptedPlan:
    """The planned files of a merge of a checkpoint that has adapters.

    Attributes:
        reader: reads the checkpoint, and the base model if that is in a folder of its own.
        plan: the files of the model; those of the adapter if only the adapter is written.
        adapter: the folder of the adapter. None if the adapters are merged.
    """

    reader: CheckpointReader
    plan: ExportPlan
    adapter: AdapterFolder | None


def adapters_in(found: FoundCheckpoint, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Returns the tensors of adapters among the tensors of a checkpoint."""
    belongs = is_peft_adapter if found.has_hf_names else is_adapter
    return {name: info for name, info in tensors.items() if belongs(name)}


def _refuse_permuted(found: FoundCheckpoint, reader: CheckpointReader, adapters: Iterable[str]) -> None:
    """Raises UnsupportedError for adapters that Megatron-Bridge stores with their rows in another order.

    The order depends on the tensor-parallel size, of which the number of pieces is all that such a checkpoint shows.
    """
    if found.kind != "torch_dist":
        return
    for name in adapters:
        if (kind := permuted_in_bridge(name)) is not None:
            pieces = next(iter(reader.parts(ShardKey(name, reader.weight_kind))), ())
            if len(pieces) > (1 if kind == "magnitude" else 2):
                raise UnsupportedError(
                    f"{found.path}: tensor {name}: Megatron-Bridge puts the rows of this adapter of linear_fc1 into an "
                    "order that only its own tensor-parallel size can read: load the checkpoint under that size, and "
                    "save it with this package"
                )


def has_base(found: FoundCheckpoint, tensors: Mapping[str, TensorInfo]) -> bool:
    """Returns True if a checkpoint has the weights of the model, and not only adapters and buffers."""
    adapters = adapters_in(found, tensors)
    return any(_WEIGHT.fullmatch(name) for name in tensors if name not in adapters)


def adapter_settings(found: FoundCheckpoint, alpha: float | None) -> AdapterSettings:
    """Returns the settings of the adapters: the given alpha, or what the checkpoint says.

    Raises:
        CheckpointMismatchError: neither the caller nor the checkpoint says what alpha is.
        CheckpointCorruptError: the file that says it is damaged.
    """
    recorded = read_manifest(found.path).adapters if found.kind == "native" else _lora_meta(found.path)
    if alpha is not None:
        return replace(recorded or AdapterSettings(alpha), alpha=alpha)
    if recorded is None:
        raise CheckpointMismatchError(
            f"{found.path}: has adapters, but nothing says what their alpha is, so their scale is unknown: give it "
            "with --lora-alpha"
        )
    return recorded


def _lora_meta(folder: Path) -> AdapterSettings | None:
    for path in (folder / _LORA_META, folder.parent / _LORA_META):
        try:
            alpha = fields.get_number(fields.parse(read_small(path, limits.HF_JSON_BYTES)), "lora_alpha")
            # verl's SFT trainer (0.9.1) writes 0 where its configuration does not say what alpha is.
            return AdapterSettings(alpha) if alpha > 0 else None
        except FileNotFoundError:
            continue
        except (OSError, fields.FieldError) as error:
            raise CheckpointCorruptError(f"{path}: cannot be read: {error}: give alpha with --lora-alpha") from None
    return None


@dataclass(frozen=True, eq=False)
class AdapterMerge:
    """The arguments of a plan.

    Attributes:
        how: "merge" the adapters into the weights; write the weights as they are and the adapters "beside" them; or
            write "only" the adapters.
        settings: the adapters' settings.
        base_dir: the folder of the base model, whose weights are needed if the checkpoint has only adapters.
        options: the form of the files.
    """

    how: Adapters
    settings: AdapterSettings
    base_dir: Path
    options: ExportOptions


def plan_with_adapters(
    job: AdapterMerge,
    found: FoundCheckpoint,
    model: HfModel,
    reader: CheckpointReader,
    tensors: Mapping[str, TensorInfo],
) -> AdaptedPlan:
    """Plans the files of a merge of a checkpoint that has adapters.

    Args:
        job: what to write.
        found: the checkpoint.
        model: the model that the checkpoint, or its base model, has.
        reader: the reader of the checkpoint.
        tensors: the tensors to write, by name.

    Raises:
        CheckpointMismatchError: the adapters do not fit the model, or the base model is needed and is not there.
        UnsupportedError: the form of PEFT does not have names for the adapters.
        InvalidArgumentError: the adapters are to be written beside the weights, which the checkpoint does not have.
    """
    _refuse_permuted(found, reader, adapters_in(found, tensors))
    if job.how == "only":
        alone = _adapter_folder(job, found, model, tensors)
        return AdaptedPlan(reader, alone.plan, alone)
    if not has_base(found, tensors):
        if job.how == "beside":
            raise InvalidArgumentError(
                f"{found.path}: has only adapters, so there are no weights to write them beside: use --adapters only, "
                "or merge them into the base model in --hf_model_path"
            )
        return _onto_base(job, found, model, reader, tensors)
    adapter = _adapter_folder(job, found, model, tensors) if job.how == "beside" else None
    alpha = job.settings.alpha if job.how == "merge" else None
    return AdaptedPlan(reader, plan_model(job.options, found, model, reader, tensors, alpha), adapter)


def _adapter_folder(
    job: AdapterMerge, found: FoundCheckpoint, model: HfModel, tensors: Mapping[str, TensorInfo]
) -> AdapterFolder:
    base = model.config.get("_name_or_path") or None
    adapted = _adapted(job, found, model, tensors, hf_tensors(model) if not found.has_hf_names else ())
    return plan_adapter_folder(model, adapted, tensors, job.settings, dtype=job.options["dtype"], base=base)


def _adapted(
    job: AdapterMerge,
    found: FoundCheckpoint,
    model: HfModel,
    tensors: Mapping[str, TensorInfo],
    wanted: Sequence[HfTensor],
) -> list[HfTensor]:
    """Returns HuggingFace tensors with their adapters. `wanted` is used only for a checkpoint with mcore's names."""
    if found.has_hf_names:
        return adapted_weights(tensors, job.settings.alpha)
    shapes = {name: tuple(info.shape) for name, info in adapters_in(found, tensors).items()}
    return with_adapters(model, wanted, shapes, job.settings.alpha)


# -- a base model in a folder of its own -------------------------------------------------------------------


def _onto_base(
    job: AdapterMerge,
    found: FoundCheckpoint,
    model: HfModel,
    reader: CheckpointReader,
    tensors: Mapping[str, TensorInfo],
) -> AdaptedPlan:
    try:
        weights = read_folder(job.base_dir)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{error}, and {found.path} has only adapters: name the folder of the base model with --hf_model_path, or "
            "write the adapters alone with --adapters only"
        ) from None
    base = DequantizingReader(job.base_dir, model.config, weights)
    stored = {name: info for name, info in weights_of(base).items() if not model.ignores(name)}
    wanted = [] if found.has_hf_names else hf_tensors_in(model, stored)
    adapted = {tensor.name: tensor for tensor in _adapted(job, found, model, tensors, wanted)}
    if missing := [name for name, tensor in adapted.items() if has_adapter(tensor) and name not in stored]:
        raise CheckpointMismatchError(
            f"{job.base_dir}: lacks tensor {missing[0]}, which has an adapter: name the folder of the base model with "
            "--hf_model_path"
        )
    merged = []
    for name, each in stored.items():
        own = adapted.get(name)
        if own is not None and all(slab.mcore in tensors for slab in own.slabs):
            merged.append(own)  # a buffer that changes in training, such as a router's bias
        else:
            merged.append(_of_base(name, each.shape, own))
    plan = plan_copies(job.options, model, merged, {**tensors, **stored})
    return AdaptedPlan(JoinedReader(reader, base), plan, None)


def _of_base(name: str, shape: Shape, adapted: HfTensor | None) -> HfTensor:
    """Returns a tensor of the base model, with the adapters of its slabs."""
    whole = Region.whole(shape)
    if adapted is None or not has_adapter(adapted):
        return HfTensor(name, shape, (Slab(0, name, whole),))
    if adapted.shape != shape:
        raise CheckpointMismatchError(
            f"tensor {name}: has shape {list(shape)}, but its adapter requires {list(adapted.shape)}: name the folder "
            "of the base model with --hf_model_path"
        )
    if any(slab.change is not None for slab in adapted.slabs):
        raise UnsupportedError(
            f"tensor {name}: has an adapter, but HuggingFace stores its values otherwise than megatron: save the "
            "checkpoint with the base model in it"
        )
    slabs = (
        replace(slab, mcore=name, region=whole.with_flat(slab.start, slab.start + slab.numel)) for slab in adapted.slabs
    )
    return replace(adapted, slabs=tuple(slabs))
