"""Plans one load: which stored ranges fill which live tensor.

Planning checks the manifest, the indexes, the file sizes and the small files, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.model_facts import DifferentFact
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.formats.locate import Located, Locator, Wanted
from mcore_ckpt.formats.native.folder import Folder
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.load.data_positions import with_positions
from mcore_ckpt.load.fill import TensorFill, refuse_freed
from mcore_ckpt.load.fresh_adapters import choice_of
from mcore_ckpt.load.group_plan import GroupPlan, plan_groups
from mcore_ckpt.load.optimizer_plan import NewlyStarted, OptimizerPlanner, PartPlan
from mcore_ckpt.load.quantized_weights import quantized_targets
from mcore_ckpt.load.same_model import differences_to_live
from mcore_ckpt.load.stored_parts import NO_PARTS, PartLoads, plan_step_parts
from mcore_ckpt.load.tensor_fills import not_there, plan_fill, refuse_rounding, replicas_of
from mcore_ckpt.load.together import Runs, names_left_over, positions_taken
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, PARAM, ReadRange, ShardKey
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.model import EXTRA_STATE, model_shards
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.param_groups import NO_CHANGES, GroupChanges, SavedPart, group_keys, match_parts
from mcore_ckpt.state.rng import check_rng, seed_of
from mcore_ckpt.state.scheduler import check_scheduler, saved_scheduler, schedules_of
from mcore_ckpt.state.shards import LocalShard, ParameterState
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.state.typed_values import from_stored


@dataclass(frozen=True)
class CommonState:
    """Optimizer and scheduler state that is equal on all ranks.

    `optimizers` is in the order of the live optimizer's parts. `groups` finds the saved param groups of these parts.
    `changes` has the messages to the user about param groups.
    """

    optimizers: tuple[SavedPart, ...]
    lr_scheduler: dict[str, Any] | None
    groups: GroupPlan
    changes: GroupChanges = NO_CHANGES


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """The checked plan of one load on this rank, not yet applied.

    Attributes:
        model_fills: the fills of the model's tensors.
        parts: the plans of the chained optimizers; empty unless the optimizer is loaded.
        common: the state that is equal on all ranks; None unless the optimizer is loaded.
        rng: the states of the random number generators; None if random states are not loaded, or if none were saved for
            this rank's place.
        seed: the seed to start the generators from if `rng` is None; None if `rng` is set, or if random states are not
            loaded.
        extra_state: the dict that this rank gave to `save`, or None.
        step_parts: the parts of the step that this rank loads (`CheckpointManager.attach`).
        other_model: the facts in which the live and the saved model differ, so that the two models compute different
            results with the same tensors.
        used: under "model" and "optimizer", the tensors that this rank takes, as runs of positions in the manifest's
            list of tensors.
    """

    locator: Locator
    reader: NativeReader
    model_fills: tuple[TensorFill, ...]
    parts: tuple[PartPlan, ...]
    common: CommonState | None
    rng: dict[str, Any] | None
    seed: int | None
    extra_state: dict[str, Any] | None
    used: dict[str, Runs]
    step_parts: PartLoads = NO_PARTS
    other_model: tuple[DifferentFact, ...] = ()

    @property
    def fills(self) -> tuple[TensorFill, ...]:
        """The fills of the model's and the optimizer's tensors."""
        return (*self.model_fills, *(fill for part in self.parts for fill in (*part.mains, *part.state)))

    @property
    def newly_started(self) -> tuple[NewlyStarted, ...]:
        """The parameters that start without moments."""
        return tuple(entry for part in self.parts for entry in part.newly_started)

    @property
    def new_moments(self) -> list[int]:
        """The numbers of the chained optimizers that cannot use the stored moments."""
        return [number for number, part in enumerate(self.parts) if part.other_moments is not None]

    def with_new_moments(self, numbers: Collection[int]) -> LoadPlan:
        """Returns the plan in which the chained optimizers with these numbers take over only main parameters."""
        if self.common is None or not numbers:
            return self
        parts = tuple(part.with_new_moments() if n in numbers else part for n, part in enumerate(self.parts))
        # The moments that fit some parameters are dropped, too, because all parameters share one number of steps.
        saved = tuple(
            replace(state, step=None, starts_anew=True) if n in numbers else state
            for n, state in enumerate(self.common.optimizers)
        )
        return replace(self, parts=parts, common=replace(self.common, optimizers=saved))

    def with_groups(self, outcome: Record) -> LoadPlan:
        """Returns the plan with the param groups that rank 0 has found for all ranks."""
        if self.common is None:
            return self
        saved = self.common.groups.complete(self.common.optimizers, outcome)
        changes = GroupChanges(tuple(outcome["kept"]), tuple(outcome["replaced"]))
        return replace(self, common=replace(self.common, optimizers=saved, changes=changes))

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    @property
    def folder(self) -> Folder:
        return self.reader.folder


def plan_load(trainer: Trainer, folder: Folder, loaded_parts: Set[str] = frozenset()) -> LoadPlan:
    """Plans this rank's load. Planning changes nothing and communicates with no other rank.

    Args:
        trainer: this rank's trainer.
        folder: the checkpoint's folder.
        loaded_parts: the parts of the step that any rank loads.

    Raises:
        CheckpointNotFoundError: `folder` is not a checkpoint.
        CheckpointCorruptError: the checkpoint is damaged.
        CheckpointMismatchError: the checkpoint does not fit. The message names the file and the tensor, and says what
            was wanted and what was found.
    """
    manifest = folder.manifest()
    reader = NativeReader(folder, manifest)
    position = RankPosition(trainer.topology, trainer.coordinates)
    locator = Locator(reader, position, trainer.vocab_size, trainer.layers)
    try:
        _check_contents(trainer, manifest)
        _check_adapters(trainer, manifest)
        other_model = tuple(differences_to_live(trainer, manifest.model))
        return replace(_plan(trainer, reader, locator, loaded_parts), other_model=other_model)
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{folder}: {error}{_note(trainer, manifest, locator)}") from error


def _check_adapters(trainer: Trainer, manifest: Manifest) -> None:
    """Refuses saved adapters with another alpha than the model's adapters, because alpha scales what they compute."""
    saved, live = manifest.adapters, trainer.adapters
    if "model" in trainer.config.load_contents and saved and live and saved.alpha != live.alpha:
        raise CheckpointMismatchError(
            f"the saved adapters have alpha {saved.alpha:g}, but the model's adapters have alpha {live.alpha:g}: give "
            f"the model adapters with alpha={saved.alpha:g}"
        )


def _plan(trainer: Trainer, reader: NativeReader, locator: Locator, loaded_parts: Set[str]) -> LoadPlan:
    wanted = trainer.config.load_contents
    model = model_shards(trainer.chunks)
    model_fills: list[TensorFill] = []
    parts: tuple[PartPlan, ...] = ()
    common = rng = seed = extra = None
    if "model" in wanted:
        is_taken = choice_of(trainer, reader.place, (shard.key.name for shard in model), reader.names)
        taken = [shard for shard in model if is_taken(shard.key.name, shard.is_frozen)]
        plain = [shard for shard in taken if not shard.is_quantized]
        model_fills += [fill for shard in plain if (fill := _model_fill(trainer, shard, locator)) is not None]
        if len(plain) < len(taken):
            model_fills += _quantized_fills(trainer, model, taken, locator)
    by_part = _states(trainer, model)
    if "optimizer" in wanted:
        common = _read_common(trainer, reader, by_part, locator)
        parts = _plan_parts(OptimizerPlanner(trainer, reader, locator), by_part, common.optimizers)
        if optimizer_state.changes_model(trainer.optimizer):
            # Let each rank read its weights itself. A broadcast from a replica would come last, and would undo the
            # changes that loading main parameters makes to this rank's weights.
            model_fills = [replace(fill, replicas=()) for fill in model_fills]
    if "extra" in wanted:
        rng, seed, extra = _read_extra(trainer, reader)
    # Frozen parameters are listed as used even if skip_frozen leaves them out. The model has these parameters, so
    # leaving them out loses nothing.
    used = {
        "model": positions_taken(locator, [shard.key for shard in model] if "model" in wanted else []),
        "optimizer": positions_taken(locator, [ShardKey(s.name, PARAM) for states in by_part for s in states]),
    }
    plan = LoadPlan(locator, reader, tuple(model_fills), parts, common, rng, seed, extra, used)
    _check_sizes(reader, plan.fills)
    refuse_rounding(trainer, (fill.rounding for fill in plan.fills))
    if "extra" in wanted:  # last, so that a load that is refused fetches no files of parts
        plan = replace(plan, step_parts=plan_step_parts(trainer, reader.folder, reader.manifest, loaded_parts))
    return plan


def _plan_parts(
    planner: OptimizerPlanner, by_part: Sequence[Sequence[ParameterState]], saved: Sequence[SavedPart]
) -> tuple[PartPlan, ...]:
    live = optimizer_parts(planner.trainer.optimizer)
    return tuple(
        planner.plan(part, states, state.starts_anew) for part, states, state in zip(live, by_part, saved, strict=True)
    )


def check_all_used(trainer: Trainer, plan: LoadPlan, used: Sequence[dict[str, Runs]]) -> None:
    """Raises CheckpointMismatchError on rank 0 if the checkpoint has a tensor that no rank takes.

    `plan` is rank 0's plan, and `used` has the field `used` of each rank's plan.
    """
    for contents, kind, reason in (
        ("model", MODEL, "wanted no such tensor"),
        ("optimizer", PARAM, "wanted no such state, because no rank trains the parameter (is it frozen now?)"),
    ):
        if contents not in trainer.config.load_contents:
            continue
        for name in names_left_over(plan.locator, (by_rank[contents] for by_rank in used)):
            key = ShardKey(name, kind)
            files = [] if name.endswith(EXTRA_STATE) else plan.reader.files(key)
            if files:
                found = plan.reader.shards(key, files[:1])
                described = f", found {found[0].region.describe()}" if found else ""
                note = _note(trainer, plan.manifest, plan.locator)
                raise CheckpointMismatchError(
                    f"{plan.folder}: {files[0].path}: tensor {key}: {reason}{described}{note}: build the model that "
                    f"was saved, or leave {contents!r} out of load_contents"
                )


def _note(trainer: Trainer, manifest: Manifest, locator: Locator) -> str:
    layers = "" if locator.layer_mismatch is None else f"; {locator.layer_mismatch}"
    return f" (saved on {manifest.topology}, this is {trainer.topology}{layers})"


def _check_contents(trainer: Trainer, manifest: Manifest) -> None:
    # If the checkpoint has no model, the weights can be read from the main parameters.
    there = {*manifest.contents, *(("model",) if "optimizer" in manifest.contents else ())}
    missing = [word for word in trainer.config.load_contents if word not in there]
    if missing:
        gone = [word for word in missing if word in manifest.dropped]
        has = ", ".join(manifest.contents)
        if gone:
            has += f" (retention has removed its {', '.join(gone)}, which only the newest steps keep)"
        raise CheckpointMismatchError(
            f"load_contents names {', '.join(missing)}, but the checkpoint has only {has}: leave out the missing words"
        )


def _states(trainer: Trainer, model: Sequence[LocalShard]) -> list[list[ParameterState]]:
    if "optimizer" not in trainer.config.load_contents:
        return []
    return optimizer_state.read_optimizer(trainer.optimizer, model, first_instance=True)


# -- model -------------------------------------------------------------------------------------------------


def _model_fill(trainer: Trainer, shard: LocalShard, locator: Locator) -> TensorFill | None:
    wanted = Wanted(shard.key, shard.region, _file_of(trainer, shard))
    if shard.key.kind == OPAQUE:
        return _opaque_fill(shard, wanted, locator)
    refuse_freed(wanted.key, shard.tensor, "load()")
    located = _locate_weight(wanted, shard, shard.tensor.dtype, locator)
    fill = plan_fill(wanted, shard.tensor.dtype, located, lambda: shard.tensor)
    # Rounding a weight loses nothing if its main parameter is loaded, too.
    has_main = "optimizer" in trainer.config.load_contents and not (shard.is_frozen or shard.is_buffer)
    rounding = None if has_main else fill.rounding
    return replace(fill, replicas=replicas_of(trainer, shard.expert), rounding=rounding)


def _quantized_fills(
    trainer: Trainer, model: Sequence[LocalShard], taken: Iterable[LocalShard], locator: Locator
) -> Iterator[TensorFill]:
    """Yields the fills of quantized weights. Main parameters that the load fills anyway are left out."""
    states: Iterable[ParameterState] | None = None
    if trainer.optimizer is not None:
        has_mains = "optimizer" in trainer.config.load_contents
        parts = [] if has_mains else optimizer_state.read_optimizer(trainer.optimizer, model, first_instance=True)
        states = chain.from_iterable(parts)
    for target in quantized_targets([shard for shard in taken if shard.is_quantized], states):
        wanted = Wanted(target.shard.key, target.region, _file_of(trainer, target.shard))
        if target.encode is None:
            refuse_freed(wanted.key, target.tensor, "load()")
        dtype = target.tensor.dtype
        fill = plan_fill(
            wanted, dtype, _locate_weight(wanted, target.shard, dtype, locator), partial(_itself, target.tensor)
        )
        yield replace(fill, encode=target.encode)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _file_of(trainer: Trainer, shard: LocalShard) -> str:
    at, apart = trainer.coordinates, trainer.topology.experts_apart and shard.expert
    return file_names.expert_file(at.etp, at.pp, at.ep) if apart else file_names.model_file(at.tp, at.pp)


def _locate_weight(wanted: Wanted, shard: LocalShard, dtype: torch.dtype, locator: Locator) -> Located:
    """Locates a stored weight. If it is missing or not stored in `dtype`, prefers the more precise main parameter."""
    located = locator.find(wanted)
    if located is None or located.dtype != dtype:
        main = Wanted(ShardKey(wanted.key.name, PARAM), wanted.region, wanted.file)
        located = locator.find(main) or located
    if located is None:
        raise not_there(wanted, could_be_skipped=shard.is_frozen)
    return located


def _opaque_fill(shard: LocalShard, wanted: Wanted, locator: Locator) -> TensorFill | None:
    found = locator.opaque(wanted.key)
    if found is not None:
        read = ReadRange.whole(found)
        memory = torch.empty(found.nbytes, dtype=torch.uint8)
        return TensorFill((read,), torch.uint8, lambda: memory, finish=shard.restore)
    # There is nothing to restore if this layer has no opaque state, or if no saved layer had any.
    if not shard.tensor.numel() or not any(name.endswith(EXTRA_STATE) for name in locator.reader.names):
        return None
    raise CheckpointMismatchError(
        f"{wanted.file}: tensor {shard.key}: wanted {shard.tensor.nbytes} bytes, found no such tensor"
    )


# -- small files and file sizes -------------------------------------------------------------------------------


def _read_common(
    trainer: Trainer, reader: NativeReader, by_part: Sequence[Sequence[ParameterState]], locator: Locator
) -> CommonState:
    common = reader.plain(file_names.COMMON_FILE)
    parts = optimizer_parts(trainer.optimizer)
    optimizers = match_parts(parts, common["optimizers"], trainer.config.reset_moments)
    scheduler = saved_scheduler(common)
    check_scheduler(trainer.lr_scheduler, scheduler)
    schedules = schedules_of(trainer.lr_scheduler, scheduler)
    keys = group_keys(parts, trainer.group_keys)
    groups = plan_groups(common["optimizers"], parts, keys, by_part, optimizers, locator, schedules)
    return CommonState(optimizers, scheduler, groups)


def _check_sizes(reader: NativeReader, fills: Iterable[TensorFill]) -> None:
    """Checks, before anything changes, that every file that the fills read exists and has the right size."""
    stored = {(read.stored.key, read.stored.file): read.stored for fill in fills for read in fill.reads}.values()
    paths = {shard.file for shard in stored}
    coded = (reader.partners(shard) for shard in stored if shard.coding is not None)
    files = sorted(paths.union(upper.stored.file for partners in coded for upper in partners.upper))
    reader.folder.check([reader.file(path) for path in files])


def _read_extra(
    trainer: Trainer, reader: NativeReader
) -> tuple[dict[str, Any] | None, int | None, dict[str, Any] | None]:
    """Reads the random states (or, without them, the seed to start the generators from) and this rank's extra_state."""
    saved = reader.manifest.topology
    place = saved.place_in_turn(trainer.coordinates.place)
    handed_over = reader.by_path.get(file_names.extra_file(*place))
    extra = None if handed_over is None else _extra_state(reader, handed_over)
    if extra is not None:
        read = partial(_extra_state_of, reader)
        extra = with_positions(extra, place, saved, trainer.coordinates.dp, trainer.topology.dp, read)
    if trainer.topology.has_generators_of(saved):
        file, rng = _read_rng(reader, place)
        if "seed" not in rng:
            check_rng(rng, file)
            return rng, None, extra
    # All tensor-parallel ranks start from one seed, because outside megatron's tracker they must draw equal numbers.
    file, first = _read_rng(reader, (0, 0, *place[2:]))
    return None, seed_of(first, file), extra


def _read_rng(reader: NativeReader, place: tuple[int, int, int, int]) -> tuple[str, dict[str, Any]]:
    """Reads the random states of a saved rank. Returns the file's name for messages, and the states."""
    path = file_names.rng_file(*place)
    return f"{reader.place}/{path}", reader.plain(path)


def _extra_state_of(reader: NativeReader, place: tuple[int, int, int, int]) -> dict[str, Any] | None:
    record = reader.by_path.get(file_names.extra_file(*place))
    return None if record is None else _extra_state(reader, record)


def _extra_state(reader: NativeReader, record: FileRecord) -> dict[str, Any]:
    stored = reader.folder.plain(record)
    try:
        if isinstance(extra := from_stored(stored), dict):
            return extra
        raise ValueError(f"it is a {type(extra).__name__}, not a dict")
    except ValueError as error:
        raise CheckpointCorruptError(f"{reader.place}/{record.path}: extra_state cannot be read: {error}") from None
