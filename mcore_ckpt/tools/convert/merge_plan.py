"""Plans the files of a merge, whether the checkpoint has megatron's or HuggingFace's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_ckpt.formats.contract import CheckpointReader, TensorInfo
from mcore_ckpt.formats.fsdp.adapters import with_peft_adapters
from mcore_ckpt.formats.fsdp.reader import fsdp_tensors
from mcore_ckpt.formats.huggingface.export_plan import ExportOptions, ExportPlan, plan_export, plan_tensors
from mcore_ckpt.models.accounting import together
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import HfTensor, hf_mtp_prefix
from mcore_ckpt.sharding.adapter_names import is_adapter
from mcore_ckpt.tools.examine.find import FoundCheckpoint


@dataclass(frozen=True, eq=False)
class OpenCheckpoint:
    """A checkpoint to merge. `model` is its model or base model. `tensors` are the tensors to write, by name."""

    found: FoundCheckpoint
    model: HfModel
    reader: CheckpointReader
    tensors: Mapping[str, TensorInfo]


def plan_model(options: ExportOptions, source: OpenCheckpoint, alpha: float | None = None) -> ExportPlan:
    """Plans the files of a checkpoint's model. With `alpha`, adapters are merged into the weights.

    Raises:
        CheckpointMismatchError: the tensors do not fit the model.
        UnsupportedError: safetensors files cannot store a tensor's dtype.
    """
    model, tensors = source.model, source.tensors
    if source.found.has_hf_names:
        copied, left_out = fsdp_tensors(source.reader, model)
        adapted = copied if alpha is None else with_peft_adapters(copied, tensors, alpha)
        plan = plan_copies(options, model, adapted, tensors)
        return replace(plan, left_out=together(left_out, plan.left_out))
    wanted = {name: info for name, info in tensors.items() if alpha is not None or not is_adapter(name)}
    return plan_export(model, wanted, alpha=alpha, **options)


def plan_copies(
    options: ExportOptions, model: HfModel, copied: Sequence[HfTensor], tensors: Mapping[str, TensorInfo]
) -> ExportPlan:
    """Plans the files of tensors that already have HuggingFace's names. Raises the same errors as `plan_tensors`."""
    first_mtp = hf_mtp_prefix(model)
    has_mtp = any(tensor.name.startswith(first_mtp) for tensor in copied)
    return plan_tensors(copied, tensors, has_mtp=has_mtp, **options)
