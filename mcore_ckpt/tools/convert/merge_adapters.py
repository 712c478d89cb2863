"""Plans merges of checkpoints with adapters: merges the adapters, or writes them next to the weights or alone."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mcore_ckpt.checkpoint.manifest import AdapterSettings
from mcore_ckpt.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    UnsupportedError,
)
from mcore_ckpt.formats.contract import CheckpointReader, TensorInfo, weights_of
from mcore_ckpt.formats.fsdp.adapters import adapted_weights, is_peft_adapter, saved_modules
from mcore_ckpt.formats.huggingface.adapter_folder import AdapterFolder, plan_adapter_folder
from mcore_ckpt.formats.huggingface.export_plan import ExportOptions, ExportPlan
from mcore_ckpt.formats.huggingface.safetensors_files import read_folder
from mcore_ckpt.formats.huggingface.side_files import not_read
from mcore_ckpt.formats.huggingface.stored_weights import DequantizingReader
from mcore_ckpt.formats.joined_reader import JoinedReader
from mcore_ckpt.models.accounting import (
    BASE,
    COMPUTED,
    IGNORED,
    MAYBE_TRAINED,
    LeftOut,
    account,
    matching,
    together,
)
from mcore_ckpt.models.mapping import HfTensor, Slab, hf_tensors, hf_tensors_in
from mcore_ckpt.models.peft_adapters import (
    FullyTrained,
    fully_trained_in_peft,
    has_adapted_weights,
    has_adapter,
    no_place_in_peft,
    of_modules,
    with_adapters,
)
from mcore_ckpt.sharding.adapter_names import is_adapter, is_changed_buffer, permuted_in_bridge
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region, Shape
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.tools.convert.merge_plan import OpenCheckpoint, plan_copies, plan_model
from mcore_ckpt.tools.examine.find import FoundCheckpoint

Adapters = Literal["merge", "beside", "only"]

_WEIGHT = re.compile(r".*weight\d*")


@dataclass(frozen=True, eq=False)
class AdaptedPlan:
    """The planned files of a merge of a checkpoint that has adapters.

    `reader` also reads the base model if the base model is in a separate folder. `plan` has the model's files, or the
    adapter's files if only the adapter is written. `adapter` is None if the adapters are merged.
    """

    reader: CheckpointReader
    plan: ExportPlan
    adapter: AdapterFolder | None
    left_out: tuple[LeftOut, ...]


def adapters_in(found: FoundCheckpoint, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Returns those `tensors` that belong to adapters."""
    belongs = is_peft_adapter if found.has_hf_names else is_adapter
    return {name: info for name, info in tensors.items() if belongs(name)}


def _refuse_permuted(found: FoundCheckpoint, reader: CheckpointReader, adapters: Iterable[str]) -> None:
    """Raises UnsupportedError for adapters whose rows Megatron-Bridge stores in another order.

    The order depends on the tensor-parallel size, which cannot be read from such a checkpoint.
    """
    for name in adapters if found.of_kind.may_permute_adapters else ():
        if (kind := permuted_in_bridge(name)) is not None:
            pieces = next(iter(reader.parts(ShardKey(name, reader.weight_kind))), ())
            if len(pieces) > (1 if kind == "magnitude" else 2):
                raise UnsupportedError(
                    f"{found.path}: tensor {name}: Megatron-Bridge puts the rows of this adapter of linear_fc1 into an "
                    "order that depends on the tensor-parallel size: load the checkpoint under the size that saved it, "
                    "and save it with this package"
                )


def has_base(found: FoundCheckpoint, tensors: Mapping[str, TensorInfo]) -> bool:
    """Returns True if a checkpoint has the model's weights, including the frozen weights under its adapters."""
    adapters = adapters_in(found, tensors)
    if found.has_hf_names or not adapters:
        return any(_WEIGHT.fullmatch(name) for name in tensors if name not in adapters)
    return has_adapted_weights(adapters, (name for name in tensors if name not in adapters))


def adapter_settings(found: FoundCheckpoint, alpha: float | None) -> AdapterSettings:
    """Returns the settings that the checkpoint states for its adapters. A given `alpha` replaces the stated alpha.

    Raises CheckpointMismatchError if neither the caller nor the checkpoint states alpha, and CheckpointCorruptError if
    the file with the settings is damaged.
    """
    recorded = found.of_kind.adapter_settings(found.path)
    if alpha is not None:
        return replace(recorded or AdapterSettings(alpha), alpha=alpha)
    if recorded is None:
        raise CheckpointMismatchError(
            f"{found.path}: has adapters, but does not state their alpha, so their scale is unknown: give alpha with "
            "mcore-ckpt merge --lora-alpha"
        )
    return recorded


@dataclass(frozen=True, eq=False)
class AdapterMerge:
    """A merge of a checkpoint that has adapters.

    Attributes:
        how: "merge": merge the adapters into the weights. "beside": write the unchanged weights, and the adapters in a
            folder next to them. "only": write only the adapters.
        base_dir: the folder of the base model. Its weights are needed if the checkpoint has only adapters.
        options: the form of the files to write.
    """

    source: OpenCheckpoint
    how: Adapters
    settings: AdapterSettings
    base_dir: Path
    options: ExportOptions

    def plan(self) -> AdaptedPlan:
        """Plans the files to write.

        Raises:
            CheckpointMismatchError: the adapters do not fit the model, or a base model is needed but missing.
            UnsupportedError: PEFT has no names for the adapters.
            InvalidArgumentError: `how` is "beside", but the checkpoint has no weights.
        """
        found, reader, tensors = self.source.found, self.source.reader, self.source.tensors
        _refuse_permuted(found, reader, adapters_in(found, tensors))
        if self.how == "only":
            alone = self._folder()
            return AdaptedPlan(reader, alone.plan, alone, alone.plan.left_out)
        if not has_base(found, tensors):
            if self.how == "beside":
                raise InvalidArgumentError(
                    f"{found.path}: has only adapters and no weights, so --adapters cannot be beside: use --adapters "
                    "only, or merge the adapters into the base model in --hf_model_path"
                )
            return self._onto_base()
        adapter = self._folder() if self.how == "beside" else None
        plan = plan_model(self.options, self.source, self.settings.alpha if self.how == "merge" else None)
        return AdaptedPlan(reader, plan, adapter, plan.left_out)

    def _folder(self) -> AdapterFolder:
        found, model, tensors = self.source.found, self.source.model, self.source.tensors
        base = model.config.get("_name_or_path") or None
        adapted = self._adapted(hf_tensors(model) if not found.has_hf_names else ())
        weights = [name for name in tensors if name not in adapters_in(found, tensors)]
        changed, why = self._changed(weights)
        if found.has_hf_names:
            beside = of_modules(saved_modules(tensors).values())
        else:
            # If the adapters are written next to the model, the model's folder has the fully trained weights, so leave
            # these weights out of the adapter's folder.
            beside = fully_trained_in_peft(model, adapted, changed, weights) if self.how == "only" else FullyTrained()
        folder = plan_adapter_folder(
            model, adapted, tensors, self.settings, dtype=self.options["dtype"], base=base, beside=beside
        )
        if self.how != "only":
            return folder
        left_out = account(weights, beside.sources, [(why, lambda name: name not in changed)], no_place_in_peft)
        return replace(folder, plan=replace(folder.plan, left_out=together(left_out, folder.plan.left_out)))

    def _changed(self, weights: Sequence[str]) -> tuple[set[str], str]:
        """Returns the names of the weights that were trained in full, and the reason for leaving out other weights."""
        found, reader = self.source.found, self.source.reader
        if found.has_hf_names:
            return set(), MAYBE_TRAINED  # the `weights` do not include PEFT's modules_to_save
        if not has_base(found, weights_of(reader)):
            return set(weights), BASE
        stepped = {name for name in weights if reader.kinds(name) or is_changed_buffer(name)}
        if self.settings.trained is not None:
            return stepped | (set(self.settings.trained) & set(weights)), BASE
        has_optimizer = any(reader.kinds(name) for name in reader.names)
        return stepped, BASE if has_optimizer else MAYBE_TRAINED

    def _adapted(self, wanted: Sequence[HfTensor]) -> list[HfTensor]:
        """Returns HuggingFace tensors with their adapters.

        The result has the `wanted` tensors if the checkpoint has mcore's names, and otherwise all weights that have
        adapters.
        """
        found, tensors = self.source.found, self.source.tensors
        if found.has_hf_names:
            return adapted_weights(tensors, self.settings.alpha)
        shapes = {name: tuple(info.shape) for name, info in adapters_in(found, tensors).items()}
        return with_adapters(self.source.model, wanted, shapes, self.settings.alpha)

    def _onto_base(self) -> AdaptedPlan:
        found, model, tensors = self.source.found, self.source.model, self.source.tensors
        try:
            weights = read_folder(self.base_dir)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{error}, and {found.path} has only adapters: name the folder of the base model with --hf_model_path, "
                "or write the adapters alone with mcore-ckpt merge --adapters only"
            ) from None
        base = DequantizingReader(self.base_dir, model.config, weights)
        of_base = weights_of(base)
        stored = {name: info for name, info in of_base.items() if not model.ignores(name)}
        wanted = [] if found.has_hf_names else hf_tensors_in(model, stored)
        adapted = {tensor.name: tensor for tensor in self._adapted(wanted)}
        if missing := [name for name, tensor in adapted.items() if has_adapter(tensor) and name not in stored]:
            raise CheckpointMismatchError(
                f"{self.base_dir}: lacks tensor {missing[0]}, which has an adapter: name the folder of the base model "
                "with --hf_model_path"
            )
        merged = []
        beside = [name for name in tensors if name not in adapters_in(found, tensors)]
        trained = saved_modules(tensors) if found.has_hf_names else {}
        for name, each in stored.items():
            if name in trained:
                _check_shape(name, each.shape, trained[name])
            own = trained.get(name) or _own(adapted.get(name), beside)
            merged.append(_of_base(name, each.shape, adapted.get(name)) if own is None else own)
        used = {slab.mcore for tensor in merged for slab in tensor.slabs}
        plan = plan_copies(self.options, model, merged, {**tensors, **stored})
        beside += [tensor.slabs[0].mcore for tensor in trained.values()]
        account(beside, used, [], lambda names: _lacks(self.base_dir, names))
        unread = not_read(self.base_dir, {each.path.name for each in weights.values()})
        reasons = [matching(IGNORED, model.ignored_by_user), matching(COMPUTED, model.ignored)]
        left_out = account(of_base, stored, reasons, lambda names: _lacks(self.base_dir, names))
        return AdaptedPlan(
            JoinedReader(self.source.reader, base), plan, None, together(left_out, base.left_out, plan.left_out, unread)
        )


def _own(adapted: HfTensor | None, weights: Container[str]) -> HfTensor | None:
    """Returns the tensor with the values of the checkpoint's `weights`; None if `weights` lack some of its values.

    In a checkpoint of adapters, `weights` are tensors that were trained in full, and buffers that training changes.
    """
    names = [] if adapted is None else [found_as(slab.mcore, weights) for slab in adapted.slabs]
    if adapted is None or not names or None in names:
        return None
    slabs = (replace(slab, mcore=name or "") for slab, name in zip(adapted.slabs, names, strict=True))
    return replace(adapted, slabs=tuple(slabs))


def _lacks(base: Path, names: Sequence[str]) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{names[0]} and {len(names) - 1} more tensors were trained in addition to the adapters, but the base model in "
        f"{base} has no such tensors, or the checkpoint has only parts of them: name the folder of the base model with "
        "--hf_model_path, or leave out these tensors with --ignore"
    )


def _check_shape(name: str, shape: Shape, wanted: HfTensor) -> None:
    if wanted.shape != shape:
        raise CheckpointMismatchError(
            f"tensor {name}: has shape {list(shape)} in the base model, but the checkpoint requires "
            f"{list(wanted.shape)}: name the folder of the base model with --hf_model_path"
        )


def _of_base(name: str, shape: Shape, adapted: HfTensor | None) -> HfTensor:
    """Returns a tensor of the base model, with the adapters of its slabs."""
    whole = Region.whole(shape)
    if adapted is not None:
        _check_shape(name, shape, adapted)
    if adapted is None or not has_adapter(adapted):
        return HfTensor(name, shape, (Slab(0, name, whole),))
    if any(slab.change is not None for slab in adapted.slabs):
        raise UnsupportedError(
            f"tensor {name}: has an adapter, but HuggingFace and megatron store the tensor's values in different "
            "forms: save the checkpoint with the weights of the base model"
        )
    slabs = (
        replace(slab, mcore=name, region=whole.with_flat(slab.start, slab.start + slab.numel)) for slab in adapted.slabs
    )
    return replace(adapted, slabs=tuple(slabs))
