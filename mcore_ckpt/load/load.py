"""Loads one checkpoint: finds it, plans and checks the load on every rank, then fills the live tensors.

Before a byte of the training state changes, all ranks check the manifest, the indexes, the file sizes and the small
files, and agree on the result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    UnsupportedError,
    reworded,
)
from mcore_ckpt.fast.found import found_on_nodes, own_held, to_adopt
from mcore_ckpt.fast.spread_folder import SpreadFolder
from mcore_ckpt.fast.tier import NodeTier
from mcore_ckpt.fast.transaction import adopt
from mcore_ckpt.formats.native.folder import Folder, LocalFolder
from mcore_ckpt.formats.native.remote_folder import RemoteFolder
from mcore_ckpt.io.device_waits import wait_for_gpu
from mcore_ckpt.load.broadcast import refuse_broadcast
from mcore_ckpt.load.candidates import find_candidates, folder_of
from mcore_ckpt.load.fill import fill_tensors
from mcore_ckpt.load.huggingface import load_hf
from mcore_ckpt.load.plan import LoadPlan, check_all_used, plan_load
from mcore_ckpt.load.report import LoadResult, foreign_result, native_result
from mcore_ckpt.load.stored_parts import load_parts_together
from mcore_ckpt.load.together import fill_together, plan_together
from mcore_ckpt.ranks.rounds import Record, decide, same_everywhere
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.attached_parts import listed
from mcore_ckpt.state.common_state import write_common
from mcore_ckpt.state.main_weights import write_weights
from mcore_ckpt.state.model import forget_caches, gather_parameters
from mcore_ckpt.state.quantized import has_quantized
from mcore_ckpt.state.rng import write_rng, write_seed
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps.node_steps import HeldRole
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.steps.transaction import failure_among, raise_failure

logger = logging.getLogger(__name__)


VERIFY_WORDS = ("full", "read", "off")


def load_state(
    trainer: Trainer,
    remote: RemoteSteps | None,
    step: int | None,
    path: Path | None,
    failure: Record | None = None,
    verify: str = "read",
    tier: NodeTier | None = None,
    loaded: Callable[[Manifest, Path | str], None] = lambda manifest, place: None,
    check_extra: Callable[[Mapping[str, Any] | None], object] | None = None,
) -> LoadResult:
    """Loads the newest complete checkpoint, or the checkpoint that `step` or `path` names.

    If a checkpoint is damaged, all ranks together take the next older checkpoint, unless the caller has named a
    checkpoint or `strict` is set.

    Args:
        trainer: this rank's trainer.
        remote: the steps in the remote store; None without a store.
        step: the step to load; None for the newest.
        path: the folder to load; None to choose by step.
        failure: the error of an earlier save of this rank, as a record, if no call has raised it yet; None otherwise.
        verify: one of VERIFY_WORDS; see `CheckpointManager.load`.
        tier: this rank's part of the fast tier; None without one.
        loaded: a function to call once a native checkpoint is loaded, with two arguments: the checkpoint's manifest,
            and the checkpoint's folder or URL.
        check_extra: see `CheckpointManager.load`.

    Raises:
        EarlierSaveError: an earlier save of some rank failed. All ranks raise it, and nothing is loaded.
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointMismatchError: the checkpoint does not fit this model, optimizer or layout. Nothing has changed.
        CheckpointCorruptError: the checkpoint is damaged, and there is no other checkpoint to load. The message says
            whether anything has changed.
    """
    started = time.monotonic()
    # Find.
    found = _find_together(trainer, remote, tier, step, path, failure, verify)
    if path is not None and found["foreign"] is not None:
        return _load_foreign(trainer, found["foreign"], path.absolute(), started)
    folders = [folder_of(remote, candidate, trainer.role, tier) for candidate in found["candidates"]]
    skipped: list[str] = list(found.get("passed_over", ()))
    changed = False
    for number, folder in enumerate(folders):
        saved_step = found["candidates"][number]["step"]
        if isinstance(folder, RemoteFolder) and trainer.agreement.is_coordinator:
            logger.warning("loading step %d from %s", saved_step, folder)
        # One rank's lock is enough, because every process checks the locks before it deletes a step.
        with reading(_to_lock(folder) if trainer.agreement.is_coordinator else []):
            try:
                # Plan, and check together. Nothing changes before all ranks know that the checkpoint fits.
                if verify == "full":
                    _verify_together(trainer, folder)
                plan = _plan_together(trainer, folder, verify, frozenset(found["loaded_parts"]), check_extra)
                # Fill. If only the weights in huggingface/ are loaded, nothing changes before `load_hf` has checked
                # them, so `changed` need not be set here.
                changed = changed or trainer.config.load_contents != ("hf_model",)
                fill = partial(fill_tensors, read=partial(plan.reader.read, check=verify != "off"))
                apply, topic = partial(_apply_small_state, trainer, plan), f"loading {folder}"
                with _naming(folder), closing(plan.step_parts):
                    nbytes = fill_together(trainer.agreement, trainer.replicas, topic, plan.fills, fill, apply)
                    _make_consistent(trainer)
                    nbytes += _load_hf_model(trainer, plan)
                    # The random states come last, because the functions of parts may draw random numbers.
                    apply_rng = partial(_apply_rng, trainer, plan)
                    load_parts_together(trainer.agreement, topic, plan.step_parts, apply_rng)
            except CheckpointError as error:
                is_damaged, is_first = isinstance(error, CheckpointCorruptError), number == 0
                if not is_damaged and is_first and not changed:
                    raise reworded(error, f"{error}{_newer(skipped)}") from error
                if not is_damaged or trainer.config.strict or number == len(folders) - 1:
                    raise _final(error, skipped, changed, is_first, found.get("last_resort", "")) from error
                logger.warning("step %d cannot be loaded, taking the next older one: %s", saved_step, error)
                skipped.append(str(error))
                continue
        # Report.
        loaded(plan.manifest, folder.place)
        return native_result(trainer, plan, nbytes, skipped, started)
    raise AssertionError("unreachable: there is at least one candidate, and the last one returns or raises")


def _find_together(
    trainer: Trainer,
    remote: RemoteSteps | None,
    tier: NodeTier | None,
    step: int | None,
    path: Path | None,
    failure: Record | None,
    verify: str,
) -> Record:
    """Returns, on every rank, what `find_candidates` finds on rank 0, and the parts that any rank loads.

    Raises EarlierSaveError if a rank has a `failure`.
    """
    request = {"root": str(trainer.root), "step": step, "path": path and str(path), "verify": verify}
    held: list[HeldRole] = []

    def work() -> Record:
        # Wait for the GPU within the agreement's timeout. Planning reads values from the GPU, and torch would wait for
        # these values without a deadline.
        wait_for_gpu(trainer.agreement.timeout_s)
        held.extend(own_held(tier))
        loaded = {part.name: part.is_optional for part in trainer.parts if part.load is not None}
        held_here = [each.to_record() for each in held]
        return {"request": request, "failure": failure, "held": held_here, "loaded_parts": loaded}

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere([record["request"] for record in records], "the checkpoint to load")
        failure = failure_among(records)
        if failure is not None:
            return {"failure": failure}
        fast = [] if _takes_hf_weights(trainer) else found_on_nodes(tier, records)
        found = find_candidates(trainer, remote, step, path, tier, fast)
        loaded = sorted({name for record in records for name in record["loaded_parts"]})
        needed = {name for record in records for name, optional in record["loaded_parts"].items() if not optional}
        _check_parts(trainer, path if found["foreign"] else None, sorted(needed))
        return {**found, "adopt": to_adopt(fast, records), "loaded_parts": loaded}

    found = decide(trainer.agreement, "finding a checkpoint", work, combine)
    raise_failure(found)
    if tier is not None and found["adopt"]:
        _adopt_together(trainer, tier, held, found["adopt"])
    return found


def _check_parts(trainer: Trainer, foreign: Path | None, needed: Sequence[str]) -> None:
    """Refuses a load that would leave out parts. Only rank 0 calls this function.

    Args:
        trainer: this rank's trainer.
        foreign: the folder of a checkpoint of another program; None for a checkpoint of this package. A checkpoint of
            another program has no parts. Such a load is not refused, and this function only logs a warning, because a
            training that moves over from that program has attached its parts already.
        needed: the names of the parts that some rank loads and that are not optional.

    Raises InvalidArgumentError.
    """
    if needed and foreign is not None:
        logger.warning(
            "%s: is a checkpoint of another program and has no parts, so these parts stay as they are: %s",
            foreign,
            listed(needed),
        )
    elif needed and "extra" not in trainer.config.load_contents:
        raise InvalidArgumentError(
            f"part {needed[0]!r} is attached, but it would not be loaded, because load_contents has no 'extra': add "
            "the word, detach the part, or attach it with optional=True"
        )


def _adopt_together(trainer: Trainer, tier: NodeTier, held: Sequence[HeldRole], attempts: Sequence[str]) -> None:
    """Finishes the commits that some nodes did not finish, so that other nodes find the files in their final place."""

    def work() -> Record:
        if tier.is_lead:
            adopt(tier, held, attempts)
        return {}

    decide(trainer.agreement, "finishing a commit on all nodes", work, lambda _: {})


def _to_lock(folder: Folder) -> list[Path]:
    """Returns the local folders that no process may delete while they are read. Nodes' own folders need no lock."""
    if isinstance(folder, LocalFolder):
        return [folder.place]
    sources = folder.sources if isinstance(folder, SpreadFolder) else ()
    local = [source.folder.place for source in sources if isinstance(source.folder, LocalFolder)]
    return [place for place in local if place != folder.place]


def _load_hf_model(trainer: Trainer, plan: LoadPlan) -> int:
    """Loads the weights from `huggingface/` if `load_contents` has 'hf_model' but not 'model'.

    Returns the number of bytes that this rank has read.
    """
    contents = trainer.config.load_contents
    if not _takes_hf_weights(trainer):
        return 0
    assert isinstance(plan.folder, LocalFolder), "_plan_together has refused a remote folder"
    # If this load has filled the main parameters, keep them, because they are more precise than the exported weights.
    optimizer = None if "optimizer" in contents else trainer.optimizer
    weights = plan.folder.place / file_names.HUGGINGFACE_DIR
    config = trainer.config
    nbytes = load_hf(
        trainer.chunks, weights, optimizer=optimizer, strict_model=config.strict_model, timeout_s=config.timeout_s
    ).nbytes
    if "optimizer" in contents and has_quantized(trainer.chunks):
        write_weights(trainer.chunks, trainer.optimizer)
    return nbytes


def _takes_hf_weights(trainer: Trainer) -> bool:
    contents = trainer.config.load_contents
    return "hf_model" in contents and "model" not in contents


def _load_foreign(trainer: Trainer, kind: str, path: Path, started: float) -> LoadResult:
    # Imported here because the module imports megatron, but this package can be imported without megatron.
    from mcore_ckpt.load.foreign import load_foreign

    loaded = load_foreign(trainer, kind, path)
    _make_consistent(trainer, always=loaded.was_quantized and "optimizer" in trainer.config.load_contents)
    return foreign_result(trainer, path, loaded, started)


def _changes_model(trainer: Trainer) -> bool:
    return optimizer_state.changes_model(trainer.optimizer)


def _newer(skipped: Sequence[str]) -> str:
    return "".join(f"\n  newer, but not loaded either: {text}" for text in skipped)


def _final(
    error: CheckpointError, skipped: Sequence[str], changed: bool, is_first: bool, last_resort: str
) -> CheckpointError:
    state = (
        "Model and optimizer are now undefined: load another checkpoint before training continues"
        if changed
        else "Nothing has been changed: load another checkpoint"
    )
    # Do not call the step in `last_resort` older. It is older than the first step that was tried, but if the last step
    # that was tried is pinned, the step in `last_resort` may be newer than that last step.
    left = f"\n  not tried: {last_resort}" if last_resort else ""
    # An older checkpoint is tried only if a newer checkpoint is damaged. So report the damage, even if the older
    # checkpoint is intact but does not fit.
    after_damage = not is_first and isinstance(error, (CheckpointMismatchError, CheckpointNotFoundError))
    message = f"{error}. {state}{_newer(skipped)}{left}"
    return CheckpointCorruptError(message) if after_damage else reworded(error, message)


def _verify_together(trainer: Trainer, folder: Folder) -> None:
    """Verifies every file of the checkpoint. The ranks divide the files among themselves."""

    def work() -> Record:
        manifest = folder.manifest()
        _verify_share(trainer, folder, manifest.files)
        return {"attempt": manifest.attempt}

    def combine(records: Sequence[Record]) -> Record:
        return same_everywhere(records, f"{folder}: the checkpoint seen there (is it one shared file system?)")

    decide(trainer.agreement, f"verifying {folder}", work, combine)


def _verify_share(trainer: Trainer, folder: Folder, files: Sequence[FileRecord]) -> None:
    """Verifies this rank's share of some files. Raises CheckpointCorruptError."""
    largest_first = sorted(files, key=lambda file: (-file.size, file.path))
    if damages := folder.verify(largest_first[trainer.agreement.rank :: trainer.topology.world_size]):
        more = f" (and {len(damages) - 1} more: see mcore-ckpt verify)" if len(damages) > 1 else ""
        raise CheckpointCorruptError(damages[0].problem + more)


def _plan_together(
    trainer: Trainer,
    folder: Folder,
    verify: str,
    loaded_parts: Set[str],
    check_extra: Callable[[Mapping[str, Any] | None], object] | None,
) -> LoadPlan:
    def plan() -> tuple[LoadPlan, Record]:
        if trainer.config.load_replicas == "broadcast":
            refuse_broadcast(trainer.chunks, trainer.replicas, "load_replicas='broadcast'")
        if _takes_hf_weights(trainer) and not isinstance(folder, LocalFolder):
            raise UnsupportedError(
                f"{folder}: load_contents names the weights in {file_names.HUGGINGFACE_DIR}/, but they cannot be read "
                "from a remote store: put 'model' into load_contents, or copy the folder to a local disk"
            )
        if _takes_hf_weights(trainer) and "optimizer" in trainer.config.load_contents and _changes_model(trainer):
            raise UnsupportedError(
                f"{folder}: load_contents names 'optimizer' and the weights in {file_names.HUGGINGFACE_DIR}/, but with "
                "this optimizer each main parameter belongs to the weight that it was saved with: put 'model' into "
                "load_contents"
            )
        own = plan_load(trainer, folder, loaded_parts)
        if check_extra is not None:
            check_extra(own.extra_state)
        if _takes_hf_weights(trainer):
            exported = own.manifest.files_of("huggingface")
            folder.check(exported)
            if verify == "read":  # nothing checks these bytes while they are loaded
                _verify_share(trainer, folder, exported)
        groups = None if own.common is None else own.common.groups.to_record()
        report = {"attempt": own.manifest.attempt, "used": own.used, "new_moments": own.new_moments, "groups": groups}
        return own, report

    def check(own: LoadPlan, reports: Sequence[Record]) -> Record:
        seen = [{"attempt": report["attempt"]} for report in reports]
        same_everywhere(seen, f"{folder}: the checkpoint seen there (is it one shared file system?)")
        check_all_used(trainer, own, [report["used"] for report in reports])
        groups = None if own.common is None else own.common.groups.decide([report["groups"] for report in reports])
        new_moments = sorted({number for report in reports for number in report["new_moments"]})
        return {"new_moments": new_moments, "groups": groups}

    own, outcome = plan_together(trainer.agreement, f"checking {folder}", plan, check)
    return own.with_groups(outcome["groups"]).with_new_moments(outcome["new_moments"])


@contextmanager
def _naming(folder: Folder) -> Iterator[None]:
    """Turns every error of the block into an error of this package that names the folder."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder}: {type(error).__name__}: {error}") from error


def _apply_small_state(trainer: Trainer, plan: LoadPlan) -> None:
    """Restores the optimizer's step numbers and param groups, and the scheduler, which are not stored as tensors."""
    for part, state, keep_main in plan.newly_started:
        part.forget_state_of(state.key, keep_main)
    if plan.common is not None:
        common, groups = plan.common, len(plan.common.groups.saved.groups)
        write_common(trainer.optimizer, trainer.lr_scheduler, common.optimizers, common.lr_scheduler, groups)
        optimizer_state.refresh(trainer.optimizer)


def _apply_rng(trainer: Trainer, plan: LoadPlan) -> None:
    if plan.rng is not None:
        write_rng(plan.rng)
    if plan.seed is not None:
        write_seed(plan.seed, plan.manifest.step, trainer.coordinates.pp)


def _make_consistent(trainer: Trainer, always: bool = False) -> None:
    """Makes the model and the main parameters agree after a load.

    All ranks call this function.

        loaded                                      made consistent by setting
        model alone                                 main parameters from the model
        main parameters alone                       model from main parameters
        both, and `always` or quantized weights     model from main parameters
        both, and `_changes_model`                  nothing, but the ranks gather the weights that the load has changed
    """
    contents, optimizer = trainer.config.load_contents, trainer.optimizer
    forget_caches(trainer.chunks)
    if "model" in contents and "optimizer" not in contents and optimizer is not None:
        # Otherwise the next optimizer step would write the old main parameters over the loaded weights.
        optimizer_state.follow_model(optimizer)
    # A load fills only the main parameters of quantized weights, so make these weights from the main parameters.
    from_mains = always or "model" not in contents or (optimizer is not None and has_quantized(trainer.chunks))
    if from_mains and ("model" in contents or "optimizer" in contents):
        write_weights(trainer.chunks, optimizer)
    elif "optimizer" in contents and _changes_model(trainer):
        gather_parameters(trainer.chunks)
