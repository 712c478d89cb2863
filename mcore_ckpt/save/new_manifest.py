"""Builds the manifest of a save on rank 0, from the reports of all ranks, and writes `common.pt`."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_ckpt import json_bounds
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, IndexPlace, Manifest, StageRecord
from mcore_ckpt.checkpoint.manifest_text import NO_TENSORS, Holds
from mcore_ckpt.checkpoint.plain_files import pickle_plain, write_plain
from mcore_ckpt.checkpoint.versions import package_versions
from mcore_ckpt.errors import CommitError
from mcore_ckpt.io.files import sync_dir
from mcore_ckpt.ranks.topology import RankCoordinates
from mcore_ckpt.save.destination import Place
from mcore_ckpt.save.rank_reports import FileReport, GroupId, RankReport, TensorNames
from mcore_ckpt.sharding.plan import runs
from mcore_ckpt.sharding.stored_positions import check_replicas
from mcore_ckpt.state.trainer import Trainer


def build_manifest(
    trainer: Trainer,
    names: TensorNames,
    place: Place,
    common: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    step: int,
    roles: tuple[str, ...],
    contents: tuple[str, ...],
    reports: Sequence[RankReport],
    metrics: Mapping[str, float] | None = None,
) -> Manifest:
    """Checks that all reported files are there, writes `common.pt`, and returns the manifest.

    Args:
        trainer: the objects to save.
        names: the tensor names that rank 0 knows. This function adds the names in the reports.
        place: where the save goes.
        common: the state that all ranks share (`small_files.read_common`). This function adds the optimizers' steps
            and the members of their param groups.
        groups: the keys of the param groups in `common`, by optimizer.
        step, roles, contents: values that the manifest contains unchanged.
        reports: the report of each rank, by rank.
        metrics: the checkpoint's metrics, by name.

    Raises:
        CommitError: a file is missing or has the wrong size, or the ranks' reports contradict each other.
        OSError: `common.pt` cannot be written.
    """
    files = [(rank, file) for rank, report in enumerate(reports) for file in report.files]
    place.check(files, [report.structures for report in reports])
    ranks = tuple(RankCoordinates(*report.coordinates) for report in reports)
    check_replicas([report.positions for report in reports], [at.dp for at in ranks])
    for report in reports:
        names.receive(report.names)
    if "optimizer" in trainer.config.save_contents:
        add_members(common["optimizers"], groups, names.groups(report.groups for report in reports))
        for number, optimizer in enumerate(common["optimizers"]):
            optimizer["step"] = _common_step(number, [report.steps[number] for report in reports])
        file = write_plain(place.attempt.staging, file_names.COMMON_FILE, "common", pickle_plain(common))
        sync_dir((place.attempt.staging / file.path).parent)
        files.append((trainer.agreement.rank, FileReport.of(file)))
    placed, placement = place.placed(files)
    in_order, holds = names.in_order(file.holds for _, file in placed if file.holds)
    stages = {(pp, vp): StageRecord(pp, vp, *layers) for report in reports for pp, vp, *layers in report.stages}
    return Manifest(
        step=step,
        role=trainer.role,
        roles=roles,
        attempt=place.attempt.number,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=package_versions(),
        contents=contents,
        topology=trainer.topology,
        ranks=ranks,
        stages=tuple(stage for _, stage in sorted(stages.items())),
        tensors=in_order,
        files=tuple(_record(rank, file, holds) for rank, file in placed),
        adapters=trainer.adapters,
        model=trainer.model or None,
        placement=placement,
        metrics=metrics or {},
        parts=_parts_of(trainer.parts.declared, [report.step_parts for report in reports]),
    )


def _parts_of(declared: Sequence[str], by_rank: Sequence[Sequence[str]]) -> dict[str, list[tuple[int, int]]]:
    """Returns each part of the step with the ranks that have saved it.

    Raises CommitError if a declared part is missing.
    """
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(by_rank):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    if missing := [name for name in declared if name not in ranks]:
        raise CommitError(
            f"no rank has saved part {missing[0]!r}, which CheckpointConfig.parts declares: attach it with save= "
            "before the save, on the ranks that have it, or remove it from parts"
        )
    return {name: runs(of_part) for name, of_part in sorted(ranks.items())}


def _record(rank: int, file: FileReport, holds: Mapping[str, Holds]) -> FileRecord:
    index = None if file.index is None else IndexPlace(*file.index)
    held = holds[file.holds] if file.holds else NO_TENSORS
    return FileRecord(file.path, file.kind, rank, file.size, file.crc32, index, held)


def _common_step(optimizer: int, by_rank: Sequence[float | int | None]) -> float | int | None:
    """Returns how many steps one chained optimizer has done.

    A rank that owns none of the optimizer's parameters has reported None.
    """
    known = {step for step in by_rank if step is not None}
    if len(known) > 1:
        first_ranks = {step: by_rank.index(step) for step in sorted(known)}
        raise CommitError(
            f"optimizer {optimizer} has done different numbers of steps on different ranks: {first_ranks} (number of "
            "steps: first rank that has done so many): load a checkpoint on all ranks before training continues"
        )
    return known.pop() if known else None


def add_members(
    optimizers: Sequence[dict[str, Any]], keys: Sequence[Sequence[str]], members: Mapping[GroupId, list[str]]
) -> None:
    """Adds the members of the param groups to each optimizer's state in `common.pt`. `keys` has the groups' keys.

    A group that rank 0 does not have is added with the fields that are in its key. Values that the scheduler sets, such
    as the learning rate, are left out.
    """
    for optimizer, (state, of_optimizer) in enumerate(zip(optimizers, keys, strict=True)):
        others = [key for number, key in sorted(members) if number == optimizer and key not in of_optimizer]
        state["param_groups"] = [*state["param_groups"], *map(_fields_of, others)]
        state["members"] = [members.get((optimizer, key), []) for key in (*of_optimizer, *others)]


def _fields_of(key: str) -> dict[str, Any]:
    settings, marks = json_bounds.loads(key[key.index("[") :])
    tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    return {**tuples, **marks}
