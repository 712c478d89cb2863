"""From a committed checkpoint to the folder of a HuggingFace model, entirely there or not there.

Several processes share the work, each writing some of the files. None of them runs code that a model brings along.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.errors import CheckpointMismatchError, CommitError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.formats.contract import CheckpointReader, TensorInfo, weights_of
from mcore_ckpt.formats.fsdp.reader import fsdp_tensors, read_copied_model
from mcore_ckpt.formats.huggingface.assets import check_code, copy_assets, write_config
from mcore_ckpt.formats.huggingface.export_plan import MAX_SHARD_BYTES, ExportPlan, plan_export, plan_tensors
from mcore_ckpt.formats.huggingface.writer import write_index, write_weights
from mcore_ckpt.io.files import sync_dir
from mcore_ckpt.models.architecture import HfModel, read_config
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.mapping import HF_LAYER, HfTensor
from mcore_ckpt.models.reconcile import reconcile
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.models.table import HF_HEAD
from mcore_ckpt.ranks.meeting import rendezvous_at
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.sharding.placement import share_of
from mcore_ckpt.sharding.plan import PARAM
from mcore_ckpt.steps import commit, leftovers
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.tools.find import Backend, FoundCheckpoint, find_checkpoint, open_reader

Progress = Callable[[int, int], None]

# A rank may have one file more to write than another, on a slow disk. One that dies is torchrun's to notice.
_WAIT_S = 1800.0


@dataclass(frozen=True)
class MergeRequest:
    """What to merge, and into what.

    Attributes:
        source: the folder of a role, of a step, or of the steps (the newest complete one).
        target: the folder to make; it may be there if it is empty.
        step: which one, below a folder of steps.
        role: which one, where there are several.
        backend: what wrote the checkpoint: "fsdp" are FSDP shards, "megatron" everything else.
        hf_model_path: the folder that configuration and tokenizer come from; None: the checkpoint's own.
        dtype: of floating tensors; None: as they were saved or, of a checkpoint without the model's own weights, what
            `config.json` says.
        max_shard_bytes: of a file's tensors.
        allow_nan: whether weights may be NaN.
        tied, value: what the user says of embeddings and head; None: what configuration and data say.
        ignore: regular expressions of the checkpoint's tensors to leave out.
    """

    source: Path
    target: Path
    step: int | None = None
    role: str | None = None
    backend: Backend = "megatron"
    hf_model_path: Path | None = None
    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    allow_nan: bool = False
    tied: bool | None = None
    value: bool | None = None
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class MergeReport:
    """What was made. `nbytes` is that of all weights, `dtype` that of most."""

    source: Path
    target: Path
    model: str
    dtype: torch.dtype
    files: int
    nbytes: int
    has_mtp: bool
    seconds: float = field(compare=False)


@dataclass(frozen=True, eq=False)
class MergeJob:
    """All that is known before a byte is written."""

    reader: CheckpointReader
    where: Path
    config_dir: Path
    model: HfModel
    plan: ExportPlan

    def described(self) -> Record:
        """What must be the same on all ranks: each writes some of the files."""
        return {"source": str(self.where), "files": [[file.name, file.nbytes] for file in self.plan.files]}


def merge(
    request: MergeRequest, progress: Progress = lambda done, total: None, agreement: Agreement | None = None
) -> MergeReport:
    """Makes a HuggingFace model's folder out of a checkpoint.

    All that can be known is checked before a byte is written; the folder is put in place when all of it is written and
    durable. Takes bounded memory, whatever the size of the model.

    Args:
        request: what to do.
        progress: told of bytes that this rank has written, and of how many it has to.
        agreement: this rank's seat, if several ranks share the work.

    Raises:
        InvalidArgumentError: the target is not empty, or the request contradicts itself.
        CheckpointError: the checkpoint is damaged, is not what `config.json` describes, has NaN, or cannot be
            written; on all ranks. Nothing has come.

    Example:
        >>> merge(MergeRequest(Path("ckpt/global_steps_100/actor"), Path("model")))  # doctest: +SKIP
    """
    started = time.monotonic()
    target = request.target.resolve()
    # Empty or not there: a model that is there may be somebody's, or what is read.
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise InvalidArgumentError(f"{target} is there already, and not empty: name another folder, or remove it")
    found = find(request)
    with reading([found.path]):  # beside a trainer, whose retention would take it away
        return _merge(request, found, target, progress, agreement, started)


def _merge(
    request: MergeRequest,
    found: FoundCheckpoint,
    target: Path,
    progress: Progress,
    agreement: Agreement | None,
    started: float,
) -> MergeReport:
    ranks = agreement.world_size if agreement is not None else 1
    attempt, job = _open(agreement, request, found, target, ranks)
    staging = file_names.staging_dir(target, attempt)
    numbers = share_of([file.nbytes for file in job.plan.files], agreement.rank if agreement is not None else 0, ranks)
    total = sum(job.plan.files[number].nbytes for number in numbers)
    done = [0]

    def wrote(nbytes: int) -> None:
        done[0] = min(total, done[0] + nbytes)
        progress(done[0], total)

    def work() -> Record:
        if not staging.is_dir():
            raise CommitError(f"{staging}, made by rank 0, cannot be seen: all ranks must write to one file system")
        files = write_weights(job.plan, numbers, job.reader, staging, wrote, allow_nan=request.allow_nan)
        return {"files": [[file.path, file.kind, file.size, file.crc32] for file in files]}

    def combine(records: Sequence[Record]) -> Record:
        commit.check_files(
            staging, ((rank, WrittenFile(*file)) for rank, record in enumerate(records) for file in record["files"])
        )
        write_index(job.plan, staging)
        copy_assets(job.config_dir, staging)
        write_config(staging, job.model, job.plan.dtype, job.plan.has_mtp)
        sync_dir(staging)
        return {}

    try:
        _decide(agreement, f"merge into {target}", work, combine, lambda: _publish(staging, target))
    except BaseException:
        # After the rename there is no such folder any more.
        if agreement is None or agreement.is_coordinator:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    return MergeReport(
        source=job.where,
        target=target,
        model=job.model.describe(),
        dtype=job.plan.dtype,
        files=len(job.plan.files),
        nbytes=job.plan.nbytes,
        has_mtp=job.plan.has_mtp,
        seconds=time.monotonic() - started,
    )


def _open(
    agreement: Agreement | None, request: MergeRequest, found: FoundCheckpoint, target: Path, ranks: int
) -> tuple[str, MergeJob]:
    """Plans, and makes the staging folder once all ranks have the same plan."""
    jobs: list[MergeJob] = []
    attempt = commit.new_attempt()

    def work() -> Record:
        jobs.append(prepare(request, found, ranks))
        return jobs[0].described()

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere(records, "the files to write", CommitError)
        _check_space(target, jobs[0].plan.nbytes)
        leftovers.remove_leftovers_beside(target)
        commit.open_staging(target, attempt)
        return {"attempt": attempt}

    try:
        outcome = _decide(agreement, f"merge into {target}", work, combine)
    except BaseException:
        shutil.rmtree(file_names.staging_dir(target, attempt), ignore_errors=True)
        raise
    return outcome["attempt"], jobs[0]


def _decide(
    agreement: Agreement | None,
    topic: str,
    work: Callable[[], Record],
    combine: Callable[[Sequence[Record]], Record],
    act: Callable[[], None] = lambda: None,
) -> Record:
    if agreement is not None:
        return decide(agreement, topic, work, combine, CommitError, act)
    try:
        record = combine([work()])
        act()
    except OSError as error:
        raise CommitError(f"{topic}: {error}") from error
    return record


def ranks_of_torchrun() -> Agreement | None:
    """This process's seat among those that torchrun has started; None if it is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from torch.distributed.rendezvous import rendezvous

    # What is waited for is what this package's rounds wait for: no process group is needed.
    store, rank, world_size = next(rendezvous("env://"))
    return rendezvous_at(store, rank, world_size, "mcore_ckpt/merge", _WAIT_S, "merge")


# -- what is there -----------------------------------------------------------------------------------------


def find(request: MergeRequest) -> FoundCheckpoint:
    """The checkpoint to merge. Raises as `find_checkpoint`."""
    return find_checkpoint(request.source, request.backend, request.step, request.role)


def prepare(request: MergeRequest, found: FoundCheckpoint, ranks: int = 1) -> MergeJob:
    """Opens a checkpoint and plans its files; the target is not looked at.

    Raises:
        CheckpointError: it is damaged, or not what `config.json` describes.
    """
    config_dir = request.hf_model_path or found.config_dir()
    config = read_config(config_dir)
    try:
        reader = open_reader(found, config)
        tensors = _without(request.ignore, weights_of(reader))
        read = read_copied_model if found.has_hf_names else model_from_config
        model = _settled(read, config, tensors, request)
        check_code(config_dir, model.config)
        dtype = request.dtype
        # Main parameters are finer than the model's weights.
        if dtype is None and reader.weight_kind == PARAM:
            dtype = _said_dtype(model.config)
        plan = _plan(found, model, reader, tensors, dtype, request.max_shard_bytes, ranks)
    except (CheckpointMismatchError, UnsupportedError) as error:
        raise type(error)(f"{found.path}: with {config_dir / 'config.json'}: {error}") from error
    return MergeJob(reader, found.path, config_dir, model, plan)


def _without(patterns: Sequence[str], tensors: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    left_out = [re.compile(pattern) for pattern in patterns]
    return {name: info for name, info in tensors.items() if not any(p.fullmatch(name) for p in left_out)}


def _plan(
    found: FoundCheckpoint,
    model: HfModel,
    reader: CheckpointReader,
    tensors: Mapping[str, TensorInfo],
    dtype: torch.dtype | None,
    most: int,
    ranks: int,
) -> ExportPlan:
    if not found.has_hf_names:
        return plan_export(model, tensors, dtype=dtype, max_shard_bytes=most, least_files=ranks)
    copied = fsdp_tensors(reader, model)
    return plan_tensors(
        copied, tensors, dtype=dtype, max_shard_bytes=most, least_files=ranks, has_mtp=_has_mtp(model, copied)
    )


def _has_mtp(model: HfModel, tensors: Sequence[HfTensor]) -> bool:
    first = HF_LAYER.format(layer=len(model.layers))
    return any(tensor.name.startswith(first) for tensor in tensors)


def _settled(
    read: Callable[[HfConfig], HfModel], config: HfConfig, tensors: Mapping[str, TensorInfo], request: MergeRequest
) -> HfModel:
    """What config, data and the user agree on."""
    model = read(config)
    model = replace(model, ignored=(*model.ignored, *request.ignore))
    if not model.architecture.table.layer:
        # No table: names that may mean anything. What is copied as it is needs none.
        return model
    shapes = {name: info.shape for name, info in tensors.items()}
    if model.is_tied:
        # FSDP's names are those of modules: one tensor has two. Whether it is one is looked at by `fsdp_tensors`.
        shapes.pop(HF_HEAD, None)
    return reconcile(model, shapes, request.tied, request.value)


def _said_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) else None


# -- all or nothing ----------------------------------------------------------------------------------------


def _check_space(target: Path, nbytes: int) -> None:
    there = next(folder for folder in target.parents if folder.exists())
    free = shutil.disk_usage(there).free
    if free < nbytes:
        raise CommitError(f"{target}: the model takes {nbytes} bytes, and {free} are free there")


def _publish(staging: Path, target: Path) -> None:
    try:
        # Over an empty folder, too; one that is no longer empty stays.
        os.rename(staging, target)
    except OSError as error:
        raise CommitError(f"{target}: could not be put in place: {error}") from error
    sync_dir(target.parent)
    # Only now: until then another run must be able to see whether this one lives.
    (target / file_names.OWNER_FILE).unlink(missing_ok=True)
