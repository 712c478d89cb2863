"""Loads a HuggingFace model into a live sharded model. Each rank reads its own slices, or gets them from rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.config import TIMEOUT_S
from mcore_ckpt.errors import CheckpointError, InvalidArgumentError, reworded
from mcore_ckpt.field_checks import check_value
from mcore_ckpt.formats.huggingface.adapter_reader import is_adapter_folder, read_adapter_contents
from mcore_ckpt.formats.huggingface.hub import find_folder_together
from mcore_ckpt.formats.huggingface.hub_names import with_revision
from mcore_ckpt.formats.huggingface.reader import FolderContents, read_contents
from mcore_ckpt.io.disk_watch import DiskWatch
from mcore_ckpt.load.fill import TensorFill, fill_tensors
from mcore_ckpt.load.huggingface_plan import (
    HfPlan,
    LiveModel,
    OpenedFolder,
    Source,
    check_all_used,
    plan_weights,
    refuse_nan,
)
from mcore_ckpt.load.scatter import scatter
from mcore_ckpt.load.together import fill_together, plan_together
from mcore_ckpt.models.accounting import LeftOut
from mcore_ckpt.ranks.meeting import rendezvous
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.ranks.topology import read_replicas, read_topology
from mcore_ckpt.sharding.adapter_names import is_adapter
from mcore_ckpt.sharding.patterns import compiled
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.sharding.regions import Shape
from mcore_ckpt.sharding.towers import in_tower
from mcore_ckpt.state.main_weights import write_weights
from mcore_ckpt.state.megatron_versions import check_megatron
from mcore_ckpt.state.model import as_chunks, forget_caches, model_shards, own_layers, process_groups_of, whole_layers
from mcore_ckpt.state.optimizer import follow_model
from mcore_ckpt.state.quantized import has_quantized
from mcore_ckpt.state.thread_settings import gpu_of, settings_for_state, settings_here
from mcore_ckpt.state.unsupported import (
    refuse_missing_layers,
    refuse_quantized_without_mains,
    refuse_unsupported_experts,
    refuse_unsupported_model,
)
from mcore_ckpt.urls import local_path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HfLoadReport:
    """Report of one `load_hf` on this rank.

    Attributes:
        path: the folder that was read.
        model: a description of the model in the folder.
        tensors: the number of this rank's tensors that were filled.
        nbytes: the number of bytes that this rank read.
        seconds: the time from the call until all ranks have agreed on the result.
        left_out: the parts of the folder that were not read, by reason.
    """

    path: Path
    model: str
    tensors: int
    nbytes: int
    seconds: float
    left_out: tuple[LeftOut, ...] = ()


def load_hf(
    model: Any,
    path: str | Path,
    *,
    revision: str | None = None,
    source: Source = "shared",
    ignore: Sequence[str] = (),
    optimizer: Any = None,
    base: str | Path | None = None,
    strict_model: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> HfLoadReport:
    """Fills a live megatron-core model with the weights of a HuggingFace folder, or of a model on the HuggingFace hub.

    Every rank must call this function.

    Either initialize megatron's `parallel_state`, or build the model with a `pg_collection`, even in a single process.
    Without either, megatron does not build a GPTModel, and does not know which part of a tensor a rank holds.

    Each rank reads only the slices that it holds, under any layout, directly into its parameters. Rows that pad the
    vocabulary become zero. Weights of another floating-point dtype and quantized weights are converted through a
    limited amount of memory. transformer-engine's `_extra_state` keeps its value.

    In a model with LoRA adapters (Megatron-Bridge's LoRA, CanonicalLoRA, DoRA), the folder of a model fills everything
    except the adapters, which keep their values. The folder of an adapter in PEFT's form (`adapter_config.json`,
    `adapter_model.safetensors`) fills the adapters. If the folder also has modules whose own weights were trained,
    these modules are filled, too.

    Before a byte changes, all ranks check names and shapes and agree on the result. Each rank looks for NaN only after
    it has filled its tensors, because otherwise it would have to read every file twice.

    After the load, the optimizer's main parameters are still copies of the old weights. The optimizer's next step would
    overwrite the new weights with these values. To keep the new weights, pass the optimizer here, or call its
    `reload_model_params()` afterwards. If the model has quantized weights (FP8), pass the optimizer here: otherwise the
    main parameters of these weights do not get the values of the folder.

    Args:
        model: a megatron-core model or the list of its virtual chunks, bare or wrapped in DistributedDataParallel.
        path: the folder, which has `config.json` and one or several `.safetensors` files; or the folder of an adapter.
            If there is no folder at this path, `path` is the name of a model on the HuggingFace hub ("owner/name" or
            "owner/name@revision"). One rank of each node downloads the files that are not in the cache.
        revision: the revision of a model on the hub: a branch, a tag or a commit. None: the main branch.
        source: "shared": every rank reads the folder. "rank0": only rank 0 reads the folder, and sends each rank its
            part in messages of limited size. If several replicas need the same part, one replica gets the part and
            broadcasts it to the other replicas. If the model is on the hub, only rank 0 downloads it.
        ignore: regular expressions for the names of tensors that may have no counterpart: HuggingFace's names, or
            megatron's global names. HuggingFace tensors with such a name are not read, and the model's tensors with
            such a name keep their values. To start a critic from a language model, pass `("lm_head.weight",
            "output_layer.weight")`.
        optimizer: the object that `get_megatron_optimizer` returned. Its main parameters are copied from the loaded
            model.
        base: the folder with the `config.json` of an adapter's base model, or the base model's name on the hub. None:
            the base model that `adapter_config.json` names. Not needed for the folder of a model.
        strict_model: whether rotary base and scaling (such as YaRN) must also be as in `config.json`. A longer context
            changes them on purpose, so without `strict_model` a difference only gives a warning. Other differences are
            always refused.
        timeout_s: how long this rank waits for other ranks before it gives up, in seconds. For another rank's download,
            this rank waits DOWNLOAD_TIMEOUT_S.

    Returns:
        The report of this rank.

    Raises:
        CheckpointNotFoundError: the folder does not exist or has no weights; or the model is not on the hub; or there
            is no connection to the hub, and the model is not in the cache.
        RemoteError: the hub does not answer, refuses access, or answers with an error.
        CheckpointMismatchError: the folder's tensors or configuration do not fit this model. All ranks raise it, and
            nothing has changed.
        UnsupportedError: the architecture is not supported, the weights are quantized in an unknown form, the model has
            a part that is not supported, or there is no process group.
        InvalidStateError: there is a process group, but the model has no `pg_collection`, and megatron's
            `parallel_state` is not initialized.
        CheckpointCorruptError: a file is incomplete or cannot be read, or a weight is NaN. The message says whether the
            model has changed.

    Example:
        >>> load_hf(model, "Qwen/Qwen3-8B", optimizer=optimizer)  # doctest: +SKIP
    """
    started = time.monotonic()
    check_value("timeout_s", timeout_s, float, {"above": 0})
    topic = f"checking {path}"
    with closing(rendezvous("load_hf", timeout_s, f"loading {path}")) as agreement, agreement.call(topic):
        check_value("strict_model", strict_model, bool)
        compiled(ignore)
        if base is not None:
            local_path(base, "base")
        local_path(path, "path")
        here = replace(_here(model, optimizer, agreement), strict_model=strict_model)
        name = with_revision(path, revision)
        gpu = gpu_of(here.chunks)
        settings = partial(settings_here, gpu, timeout_s)
        agreement.runner = DiskWatch.of_one_call(timeout_s, agreement.rank, settings)
        with settings_for_state(gpu, timeout_s):
            path = find_folder_together(agreement, name, "model", everywhere=source != "rank0")
            # Nodes may have downloaded a model of the hub into different folders, so compare the model's name instead.
            same = str(path.absolute()) if path == Path(name) else name
            arguments = {
                "path": None if source == "rank0" else same,
                "source": source,
                "ignore": list(ignore),
                "base": None if base is None else str(base),
                "strict_model": strict_model,
            }
            base = None if base is None else find_folder_together(agreement, base, "config", everywhere=False)
            opened = _open_together(here, path, arguments, base)
            plan = _plan_together(here, opened, source, ignore, topic)
            nbytes = _apply_together(here, plan, source)
            if optimizer is not None:
                follow_model(optimizer)
                if has_quantized(here.chunks):
                    write_weights(here.chunks, optimizer)
            seconds = time.monotonic() - started
            model_read, left_out = plan.reader.model.describe(), plan.reader.left_out
            return HfLoadReport(path, model_read, len(plan.requests), nbytes, seconds, left_out)


def _here(model: Any, optimizer: Any, agreement: Agreement) -> LiveModel:
    chunks = as_chunks(model)
    check_megatron()
    groups = process_groups_of(chunks)
    coordinates, topology = read_topology(groups, len(chunks))
    replicas = read_replicas(groups)
    refuse_unsupported_model(chunks, replicas.groups)
    if optimizer is not None:
        refuse_quantized_without_mains(optimizer, chunks)
    shards = tuple(model_shards(chunks))
    refuse_unsupported_experts(topology, shards)
    return LiveModel(chunks, optimizer, shards, coordinates, topology, replicas, agreement)


def _open_together(here: LiveModel, path: Path, arguments: Record, base: Path | None) -> OpenedFolder:
    """Reads the folder's headers on rank 0 and sends them to all ranks, so that only rank 0 opens every file.

    The `arguments` of load_hf must be the same on all ranks.
    """

    def work() -> Record:
        if arguments["source"] not in ("shared", "rank0"):
            raise InvalidArgumentError(f"source is {arguments['source']!r}: use 'shared' or 'rank0'")
        own = own_layers(here.shards, here.coordinates)
        return {"arguments": arguments, "float32": _keeps_float32(here), "adapters": _own_adapters(here), **own}

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere([record["arguments"] for record in records], "the arguments of load_hf")
        layers = whole_layers(records)
        refuse_missing_layers(here.chunks, layers)
        adapters = dict(item for record in records for item in record["adapters"])
        is_adapter_alone = is_adapter_folder(path)
        contents = read_adapter_contents(path, base) if is_adapter_alone else read_contents(path)
        return {
            **contents.to_record(),
            "layers": list(layers.items()),
            "adapters": list(adapters.items()),
            "float32": any(record["float32"] for record in records),
            "tower": [name for record in records for name in record["others"] if in_tower(name)],
        }

    record = decide(here.agreement, f"opening {path}", work, combine)
    adapters = {name: tuple(shape) for name, shape in record["adapters"]}
    dtype = torch.float32 if record["float32"] else None
    contents, tower = FolderContents.from_record(path, record), tuple(record["tower"])
    return OpenedFolder(contents, whole_layers([record]), adapters, dtype, tower)


def _keeps_float32(here: LiveModel) -> bool:
    """Returns True if this rank keeps float32 values: in float32 weights, or in quantized weights' main parameters."""
    dtypes = {parameter.dtype for chunk in here.chunks for parameter in chunk.parameters()}
    return has_quantized(here.chunks) or dtypes == {torch.float32}


def _own_adapters(here: LiveModel) -> list[tuple[str, Shape]]:
    """Returns names and global shapes of the adapter tensors of which this rank is the first replica."""
    apart, rank = here.topology.experts_apart, here.agreement.rank
    return [
        (shard.key.name, shard.region.global_shape)
        for shard in here.shards
        if is_adapter(shard.key.name)
        and shard.key.kind == MODEL
        and rank == (here.replicas.experts if apart and shard.expert else here.replicas.dense)[0]
    ]


def _plan_together(here: LiveModel, opened: OpenedFolder, source: Source, ignore: Sequence[str], topic: str) -> HfPlan:
    def check(own: HfPlan, reports: Sequence[Record]) -> Record:
        check_all_used(own, [report["used"] for report in reports])
        own.reader.check_left_out()
        return {}

    return plan_together(here.agreement, topic, lambda: plan_weights(here, opened, source, ignore), check)[0]


def _apply_together(here: LiveModel, plan: HfPlan, source: Source) -> int:
    def fill(fills: Sequence[TensorFill]) -> int:
        if source == "shared":
            return fill_tensors(fills, plan.reader.read)
        own = {id(fill) for fill in fills}
        requests = [request for request in plan.requests if id(request.fill) in own]
        return scatter(plan.reader, requests, here.agreement.rank, here.agreement.world_size)

    def look() -> Record:
        refuse_nan(plan)
        return {}

    topic = f"loading {plan.reader.place}"
    try:
        nbytes = fill_together(here.agreement, here.replicas, topic, plan.fills, fill)
        forget_caches(here.chunks)
        decide(here.agreement, topic, look, lambda _: {})
    except CheckpointError as error:
        raise reworded(error, f"{error}. The model is now undefined: load it again before using it") from error
    return nbytes
