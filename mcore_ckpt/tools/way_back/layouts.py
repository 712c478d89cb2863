"""The folders that other trainers resume from, and what each of them holds.

| trainer | read from the source of | the step's folder | in it |
|---|---|---|---|
| Megatron-LM | core_r0.16 to core_r0.19 | `iter_0000100` | one torch_dist folder |
| verl | 0.9.1 | `global_step_100/actor` | `model/huggingface`, `optimizer/dist_ckpt`, `extra/dist_ckpt` |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointNotFoundError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.torch_dist.writer import Contents
from mcore_ckpt.models.architecture import HfModel, read_config
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.sharding.adapters import is_adapter
from mcore_ckpt.sharding.names import is_expert
from mcore_ckpt.sharding.plan import PARAM, ShardKey
from mcore_ckpt.tools.find import FoundCheckpoint, Selection
from mcore_ckpt.tools.merge import MergeJob, MergeRequest, prepare
from mcore_ckpt.tools.way_back.random_states import rng_objects
from mcore_ckpt.tools.way_back.shared_state import (
    CONTENT_METADATA,
    LOOP,
    SharedState,
    left_out,
    megatron_state,
    read_shared_state,
)
from mcore_ckpt.tools.way_back.tensors import plan_tensors

Layout = Literal["megatron", "verl"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True, eq=False)
class Tree:
    """A folder to write.

    Attributes:
        folder: its path, relative to the step's folder.
        contents: what it holds for `dist_checkpointing.load`.
    """

    folder: str
    contents: Contents


@dataclass(frozen=True, eq=False)
class Export:
    """A HuggingFace model to write.

    Attributes:
        folder: its path, relative to the step's folder.
        job: the weights and the other files.
    """

    folder: str
    job: MergeJob


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything to write for one trainer.

    Attributes:
        step: the step.
        folder: the name of the step's folder.
        trees: the folders for `dist_checkpointing.load`.
        exports: the HuggingFace models.
        copies: the files to copy, by path relative to the step's folder.
        notes: sentences about what the other trainer does not get, for people.
    """

    step: int
    folder: str
    trees: tuple[Tree, ...]
    exports: tuple[Export, ...] = ()
    copies: Mapping[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Role:
    """A role to convert: its folder, and the reader of the checkpoint in it."""

    path: Path
    reader: NativeReader


def plan_for(layout: Layout, selection: Selection, roles: Sequence[Role], hf_model_path: Path | None) -> Plan:
    """Plans what to write.

    Args:
        layout: the trainer that is to go on.
        selection: the step.
        roles: the roles of the step that have a model.
        hf_model_path: the folder with config.json; None to use that of the checkpoint.

    Raises:
        InvalidArgumentError: the trainer can load one role, but there are several.
        CheckpointError: the checkpoint is damaged, or has something that the trainer cannot load.
    """
    for role in roles:
        if any(is_adapter(name) for name in role.reader.names):
            raise UnsupportedError(
                f"{role.path}: has adapters, whose rows and alpha Megatron-Bridge keeps in a form of its own: take the "
                "weights with mcore-ckpt merge, and the adapters with its --adapters only"
            )
    if layout == "megatron":
        return _for_megatron(selection, roles, hf_model_path)
    return _for_verl(selection, roles, hf_model_path)


# -- Megatron-LM ----------------------------------------------------------------------------------------------


def _for_megatron(selection: Selection, roles: Sequence[Role], hf_model_path: Path | None) -> Plan:
    if len(roles) != 1:
        names = ", ".join(role.reader.manifest.role for role in roles)
        raise InvalidArgumentError(
            f"{roles[0].path.parent}: has the roles {names}, but Megatron-LM trains one: name the folder of the role"
        )
    reader = roles[0].reader
    tensors, shared, rng = plan_tensors(reader), read_shared_state(reader), rng_objects(reader)
    common = {
        **megatron_state(reader, partial(_model, roles[0], hf_model_path), has_rng=bool(rng)),
        "content_metadata": dict(CONTENT_METADATA),
        **({} if shared.optimizer is None else {"optimizer": shared.optimizer}),
        **({} if shared.scheduler is None else {"opt_param_scheduler": shared.scheduler}),
    }
    contents = Contents.of([*tensors.model, *tensors.optimizer], {**tensors.states, **rng}, common)
    return Plan(
        selection.step,
        file_names.megatron_dir(Path(), selection.step).name,
        (Tree(".", contents),),
        notes=_notes(reader, [LOOP], bool(rng), "--no-load-rng", shared),
    )


def _model(role: Role, hf_model_path: Path | None) -> HfModel | None:
    """Returns the model that config.json describes; None if there is no config.json."""
    try:
        return model_from_config(read_config(hf_model_path or FoundCheckpoint(role.path, "native").config_dir()))
    except CheckpointNotFoundError:
        if hf_model_path is not None:
            raise
        return None


# -- verl -----------------------------------------------------------------------------------------------------


def _for_verl(selection: Selection, roles: Sequence[Role], hf_model_path: Path | None) -> Plan:
    trees: list[Tree] = []
    exports: list[Export] = []
    notes: list[str] = []
    # In steps of verl's SFT trainer, the step's folder is the folder of its only role.
    is_step = file_names.parse_step(roles[0].path.name) is not None
    for role in roles:
        prefix = "" if is_step else f"{role.reader.manifest.role}/"
        rng = rng_objects(role.reader)
        shared = read_shared_state(role.reader)
        trees += _trees_of_verl(role.reader, prefix, shared, rng)
        notes += _notes(role.reader, [], bool(rng), "load_contents without extra", shared)
        # verl 0.9.1 cannot load the model from dist_ckpt beside such an optimizer: `dist_checkpointing.load` changes
        # the dict in which `sharded_param_state_fully_reshardable` then looks for the parameters.
        exports.append(Export(f"{prefix}model/huggingface", _export(role, hf_model_path)))
    step_path = roles[0].path if is_step else roles[0].path.parent
    copies = {entry.name: entry for entry in sorted(step_path.iterdir()) if _is_verls(entry)}
    if not any(name.startswith("data") for name in copies):
        notes.append(f"{step_path}: has no data*.pt of verl's trainer, so the data begins anew")
    folder = f"global_step_{selection.step}"
    return Plan(selection.step, folder, tuple(trees), tuple(exports), copies, tuple(notes))


def _trees_of_verl(reader: NativeReader, prefix: str, shared: SharedState, rng: Mapping[str, bytes]) -> list[Tree]:
    """Returns the folders of verl's layout 2 (`MegatronCheckpointManager.save_checkpoint`, 0.9.1) but the weights."""
    trees: list[Tree] = []
    metadata = {"content_metadata": dict(CONTENT_METADATA)}
    if shared.optimizer is not None:
        common: dict[str, Any] = {**metadata, "optimizer": shared.optimizer}
        common |= {} if shared.scheduler is None else {"lr_scheduler": shared.scheduler}
        contents = Contents.of(plan_tensors(reader).optimizer, {}, common)
        trees.append(Tree(f"{prefix}optimizer/dist_ckpt", contents))
    if rng:
        trees.append(Tree(f"{prefix}extra/dist_ckpt", Contents.of([], rng, metadata)))
    return trees


def _export(role: Role, hf_model_path: Path | None) -> MergeJob:
    """Plans the HuggingFace weights. Raises CheckpointError if the architecture is not known."""
    request = MergeRequest(role.path, role.path, hf_model_path=hf_model_path)
    return prepare(request, FoundCheckpoint(role.path, "native"))


def _is_verls(entry: Path) -> bool:
    """Returns True for a file that verl's trainers write beside the roles, such as data.pt and data_0.pt."""
    return entry.is_file() and not entry.name.startswith(".") and not file_names.is_own(entry.name)


# -- what stays -----------------------------------------------------------------------------------------------


def _notes(
    reader: NativeReader, converted: Sequence[str], has_rng: bool, without_rng: str, shared: SharedState
) -> tuple[str, ...]:
    """Returns what the other trainer does not get.

    Args:
        reader: the reader of the checkpoint.
        converted: the keys of extra_state that are converted.
        has_rng: whether the random states are converted.
        without_rng: how the other trainer is told not to load random states.
        shared: the state of the optimizer that all ranks share.
    """
    sizes = reader.manifest.topology
    notes = [left_out(reader, converted)]
    if has_rng:
        notes.append(
            f"the random states are of tensor-parallel size {sizes.tp} and pipeline-parallel size {sizes.pp}: under "
            f"other sizes start with {without_rng}"
        )
    elif reader.manifest.files_of("rng"):
        notes.append(f"the checkpoint was resharded and has no random states but a seed: start with {without_rng}")
    if any(is_expert(name) for name in reader.manifest.tensors):
        notes.append(
            "megatron loads the optimizer of a model with experts only into a chain like that of this layout (dense "
            "and expert optimizer, or one for both): run mcore-ckpt reshard first to change whether experts are divided"
        )
        if any(name.endswith("_extra_state") and is_expert(name) for name in reader.manifest.tensors):
            notes.append("the _extra_state of experts is not converted, so their FP8 amax history begins anew")
    if _has_halves(reader):
        notes.append("the main parameters were stored as remainders: start without store_param_remainders")
    if shared.was_offloaded:
        # `_update_fp32_params_by_new_state` (0.16.1 to 0.19.2) raises KeyError.
        notes.append(
            "the optimizer was offloaded to the host, for which megatron loads no state that fits any layout: start "
            "without optimizer_cpu_offload"
        )
    return tuple(note for note in notes if note is not None)


def _has_halves(reader: NativeReader) -> bool:
    keys = (ShardKey(name, PARAM) for name in reader.manifest.tensors)
    shards = (shard for key in keys for shard in reader.shards(key, reader.files(key)))
    return any(shard.coding is not None and shard.coding.upper is not None for shard in shards)
