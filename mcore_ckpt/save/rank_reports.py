"""What ranks tell rank 0 of a save, and what it makes of it: the file all ranks share, and the manifest."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, IndexPlace, Manifest, StageRecord, WrittenFile
from mcore_ckpt.checkpoint.plain_files import pickle_plain, write_plain
from mcore_ckpt.checkpoint.versions import package_versions
from mcore_ckpt.errors import CommitError
from mcore_ckpt.formats.native.file_plan import FilePlan
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.ranks.topology import RankCoordinates
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.plan import runs
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.scheduler import read_scheduler
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import commit


class TensorNames:
    """The names of the tensors in each rank's files, by digest: told to rank 0 once, not at every save.

    With thousands of ranks of thousands of tensors, they would be nearly all that a commit says.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._known: dict[str, tuple[str, ...]] = {}
        self._order: tuple[frozenset[str], tuple[str, ...], dict[str, tuple[tuple[int, int], ...]]] | None = None

    def to_tell(self, plans: Iterable[FilePlan]) -> dict[str, list[str]]:
        return {plan.holds: list(plan.names) for plan in plans if plan.holds not in self._told}

    def were_told(self, plans: Iterable[FilePlan]) -> None:
        """A save is committed, so rank 0 has what it was told."""
        self._told.update(plan.holds for plan in plans)

    def learn(self, told: Mapping[str, Sequence[str]]) -> None:
        self._known.update({digest: tuple(names) for digest, names in told.items()})

    def in_order(self, digests: Iterable[str]) -> tuple[tuple[str, ...], dict[str, tuple[tuple[int, int], ...]]]:
        """All names, in the manifest's order, and what each digest stands for as runs of positions in them.

        Raises CommitError for a digest that rank 0 was never told the names of.
        """
        wanted = frozenset(digests)
        if self._order is None or self._order[0] != wanted:
            if missing := wanted - self._known.keys():
                raise CommitError(f"rank 0 was not told the names of the tensors of {len(missing)} files")
            names = sorted({name for digest in wanted for name in self._known[digest]}, key=natural_order)
            position = {name: number for number, name in enumerate(names)}
            holds = {digest: tuple(runs(position[name] for name in self._known[digest])) for digest in wanted}
            self._order = (wanted, tuple(names), holds)
        return self._order[1], self._order[2]


def report(
    trainer: Trainer,
    written: Iterable[WrittenFile],
    plans: Iterable[FilePlan],
    names: Mapping[str, list[str]],
    steps: Sequence[float | int | None],
) -> Record:
    """What one rank tells rank 0 when its bytes are on the disk."""
    return {
        "files": [asdict(file) for file in written],
        "parts": {plan.path: plan.structure for plan in plans},
        "names": dict(names),
        "coordinates": asdict(trainer.coordinates),
        "stages": [asdict(stage) for stage in trainer.stages],
        "steps": list(steps),
    }


def build_manifest(
    trainer: Trainer,
    names: TensorNames,
    staging: Path,
    common: Mapping[str, Any],
    step: int,
    roles: tuple[str, ...],
    attempt: str,
    records: Sequence[Record],
) -> Manifest:
    """Rank 0's part before the commit. Raises CommitError, OSError."""
    files = [(rank, _written(item)) for rank, record in enumerate(records) for item in record["files"]]
    commit.check_files(staging, files)
    commit.check_structures([record["parts"] for record in records])
    if "optimizer" in trainer.config.save_contents:
        for number, part in enumerate(common["optimizers"]):
            part["step"] = _common_step(number, [record["steps"][number] for record in records])
        file = write_plain(staging, file_names.COMMON_FILE, "common", pickle_plain(common))
        files.append((trainer.agreement.rank, file))
    for record in records:
        names.learn(record["names"])
    in_order, holds = names.in_order(file.holds for _, file in files if file.holds)
    stages = {
        (s["pp"], s["vp"]): StageRecord(s["pp"], s["vp"], tuple(s["decoder"]), tuple(s["mtp"]))
        for r in records
        for s in r["stages"]
    }
    return Manifest(
        step=step,
        role=trainer.role,
        roles=roles,
        attempt=attempt,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=package_versions(),
        contents=trainer.config.save_contents,
        topology=trainer.topology,
        ranks=tuple(RankCoordinates(**record["coordinates"]) for record in records),
        stages=tuple(stage for _, stage in sorted(stages.items())),
        tensors=in_order,
        files=tuple(
            FileRecord(file.path, file.kind, rank, file.size, file.crc32, file.index, holds.get(file.holds, ()))
            for rank, file in files
        ),
    )


def _written(item: Record) -> WrittenFile:
    index = IndexPlace(**item["index"]) if item["index"] else None
    return WrittenFile(item["path"], item["kind"], item["size"], item["crc32"], index, item["holds"])


def read_common(trainer: Trainer) -> dict[str, Any]:
    """What all ranks share of optimizer and scheduler, but for the steps, which rank 0 may not know."""
    return {
        "optimizers": [
            {
                "kind": optimizer_state.kind_of(part),
                "param_groups": optimizer_state.read_param_groups(part),
                "grad_scaler": optimizer_state.read_grad_scaler(part),
            }
            for part in optimizer_state.optimizer_parts(trainer.optimizer)
        ],
        "lr_scheduler": read_scheduler(trainer.lr_scheduler),
    }


def _common_step(part: int, by_rank: Sequence[float | int | None]) -> float | int | None:
    """The step of one chained optimizer: ranks that own nothing do not know it."""
    known = {step for step in by_rank if step is not None}
    if len(known) > 1:
        told = {step: by_rank.index(step) for step in sorted(known)}
        raise CommitError(
            f"optimizer {part} has done different numbers of steps on different ranks: {told} (step: first rank)"
        )
    return known.pop() if known else None
