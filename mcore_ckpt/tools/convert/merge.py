"""Merges a checkpoint into the folder of a HuggingFace model, which appears only when it is complete.

Several processes can share the work; each writes some of the files. None of them executes Python files that come with
a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.model_facts import described
from mcore_ckpt.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CommitError,
    InvalidArgumentError,
    UnsupportedError,
)
from mcore_ckpt.formats.checkpoint_kind import Backend
from mcore_ckpt.formats.contract import CheckpointReader, TensorInfo, weights_of
from mcore_ckpt.formats.fsdp.adapters import saved_modules
from mcore_ckpt.formats.fsdp.reader import read_copied_model
from mcore_ckpt.formats.huggingface.adapter_folder import AdapterFolder
from mcore_ckpt.formats.huggingface.export_plan import MAX_SHARD_BYTES, ExportOptions, ExportPlan, UnknownTensorsError
from mcore_ckpt.formats.huggingface.fp8_blocks import Fp8Blocks
from mcore_ckpt.formats.huggingface.hub import find_folder, find_folder_together
from mcore_ckpt.formats.huggingface.kind import is_hf_folder
from mcore_ckpt.formats.huggingface.model_writer import AdapterWriter, ModelWriter
from mcore_ckpt.formats.huggingface.safetensors_files import read_folder
from mcore_ckpt.formats.huggingface.side_files import find_side_files, warn_of_missing_code
from mcore_ckpt.formats.huggingface.stored_weights import DequantizingReader
from mcore_ckpt.formats.huggingface.tokenizer_size import tokens_in
from mcore_ckpt.models.accounting import COPIES, IGNORED, LeftOut, account, matching, of_states, together
from mcore_ckpt.models.architecture import HfModel, read_config
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.reconcile import reconcile, with_tokens
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.models.stated_facts import IN_CONFIG, check_rows, other_facts
from mcore_ckpt.models.table import MCORE_EMBEDDING
from mcore_ckpt.ranks.rounds import Agreement, Alone
from mcore_ckpt.sharding.plan import PARAM
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.steps.new_folder import Replaceable, mode_as
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.tools.convert.destinations import NewFolder
from mcore_ckpt.tools.convert.merge_adapters import AdapterMerge, Adapters, adapter_settings, adapters_in, has_base
from mcore_ckpt.tools.convert.merge_plan import OpenCheckpoint, plan_model
from mcore_ckpt.tools.convert.walk import Writers, check_together, plan_together, write_together
from mcore_ckpt.tools.examine.compare import Weights
from mcore_ckpt.tools.examine.find import FoundCheckpoint, facts_of_checkpoint, find_checkpoint, open_reader
from mcore_ckpt.tools.examine.progress import Progress, no_progress


@dataclass(frozen=True)
class MergeRequest:
    """The arguments of a merge.

    Attributes:
        source: the folder of a role, of a step, or of all steps (to take the newest complete step).
        target: the folder to make; it may exist if it is empty.
        step: the step to take from a folder of all steps; None for the newest.
        role: the role to take from a step; None if the step has only one role.
        backend: "fsdp" for FSDP shards, "megatron" for every other kind of checkpoint.
        hf_model_path: the folder with the configuration and the tokenizer, or the name of a model on the hub with these
            files; None to use the checkpoint's own files.
        dtype: the dtype of floating tensors in the new files. None keeps the saved dtype; if only the optimizer's main
            parameters were saved, None means the dtype that `config.json` states.
        max_shard_bytes: the size limit of the tensors in one file, in bytes.
        allow_nan: True if weights may be NaN.
        tied: True if the output layer shares its weights with the embeddings; None to follow `config.json` and the
            tensors.
        value: True if the model has a value head; None to follow `config.json` and the tensors.
        ignore: regular expressions. A tensor of the checkpoint is left out if its whole name matches one of them.
        fp8_blocks: True to quantize linear layers to float8 with a scale for each block.
        adapters: how to write LoRA adapters. "merge": they are merged into the weights, or, if the checkpoint has only
            adapters, into the weights of the base model in `hf_model_path`. "beside": the weights are written as they
            are, and the adapters are written in PEFT's form into the folder `lora_adapter` in the target. "only": the
            adapters are written alone, in PEFT's form. None means "beside" for FSDP shards with weights, as in verl's
            merger, and "merge" for all other checkpoints.
        lora_alpha: the alpha of the adapters, whatever the checkpoint says; None for the checkpoint's own alpha.
        force: True to replace a HuggingFace model that is in `target`.
    """

    source: Path
    target: Path
    step: int | None = None
    role: str | None = None
    backend: Backend = "megatron"
    hf_model_path: str | Path | None = None
    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    allow_nan: bool = False
    tied: bool | None = None
    value: bool | None = None
    ignore: tuple[str, ...] = ()
    fp8_blocks: bool = False
    adapters: Adapters | None = None
    lora_alpha: float | None = None
    force: bool = False


@dataclass(frozen=True)
class MergeReport:
    """The report of a merge.

    Attributes:
        dtype: the dtype of most elements.
        files, nbytes: the number of weight files, and the size of all weights in bytes.
        has_mtp: True if the model has weights of multi-token prediction.
        adapters: how LoRA adapters were written: "merge", "beside" or "only"; None if the checkpoint has no adapters.
        left_out: everything that the checkpoint has and the new model lacks, by reason.
        other_model: the fields of `config.json` that make transformers compute differently from the trained model.
    """

    source: Path
    target: Path
    model: str
    dtype: torch.dtype
    files: int
    nbytes: int
    has_mtp: bool
    seconds: float = field(compare=False)
    adapters: Adapters | None = None
    left_out: tuple[LeftOut, ...] = ()
    other_model: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class MergeJob:
    """A planned merge.

    Attributes:
        where: the folder of the checkpoint.
        config_dir: the folder with the configuration and the tokenizer.
        model: the model that the checkpoint holds.
        plan: the weight files to write; the adapter's files if only the adapter is written.
        adapters, left_out, other_model: see `MergeReport`.
        adapter: the adapter's folder to write; None if the adapters are merged, or if there are none.
    """

    reader: CheckpointReader
    where: Path
    config_dir: Path
    model: HfModel
    plan: ExportPlan
    adapters: Adapters | None = None
    adapter: AdapterFolder | None = None
    left_out: tuple[LeftOut, ...] = ()
    other_model: tuple[str, ...] = ()

    def weights(self) -> Weights:
        """Returns the tensors of the model that the merge would write, for `compare`."""
        tensors = {tensor.name: tensor for file in self.plan.files for tensor in file.tensors}
        return Weights(self.where, self.reader, tensors)

    def model_writer(self, allow_nan: bool = False) -> ModelWriter:
        """Returns the writer of the model. A merge that writes only the adapter must not call this method."""
        return ModelWriter(self.plan, self.reader, allow_nan, self.model, self.config_dir)

    def writers(self, allow_nan: bool = False) -> Writers:
        """Returns the writers of the model, of the adapter, or of both, as `adapters` says."""
        if self.adapter is None:
            return [(".", self.model_writer(allow_nan))]
        adapter = AdapterWriter(self.adapter.plan, self.reader, allow_nan, self.adapter)
        if self.adapters == "only":
            return [(".", adapter)]
        return [(".", self.model_writer(allow_nan)), (file_names.MERGED_ADAPTER_DIR, adapter)]


def merge(request: MergeRequest, progress: Progress = no_progress, agreement: Agreement | None = None) -> MergeReport:
    """Merges a checkpoint into the folder of a HuggingFace model.

    A merge checks as much as it can before it writes a byte. The folder appears when all files in it are written and
    durable. Memory use does not grow with the size of the model.

    Args:
        request: the checkpoint, the new folder and the options.
        agreement: connects this rank with the other ranks that share the work; None for a single process.

    Returns the report, which is the same on all ranks except for `seconds`.

    Raises:
        InvalidArgumentError: the target has files and may not be replaced, or the request contradicts itself.
        CheckpointError: the checkpoint is damaged, is not what `config.json` describes, or has NaN, or the model cannot
            be written. All ranks raise it, and the target is as it was.

    Example:
        >>> merge(MergeRequest(Path("ckpt/global_steps_100/actor"), Path("model")))  # doctest: +SKIP
    """
    started = time.monotonic()
    agreement = agreement or Alone()
    destination = _Target(request.target.resolve(), Replaceable(request.force, "a HuggingFace model", is_hf_folder))
    target = destination.path
    check_together(agreement, destination)
    found = find(request)
    with reading([found.path]):  # keeps a running trainer from deleting the step
        try:
            job = _plan_together(agreement, request, found, target)
            write_together(agreement, job.writers(request.allow_nan), destination, mode_as(found.path), progress)
        except OSError as error:
            raise CommitError(f"merge into {target}: {error}") from error
    return MergeReport(
        source=job.where,
        target=target,
        model=job.model.describe(),
        dtype=job.plan.dtype,
        files=len(job.plan.files),
        nbytes=job.plan.nbytes,
        has_mtp=job.plan.has_mtp,
        seconds=time.monotonic() - started,
        adapters=job.adapters,
        left_out=job.left_out,
        other_model=job.other_model,
    )


class _Target(NewFolder):
    def publish(self) -> None:
        try:
            super().publish()
        except (InvalidArgumentError, OSError) as error:
            raise CommitError(
                f"{self.path}: could not be put in place: {error}. The target is as it was: empty it, or name another "
                "folder"
            ) from error


def _plan_together(agreement: Agreement, request: MergeRequest, found: FoundCheckpoint, target: Path) -> MergeJob:
    """Plans on all ranks. Before that, one rank of each node downloads a configuration that is on the hub."""
    if request.hf_model_path is not None:
        config_dir = find_folder_together(agreement, request.hf_model_path, "assets")
        request = replace(request, hf_model_path=config_dir)

    def plan() -> MergeJob:
        try:
            return _with_side_files(prepare(request, found, agreement.world_size), target)
        except UnknownTensorsError as error:
            raise CheckpointMismatchError(f"{error}, or leave out these tensors with --ignore") from error

    topic = f"merge into {target}"
    return plan_together(agreement, topic, plan, lambda job: {"source": str(job.where)}, "the files to write")


def _with_side_files(job: MergeJob, target: Path) -> MergeJob:
    """Extends the `left_out` of a job by the assets that are not copied."""
    if job.adapters == "only":
        return job
    quantized = job.model_writer().quantizes_as_before
    found = find_side_files(job.config_dir, destination=target, quantized=quantized)
    return replace(job, left_out=together(job.left_out, found.left_out))


def find(request: MergeRequest) -> FoundCheckpoint:
    """Finds the checkpoint to merge. Raises the same errors as `find_checkpoint`."""
    return find_checkpoint(request.source, request.backend, request.step, request.role)


def prepare(request: MergeRequest, found: FoundCheckpoint, ranks: int = 1) -> MergeJob:
    """Opens a checkpoint and plans the files to write: at least one for each of the `ranks` that share the work.

    Does not look at the target.

    Raises CheckpointError: the checkpoint is damaged, or is not what `config.json` describes.
    """
    named = request.hf_model_path
    config_dir = found.config_dir() if named is None else find_folder(named, "assets")
    config = read_config(config_dir)
    try:
        reader = open_reader(found, config)
        tensors, left_out = _weights_to_write(reader, request.ignore)
        read = read_copied_model if found.has_hf_names else model_from_config
        adapters = adapters_in(found, tensors)
        if request.adapters is not None and not adapters:
            raise CheckpointMismatchError(
                f"has no adapters, but --adapters is {request.adapters}: leave out --adapters"
            )
        model = _reconciled(read, config, _weights(found, config_dir, tensors), request)
        model = _with_vocabulary(model, found, config_dir, tensors)
        # Tensors with HuggingFace's names are copied whole, so the order of their rows need not be checked.
        compared = other_facts if found.has_hf_names else check_rows
        others = compared(facts_of_checkpoint(found, reader), model)
        other_model = tuple(described([each], live=IN_CONFIG) for each in others)
        warn_of_missing_code(config_dir, model.config)
        dtype = request.dtype
        # If main parameters are read, they are fp32, so take the model's dtype from the configuration.
        if dtype is None and reader.weight_kind == PARAM:
            dtype = _configured_dtype(model.config)
        options: ExportOptions = {
            "dtype": dtype,
            "max_shard_bytes": request.max_shard_bytes,
            "least_files": ranks,
            "blocks": Fp8Blocks.like(config) if request.fp8_blocks else None,
        }
        source = OpenCheckpoint(found, model, reader, tensors)
        if adapters:
            how = request.adapters or ("beside" if found.has_hf_names and has_base(found, tensors) else "merge")
            settings = adapter_settings(found, request.lora_alpha)
            adapted = AdapterMerge(source, how, settings, config_dir, options).plan()
            left_out = together(left_out, adapted.left_out)
            parts = (adapted.plan, how, adapted.adapter, left_out, other_model)
            return MergeJob(adapted.reader, found.path, config_dir, model, *parts)
        plan = plan_model(options, source)
    except (CheckpointMismatchError, UnsupportedError) as error:
        raise type(error)(f"{found.path}, read with {config_dir / 'config.json'}: {error}") from error
    left_out = together(left_out, plan.left_out)
    return MergeJob(reader, found.path, config_dir, model, plan, left_out=left_out, other_model=other_model)


def _weights(found: FoundCheckpoint, config_dir: Path, tensors: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """Returns the tensors that are not adapters. If there are none, returns the base model's, if the folder has it."""
    adapters = adapters_in(found, tensors)
    if has_base(found, tensors) or not adapters:
        return {name: info for name, info in tensors.items() if name not in adapters}
    try:
        return weights_of(DequantizingReader(config_dir, read_config(config_dir), read_folder(config_dir)))
    except CheckpointNotFoundError:
        return {}


def _weights_to_write(
    reader: CheckpointReader, ignore: Sequence[str]
) -> tuple[dict[str, TensorInfo], tuple[LeftOut, ...]]:
    """Returns the weights of a checkpoint to write, and the tensors that are left out, by reason."""
    weights = weights_of(reader)
    ignored, is_ignored = matching(IGNORED, ignore)
    assert callable(is_ignored)
    chosen = {name: info for name, info in weights.items() if not is_ignored(name)}

    def without_values(names: list[str]) -> CheckpointMismatchError:
        return CheckpointMismatchError(
            f"has no values of {names[0]} ({len(names)} such tensors): the checkpoint was saved without the model, and "
            "its optimizer has main parameters only of trained tensors: merge a checkpoint that has the model"
        )

    copies = [LeftOut(COPIES, names)] if (names := getattr(reader, "copies", ())) else []
    left_out = account(reader.names, chosen, [(ignored, is_ignored), of_states()], without_values)
    return chosen, together(left_out, copies)


def _reconciled(
    read: Callable[[HfConfig], HfModel], config: HfConfig, tensors: Mapping[str, TensorInfo], request: MergeRequest
) -> HfModel:
    """Describes the model, from its configuration, its tensors and the request, and checks that the three agree."""
    model = read(config)
    model = replace(model, ignored=(*model.ignored, *request.ignore))
    if not model.architecture.table.layer or not tensors:
        # Tensors of an architecture without a table are copied under their own names. Without a table, these names
        # cannot be checked. If there are only adapters, there are no tensors to compare.
        return model
    shapes = {name: info.shape for name, info in tensors.items()}
    if model.is_tied:
        # FSDP saves a tied tensor under the names of both modules. `fsdp_tensors` checks that both copies are equal, so
        # the head's copy is dropped here.
        shapes.pop(model.architecture.table.hf_head, None)
    return reconcile(model, shapes, request.tied, request.value)


def _with_vocabulary(
    model: HfModel, found: FoundCheckpoint, config_dir: Path, tensors: Mapping[str, TensorInfo]
) -> HfModel:
    """Returns the model with a row for each token of the tokenizers, even if `config.json` states fewer rows.

    Raises CheckpointMismatchError if the tokenizer that would be copied lacks tokens of the checkpoint's own tokenizer.
    """
    table = model.architecture.table
    trained = {name: tensor.shape for name, tensor in saved_modules(tensors).items()}
    shapes = {name: info.shape for name, info in tensors.items()} | trained
    embedding = table.hf_embedding if table.hf_embedding in shapes else found_as(table.mcore + MCORE_EMBEDDING, shapes)
    if embedding is None:
        return model
    own = max(tokens_in(folder) or 0 for folder in file_names.config_dirs(found.path))
    copied = tokens_in(config_dir) or 0
    grown = with_tokens(model, shapes[embedding][0], max(own, copied) or None)
    if grown is not model and 0 < copied < own:
        raise CheckpointMismatchError(
            f"the checkpoint's tokenizer has {own} tokens, but the tokenizer in --hf_model_path has {copied}, so the "
            "model would have rows without tokens: copy the checkpoint's tokenizer into the folder of "
            "--hf_model_path, or leave out --hf_model_path"
        )
    return grown


def _configured_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) else None
