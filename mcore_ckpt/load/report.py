"""The report and the result of a load, and the messages that a load logs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.formats.native.folder import Folder
from mcore_ckpt.load.plan import LoadPlan
from mcore_ckpt.load.same_model import warn_of_other_model
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.param_groups import NO_CHANGES, GroupChanges
from mcore_ckpt.state.trainer import Trainer

if TYPE_CHECKING:
    from mcore_ckpt.load.foreign import ForeignLoad

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """Report of one load on this rank.

    Attributes:
        path: the checkpoint's folder, or its URL if the checkpoint came from the remote store.
        nbytes: the number of bytes that this rank read from tensor files.
        seconds: the time from the call until all ranks have agreed on the result.
        skipped: for each newer checkpoint that was not loaded, the reason; the newest first.
        rounded: for each kind of rounding, such as "exp_avg: float32 to bfloat16", the number of this rank's tensors
            with rounded values. No other value lost precision.
        new_moments: the kinds of the chained optimizers that start with new moments (`reset_moments`).
        other_model: the differences that make the model compute something else with the checkpoint's tensors, such as
            "num_attention_heads is 4 in the checkpoint and 2 here" (`strict_model`).
        kept_groups: the param groups that keep the run's rates, because the checkpoint has no counterpart for them.
    """

    path: Path | str
    nbytes: int
    seconds: float
    skipped: tuple[str, ...]
    rounded: Mapping[str, int] = field(default_factory=dict)
    new_moments: tuple[str, ...] = ()
    other_model: tuple[str, ...] = ()
    kept_groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadResult:
    """Result of one load: the step, the caller's own state and the report.

    Attributes:
        step: the step of the loaded checkpoint.
        extra_state: the dict that this rank gave to `save`, or None. Its data positions are `ShardedPosition`s again.
        report: what the load did on this rank.
    """

    step: int
    extra_state: dict[str, Any] | None
    report: LoadReport


def native_result(trainer: Trainer, plan: LoadPlan, nbytes: int, skipped: Sequence[str], started: float) -> LoadResult:
    """Returns the result of a load, and logs warnings about what has changed for the training."""
    _warn_of_new_layout(trainer, plan)
    warn_of_other_model(trainer, plan.folder, plan.other_model)
    rounded = Counter(fill.rounding for fill in plan.fills if fill.rounding is not None)
    _warn_of_roundings(trainer, plan.folder, rounded)
    groups = NO_CHANGES if plan.common is None else plan.common.changes
    report = LoadReport(
        path=plan.folder.place,
        nbytes=nbytes,
        seconds=time.monotonic() - started,
        skipped=tuple(skipped),
        rounded=dict(rounded),
        new_moments=_started_anew(trainer, plan),
        other_model=tuple(each.text for each in plan.other_model),
        kept_groups=groups.kept,
    )
    _tell(trainer, plan.manifest.step, report, groups)
    return LoadResult(plan.manifest.step, plan.extra_state, report)


def foreign_result(trainer: Trainer, path: Path, loaded: ForeignLoad, started: float) -> LoadResult:
    """Returns the result of loading another program's checkpoint, and logs warnings about this load."""
    warn_of_other_model(trainer, path, loaded.other_model)
    _warn_of_roundings(trainer, path, loaded.rounded)
    report = LoadReport(
        path=path,
        nbytes=loaded.nbytes,
        seconds=time.monotonic() - started,
        skipped=(),
        rounded=loaded.rounded,
        other_model=tuple(each.text for each in loaded.other_model),
        kept_groups=loaded.groups.kept,
    )
    _tell(trainer, loaded.step, report, loaded.groups)
    return LoadResult(loaded.step, None, report)


def _tell(trainer: Trainer, step: int, report: LoadReport, groups: GroupChanges) -> None:
    if not trainer.agreement.is_coordinator:
        return
    groups.warn(report.path)
    contents = ", ".join(trainer.config.load_contents)
    logger.info("loaded step %d of %s from %s in %.1f s: %s", step, trainer.role, report.path, report.seconds, contents)


def _warn_of_roundings(trainer: Trainer, place: Folder | Path, rounded: Mapping[str, int]) -> None:
    if rounded and trainer.agreement.is_coordinator:
        logger.warning("%s: values were rounded: %s", place, ", ".join(sorted(rounded)))


def _warn_of_new_layout(trainer: Trainer, plan: LoadPlan) -> None:
    saved, now = plan.manifest.topology, trainer.topology
    moved = (saved.cp, saved.dp) != (now.cp, now.dp) or plan.seed is not None
    if "extra" not in trainer.config.load_contents or not moved or not trainer.agreement.is_coordinator:
        return
    generators = "of a rank continue those of one saved rank" if plan.seed is None else "start anew from the saved seed"
    logger.warning(
        "%s was saved on %s and is loaded on %s: dropout and other random choices differ from a run that keeps its "
        "layout, because the random number generators %s; extra_state: %s",
        plan.folder,
        saved,
        now,
        generators,
        _deal(saved, now),
    )


def _deal(saved: Topology, now: Topology) -> str:
    """Returns a text that says from which saved rank each rank takes its extra_state (`Topology.place_in_turn`)."""
    texts = ["each rank takes that of the saved rank at its place"]
    for axis in ("pp", "tp", "cp", "dp"):
        before, after = getattr(saved, axis), getattr(now, axis)
        if after > before:
            texts.append(
                f"{axis} rank {before} takes that of {axis} rank 0{', and so on' if after > before + 1 else ''}"
            )
        elif after < before:
            texts.append(
                f"no rank takes that of {axis} rank {after}{f' to {before - 1}' if before > after + 1 else ''}"
            )
    return "; ".join(texts)


def _started_anew(trainer: Trainer, plan: LoadPlan) -> tuple[str, ...]:
    if plan.common is None:
        return ()
    parts = zip(optimizer_parts(trainer.optimizer), plan.common.optimizers, strict=True)
    return tuple(part.kind_name for part, saved in parts if saved.starts_anew)
