"""Builds the manifest of a save on rank 0, from the reports of all ranks, and writes `common.pt`."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, IndexPlace, Manifest, StageRecord
from mcore_ckpt.checkpoint.manifest_text import NO_TENSORS, Holds
from mcore_ckpt.checkpoint.placement import Placement
from mcore_ckpt.checkpoint.plain_files import pickle_plain, write_plain
from mcore_ckpt.checkpoint.versions import package_versions
from mcore_ckpt.errors import CommitError
from mcore_ckpt.io.files import sync_dir
from mcore_ckpt.ranks.node_map import NodeMap
from mcore_ckpt.ranks.topology import RankCoordinates
from mcore_ckpt.save.group_lists import add_members
from mcore_ckpt.save.rank_reports import FileReport, RankReport, TensorNames
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.param_groups import read_param_groups
from mcore_ckpt.state.scheduler import read_scheduler
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import commit


def build_manifest(
    trainer: Trainer,
    names: TensorNames,
    staging: Path,
    common: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    step: int,
    roles: tuple[str, ...],
    attempt: str,
    reports: Sequence[RankReport],
    save_count: int = 0,
) -> Manifest:
    """Checks that all reported files are there, writes `common.pt`, and returns the manifest.

    Args:
        trainer: the objects to save.
        names: the tensor names that rank 0 knows. This function adds the names in the reports.
        staging: the staging folder of the save.
        common: the state that all ranks share (`read_common`). This function adds the optimizers' steps and the
            members of their param groups.
        groups: the keys of the param groups in `common`, by optimizer.
        step, roles, attempt: values that the manifest contains unchanged.
        reports: the report of each rank, by rank.
        save_count: see `Placement`. It is for the fast tier.

    In the fast tier, rank 0 sees only the files of its own node, so each node checks its own (`fast/transaction.py`).

    Raises:
        CommitError: a file is missing or has the wrong size, or the ranks' reports contradict each other.
        OSError: `common.pt` cannot be written.
    """
    files = [(rank, file) for rank, report in enumerate(reports) for file in report.files]
    nodes = trainer.nodes
    if nodes is None:
        commit.check_files(staging, files)
    commit.check_structures(
        [report.parts for report in reports], nodes.number_of if nodes is not None else lambda rank: 0
    )
    for report in reports:
        names.receive(report.names)
    if "optimizer" in trainer.config.save_contents:
        add_members(common["optimizers"], groups, names.groups(report.groups for report in reports))
        for number, part in enumerate(common["optimizers"]):
            part["step"] = _common_step(number, [report.steps[number] for report in reports])
        file = write_plain(staging, file_names.COMMON_FILE, "common", pickle_plain(common))
        sync_dir((staging / file.path).parent)
        files.append((trainer.agreement.rank, FileReport.of(file)))
    placement = None
    if nodes is not None and trainer.config.fast is not None:
        files, placement = place_files(files, nodes, trainer.config.fast.replicas, save_count)
    in_order, holds = names.in_order(file.holds for _, file in files if file.holds)
    stages = {(pp, vp): StageRecord(pp, vp, *layers) for report in reports for pp, vp, *layers in report.stages}
    return Manifest(
        step=step,
        role=trainer.role,
        roles=roles,
        attempt=attempt,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=package_versions(),
        contents=_contents(trainer),
        topology=trainer.topology,
        ranks=tuple(RankCoordinates(*report.coordinates) for report in reports),
        stages=tuple(stage for _, stage in sorted(stages.items())),
        tensors=in_order,
        files=tuple(_record(rank, file, holds) for rank, file in files),
        adapters=trainer.adapters,
        model=trainer.model or None,
        placement=placement,
    )


def _contents(trainer: Trainer) -> tuple[str, ...]:
    """Returns what the checkpoint has. HuggingFace models are made only of steps in the root."""
    words = trainer.config.save_contents
    if trainer.nodes is None or "hf_model" not in words:
        return words
    return tuple(dict.fromkeys("model" if word == "hf_model" else word for word in words))


def read_common(trainer: Trainer) -> dict[str, Any]:
    """Returns the optimizer and scheduler state that all ranks share.

    The optimizers' steps and the members of their groups are not in it, because rank 0 may not know them.
    """
    return {
        "optimizers": [
            {
                "kind": part.kind_name,
                "param_groups": read_param_groups(part),
                "grad_scaler": optimizer_state.read_grad_scaler(part),
            }
            for part in optimizer_parts(trainer.optimizer)
        ],
        "lr_scheduler": read_scheduler(trainer.lr_scheduler),
    }


def _record(rank: int, file: FileReport, holds: Mapping[str, Holds]) -> FileRecord:
    index = None if file.index is None else IndexPlace(*file.index)
    held = holds[file.holds] if file.holds else NO_TENSORS
    return FileRecord(file.path, file.kind, rank, file.size, file.crc32, index, held)


def _common_step(part: int, by_rank: Sequence[float | int | None]) -> float | int | None:
    """Returns the step of one chained optimizer. A rank that owns none of its parameters has reported None."""
    known = {step for step in by_rank if step is not None}
    if len(known) > 1:
        first_ranks = {step: by_rank.index(step) for step in sorted(known)}
        raise CommitError(
            f"optimizer {part} has done different numbers of steps on different ranks: {first_ranks} (number of steps: "
            "first rank that has done so many): load a checkpoint on all ranks before training continues"
        )
    return known.pop() if known else None


logger = logging.getLogger(__name__)

Written = tuple[int, FileReport]


def place_files(
    written: Sequence[Written], nodes: NodeMap, replicas: int, save_count: int
) -> tuple[list[Written], Placement]:
    """Chooses the nodes of each file.

    Data-parallel replicas on several nodes have written the same file. It counts once, and the nodes that have it need
    no copy.

    Args:
        written: the files, each with the rank that has written it, in the order of the ranks.
        nodes: the nodes of the job.
        replicas: how many other nodes shall have each file.
        save_count: see `Placement`.

    Returns:
        The files without repetitions, and the placement of these files.
    """
    first: dict[str, Written] = {}
    holders: dict[str, list[int]] = {}
    for rank, file in written:
        number = nodes.number_of(rank)
        known = first.setdefault(file.path, (rank, file))
        if (known[1].crc32, known[1].size) != (file.crc32, file.size):
            logger.warning(
                "%s: ranks %d and %d have different bytes, although they are replicas: %s gets a copy of rank %d's",
                file.path,
                known[0],
                rank,
                nodes.all[number].name,
                known[0],
            )
            continue
        holders.setdefault(file.path, []).append(number)
    by_file = tuple(_with_copies(nodes, holders[path], replicas) for path in first)
    names = tuple(node.name for node in nodes.all)
    return list(first.values()), Placement(names, by_file, save_count)


def _with_copies(nodes: NodeMap, holders: Sequence[int], replicas: int) -> tuple[int, ...]:
    found = list(dict.fromkeys(holders))
    for other in nodes.preferred(found[0]):
        if len(found) > replicas:
            break
        if other not in found:
            found.append(other)
    return tuple(found)
