"""Plans the folders that other trainers resume from.

| trainer | versions | the step's folder | what is in this folder |
|---|---|---|---|
| Megatron-LM | core_r0.16 to core_r0.19 | `iter_0000100` | one torch_dist folder |
| Megatron-Bridge | 0.6.2 | `iter_0000100` | one torch_dist folder, and `run_config.yaml` |
| verl | 0.9.1 | `global_step_100/actor` | `model/huggingface`, `optimizer/dist_ckpt`, `extra/dist_ckpt` |
| verl-0.8 | 0.7.1, 0.8.0 | `global_step_100/actor` | `huggingface`; `dist_ckpt`, which has the weights, too |
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointNotFoundError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.formats.companions import companions_of
from mcore_ckpt.formats.contract import CheckpointWriter
from mcore_ckpt.formats.huggingface.export_plan import ExportPlan, FileTensor
from mcore_ckpt.formats.kinds import NATIVE
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.torch_dist.contents import Contents
from mcore_ckpt.formats.torch_dist.writer import TorchDistWriter
from mcore_ckpt.models.architecture import HfModel, read_config
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.models.stated_facts import check_rows
from mcore_ckpt.models.table import MCORE_HEAD
from mcore_ckpt.sharding.adapter_names import is_adapter
from mcore_ckpt.sharding.names import is_expert
from mcore_ckpt.sharding.plan import MODEL, PARAM, ShardKey
from mcore_ckpt.tools.convert.for_trainers.other_files import OtherFiles
from mcore_ckpt.tools.convert.for_trainers.random_states import rng_objects
from mcore_ckpt.tools.convert.for_trainers.shared_state import (
    CONTENT_METADATA,
    COUNTERS,
    LOOP,
    SharedState,
    left_out,
    megatron_state,
    parts_left_out,
    read_loop_state,
    read_shared_state,
)
from mcore_ckpt.tools.convert.for_trainers.tensors import plan_tensors, read_slice
from mcore_ckpt.tools.convert.merge import MergeJob, MergeRequest, prepare
from mcore_ckpt.tools.convert.walk import Writers
from mcore_ckpt.tools.examine.find import FoundCheckpoint, facts_of_checkpoint
from mcore_ckpt.tools.examine.select import Selection

Layout = Literal["megatron", "bridge", "verl", "verl-0.8"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything to write for one trainer.

    Attributes:
        folder: the name of the step's folder.
        writers: the writers, each with its folder relative to the step's folder.
        own_tracker: the name and the bytes of a tracker that only this trainer uses; None if the trainer has no such
            tracker.
        notes: sentences that tell people what the other trainer does not get, and what to do about it.
    """

    step: int
    folder: str
    writers: Writers
    own_tracker: tuple[str, bytes] | None = None
    notes: tuple[str, ...] = ()

    @property
    def trackers(self) -> dict[str, bytes]:
        """The bytes of each tracker, by file name. Trackers are next to the step's folder."""
        own = () if self.own_tracker is None else (self.own_tracker,)
        return dict((*own, (file_names.TRACKER_FILE, str(self.step).encode())))


@dataclass(frozen=True, eq=False)
class Role:
    """A role to convert: the role's folder, and a reader of the checkpoint in that folder."""

    path: Path
    reader: NativeReader


def plan_for(layout: Layout, selection: Selection, roles: Sequence[Role], hf_model_path: Path | None) -> Plan:
    """Plans the files for the trainer that will go on. `roles` are the roles of the step that have a model.

    Raises:
        InvalidArgumentError: the trainer can load only one role, but there are several.
        CheckpointError: the checkpoint is damaged, or has something that the trainer cannot load.
    """
    for role in roles:
        # The trainers store adapters in forms that nothing here writes: Megatron-Bridge has other rows and alphas.
        if any(is_adapter(name) for name in role.reader.names):
            raise UnsupportedError(
                f"{role.path}: has adapters, which this conversion does not support: take the weights with mcore-ckpt "
                "merge, and the adapters with mcore-ckpt merge --adapters only"
            )
    if layout == "megatron":
        return _for_megatron(selection, roles, hf_model_path)
    if layout == "bridge":
        return _for_bridge(selection, roles, hf_model_path)
    return _for_verl(layout, selection, roles, hf_model_path)


# -- Megatron-LM ----------------------------------------------------------------------------------------------


def _for_megatron(
    selection: Selection,
    roles: Sequence[Role],
    hf_model_path: Path | None,
    rng_of: Callable[[NativeReader], dict[str, bytes]] = rng_objects,
    without_rng: str = "--no-load-rng",
) -> Plan:
    if len(roles) != 1:
        names = ", ".join(role.reader.manifest.role for role in roles)
        raise InvalidArgumentError(
            f"{roles[0].path.parent}: has the roles {names}, but Megatron-LM and Megatron-Bridge train only one "
            "role: name the folder of that role"
        )
    reader = roles[0].reader
    tensors, shared, rng = plan_tensors(reader), read_shared_state(reader), rng_of(reader)
    loop = megatron_state(reader, partial(_model, roles[0], hf_model_path), has_rng=bool(rng))
    common = {**loop, **_common_of(shared, "opt_param_scheduler")}
    contents = Contents.of([*tensors.model, *tensors.optimizer], {**tensors.states, **rng}, common)
    return Plan(
        selection.step,
        file_names.megatron_dir(Path(), selection.step).name,
        [(".", _torch_dist(reader, contents))],
        notes=_notes(reader, [LOOP], bool(rng), without_rng, shared),
    )


def _common_of(shared: SharedState, scheduler: str) -> dict[str, Any]:
    """Returns the part of `common.pt` that all trainers read. `scheduler` is the key of the LR scheduler."""
    found = {"content_metadata": dict(CONTENT_METADATA), "optimizer": shared.optimizer, scheduler: shared.scheduler}
    return {key: value for key, value in found.items() if value is not None}


def _torch_dist(reader: NativeReader, contents: Contents) -> TorchDistWriter:
    contents.describe()  # raises an error if the contents cannot be described
    return TorchDistWriter(contents, partial(read_slice, reader), reader.place)


def _model(role: Role, hf_model_path: Path | None) -> HfModel | None:
    """Returns the model that config.json describes; None if there is no config.json.

    Raises CheckpointError if config.json describes another model than the checkpoint's.
    """
    found = FoundCheckpoint(role.path, NATIVE.name)
    try:
        model = model_from_config(read_config(hf_model_path or found.config_dir()))
    except CheckpointNotFoundError:
        if hf_model_path is not None:
            raise
        return None
    check_rows(facts_of_checkpoint(found, role.reader), model)
    return model


# -- Megatron-Bridge ------------------------------------------------------------------------------------------


def _for_bridge(selection: Selection, roles: Sequence[Role], hf_model_path: Path | None) -> Plan:
    """Plans a step that Bridge loads like a step of Megatron-LM (`load_checkpoint`): without `train_state.pt`."""
    rng_of = partial(rng_objects, of_each_replica=roles[0].reader.manifest.topology.ep > 1)
    plan = _for_megatron(selection, roles, hf_model_path, rng_of, "checkpoint.load_rng=False")
    texts = OtherFiles(roles[0].path, texts=_run_config(roles[0].reader))
    tracker = _bridge_tracker(roles[0].reader, plan.step)
    return replace(plan, writers=[*plan.writers, (".", texts)], own_tracker=tracker)


def _bridge_tracker(reader: NativeReader, step: int) -> tuple[str, bytes]:
    """Returns Bridge's tracker, a `TrainState.state_dict` (0.6.2).

    Bridge prefers this tracker to Megatron-LM's, so an older tracker of Bridge would hide the converted step. For
    iteration 0, which all steps of NeMo-RL have, Bridge accepts only this tracker.
    """
    loop = read_loop_state(reader)
    counted = {name: torch.tensor(int(loop.get(name, 0))) for name in COUNTERS}
    operations = torch.tensor(float(loop.get("num_floating_point_operations_so_far", 0)), dtype=torch.float64)
    flags = {name: torch.tensor(False) for name in ("do_train", "do_valid", "do_test")}  # Bridge's loop sets them
    buffer = io.BytesIO()
    torch.save({"step": torch.tensor(step), **counted, "floating_point_operations_so_far": operations, **flags}, buffer)
    return "latest_train_state.pt", buffer.getvalue()


def _run_config(reader: NativeReader) -> dict[str, str]:
    """Returns Bridge's saved configuration; empty if there is none, or if it has other sizes than the checkpoint."""
    loop, sizes = read_loop_state(reader), reader.manifest.topology
    text, layout = loop.get("run_config"), loop.get("layout")
    # Leave out the configuration after a reshard, because it has the old sizes. Bridge then takes the sizes from the
    # saved arguments.
    fits = isinstance(layout, Mapping) and (layout.get("tp"), layout.get("pp")) == (sizes.tp, sizes.pp)
    return {"run_config.yaml": text} if isinstance(text, str) and fits else {}


# -- verl -----------------------------------------------------------------------------------------------------


def _for_verl(layout: Layout, selection: Selection, roles: Sequence[Role], hf_model_path: Path | None) -> Plan:
    trees_of, weights = (
        (_trees_of_verl, "model/huggingface") if layout == "verl" else (_tree_of_verl_0_8, "huggingface")
    )
    trees: list[tuple[str, CheckpointWriter]] = []
    exports: list[tuple[str, CheckpointWriter]] = []
    notes: list[str] = []
    # In steps of verl's SFT trainer, the step's folder is the folder of its only role, so the files get no role's name.
    is_step = file_names.parse_step(roles[0].path.name) is not None
    for role in roles:
        prefix = "" if is_step else f"{role.reader.manifest.role}/"
        rng = rng_objects(role.reader)
        shared = read_shared_state(role.reader)
        trees += trees_of(role.reader, prefix, shared, rng)
        notes += _notes(role.reader, [], bool(rng), "load_contents without extra", shared)
        # For verl 0.9.1, write the weights only as a HuggingFace model, because verl cannot load a model and a
        # `fully_reshardable` optimizer together from dist_ckpt: `dist_checkpointing.load` changes the dict of the
        # model, and then `sharded_param_state_fully_reshardable` looks for the parameters in the changed dict.
        job = _export(role, hf_model_path)
        exports += ((f"{prefix}{weights}", writer) for _, writer in job.writers())
        notes += (
            f"{prefix}{weights}: transformers computes something else than the trained model: {each}"
            for each in job.other_model
        )
    step_path = roles[0].path if is_step else roles[0].path.parent
    copies = list(_files_of_verl(step_path))
    if not any(name.startswith("data") for name in copies):
        notes.append(f"{step_path}: has no data*.pt of verl's trainer, so the data begins anew")
    folder = f"global_step_{selection.step}"
    writers = [*trees, *exports, (".", OtherFiles(step_path, copies))]
    return Plan(selection.step, folder, writers, notes=tuple(notes))


def _trees_of_verl(reader: NativeReader, prefix: str, shared: SharedState, rng: Mapping[str, bytes]) -> Writers:
    """Returns the `dist_ckpt` folders of verl 0.9.1, without weights (`MegatronCheckpointManager.save_checkpoint`)."""
    trees: list[tuple[str, CheckpointWriter]] = []
    if shared.optimizer is not None:
        contents = Contents.of(plan_tensors(reader).optimizer, {}, _common_of(shared, "lr_scheduler"))
        trees.append((f"{prefix}optimizer/dist_ckpt", _torch_dist(reader, contents)))
    if rng:
        contents = Contents.of([], rng, {"content_metadata": dict(CONTENT_METADATA)})
        trees.append((f"{prefix}extra/dist_ckpt", _torch_dist(reader, contents)))
    return trees


def _tree_of_verl_0_8(reader: NativeReader, prefix: str, shared: SharedState, rng: Mapping[str, bytes]) -> Writers:
    """Returns the `dist_ckpt` folder of verl 0.7.1 and 0.8.0 (`MegatronCheckpointManager.save_checkpoint`).

    Workers and engines with a bridge load the weights from the HuggingFace folder, except critics with mbridge. These
    critics, and all workers and engines without a bridge, load the weights from `dist_ckpt`.
    """
    tensors, common = plan_tensors(reader), _common_of(shared, "lr_scheduler")
    contents = Contents.of([*tensors.model, *tensors.optimizer], {**tensors.states, **rng}, common)
    return [(f"{prefix}dist_ckpt", _torch_dist(reader, contents))]


def _export(role: Role, hf_model_path: Path | None) -> MergeJob:
    """Plans the HuggingFace weights. Raises CheckpointError if the architecture is not known."""
    head = role.reader.info(ShardKey(MCORE_HEAD, MODEL))
    # A critic's config.json describes a language model and not the value head, so state the value head.
    value = True if head is not None and head.shape[0] == 1 else None
    request = MergeRequest(role.path, role.path, hf_model_path=hf_model_path, value=value)
    job = prepare(request, FoundCheckpoint(role.path, NATIVE.name))
    return replace(job, plan=_with_head_of_verl(job.plan)) if value else job


def _with_head_of_verl(plan: ExportPlan) -> ExportPlan:
    """Returns the plan, with a critic's value head under the name that mbridge (0.15) uses."""

    def renamed(tensor: FileTensor) -> FileTensor:
        is_head = tensor.name == "score.weight"
        return replace(tensor, tensor=replace(tensor.tensor, name="lm_head.weight")) if is_head else tensor

    files = (replace(file, tensors=tuple(map(renamed, file.tensors))) for file in plan.files)
    return replace(plan, files=tuple(files))


def _files_of_verl(step_path: Path) -> Iterator[str]:
    """Yields the relative paths of the files that verl's trainers keep next to the roles (data.pt, transfer_queue/)."""
    for path in companions_of(step_path).values():
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                yield str(file.relative_to(step_path))


# -- what the other trainer does not get ----------------------------------------------------------------------


def _notes(
    reader: NativeReader, converted: Sequence[str], has_rng: bool, without_rng: str, shared: SharedState
) -> tuple[str, ...]:
    """Returns the notes: what the other trainer does not get, and what to do about it.

    `converted` are the keys of extra_state that are converted. `without_rng` is the option that tells the other trainer
    to load no random states.
    """
    sizes = reader.manifest.topology
    notes = [left_out(reader, converted), parts_left_out(reader)]
    if has_rng:
        notes.append(
            f"the random states fit only tensor-parallel size {sizes.tp} and pipeline-parallel size {sizes.pp}: under "
            f"other sizes start with {without_rng}"
        )
    elif reader.manifest.files_of("rng"):
        notes.append(f"the checkpoint was resharded and has a seed but no random states: start with {without_rng}")
    if any(is_expert(name) for name in reader.manifest.tensors):
        notes.append(
            "megatron can load the optimizer only under a layout that chains optimizers as the converted checkpoint "
            "does: one for dense parameters and one for experts (with expert parallelism), or one for both (without). "
            "To change this, run mcore-ckpt reshard with another --ep before the conversion"
        )
        if any(name.endswith("_extra_state") and is_expert(name) for name in reader.manifest.tensors):
            notes.append("the _extra_state of experts is not converted, so their FP8 amax history begins anew")
    if _has_halves(reader):
        notes.append("the main parameters were stored as remainders: start without store_param_remainders")
    if shared.was_offloaded:
        # During a load into an offloaded optimizer, megatron's `_update_fp32_params_by_new_state` (0.16.1 to 0.19.2)
        # raises KeyError.
        notes.append(
            "the optimizer was offloaded to the host, but megatron cannot load the converted state into an offloaded "
            "optimizer: start without optimizer_cpu_offload"
        )
    if shared.mixed_fields:
        notes.append(
            f"some param groups differ only in {', '.join(shared.mixed_fields)}, and megatron-core 0.16 to 0.18 gives "
            "all these groups the values of one group (0.19 keeps max_lr, min_lr, start_wd and end_wd apart, but not "
            "betas and eps): set these fields again after the load"
        )
    return tuple(note for note in notes if note is not None)


def _has_halves(reader: NativeReader) -> bool:
    keys = (ShardKey(name, PARAM) for name in reader.manifest.tensors)
    shards = (shard for key in keys for shard in reader.shards(key, reader.files(key)))
    return any(shard.coding is not None and shard.coding.upper is not None for shard in shards)
