"""Writes roles in the format of this package: from planned files, or as copies of roles that are plain files."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from mcore_ckpt.checkpoint.manifest import (
    AdapterSettings,
    FileRecord,
    Manifest,
    Parts,
    StageRecord,
    WrittenFile,
)
from mcore_ckpt.checkpoint.manifest_text import NO_TENSORS, Holds
from mcore_ckpt.checkpoint.versions import package_versions
from mcore_ckpt.formats.contract import CheckpointReader, FileReport, FileToWrite, Read, RegionRead
from mcore_ckpt.formats.locate import read_regions
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.io.files import sync_folders_below
from mcore_ckpt.ranks.topology import coordinates_of
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.plan import MODEL, ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.steps.later_metrics import metrics_of
from mcore_ckpt.tools.convert.destinations import RolesOfStep
from mcore_ckpt.tools.convert.read_back import check_written
from mcore_ckpt.tools.convert.reshard.carried_files import Copy, checked_bytes, copy_file
from mcore_ckpt.tools.convert.reshard.planner import PlannedFile
from mcore_ckpt.tools.convert.reshard.streaming import FileNames, write_planned_files
from mcore_ckpt.tools.convert.reshard.target import Target


@dataclass(frozen=True)
class Identity:
    """The entries of a manifest that do not follow from the written files.

    `versions` are package versions of the training, such as megatron's; they override the package versions of this
    process.
    """

    role: str
    contents: tuple[str, ...]
    versions: Mapping[str, str]
    adapters: AdapterSettings | None = None
    model: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    parts: Parts = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RoleWriter:
    """Writes a role in the format of this package. It satisfies `formats.contract.CheckpointWriter`.

    Attributes:
        read: a function that fills tensors with ranges of the source: the reader's `read`, or a function with more
            checks.
        copies: the files to copy from `source`, the folder of the saved role.
        write_others: a function that durably writes other small files into a folder, and returns each file with the
            rank that the manifest records as its writer.
    """

    reader: CheckpointReader
    read: Read
    planned: Sequence[PlannedFile]
    target: Target
    identity: Identity
    step: RolesOfStep
    write_others: Callable[[Path], Iterable[tuple[int, WrittenFile]]]
    copies: Sequence[Copy] = ()
    source: Path = Path()

    @cached_property
    def files(self) -> Sequence[FileToWrite]:
        planned = [FileToWrite(file.request.path, file.nbytes) for file in self.planned]
        return [*planned, *(FileToWrite(copy.path, copy.record.size) for copy in self.copies)]

    def write(self, numbers: Sequence[int], folder: Path, progress: Callable[[int], None]) -> list[FileReport]:
        planned = [number for number in numbers if number < len(self.planned)]
        written = write_planned_files(self.read, [self.planned[number] for number in planned], folder, progress)
        reports = [
            FileReport(number, names.file.size, msgspec.to_builtins(names))
            for number, names in zip(planned, written, strict=True)
        ]
        for number in numbers[len(planned) :]:
            copy = self.copies[number - len(self.planned)]
            copy_file(self.source, copy, folder)
            reports.append(FileReport(number, copy.record.size))
            progress(copy.record.size)
        return reports

    def finish(self, reports: Sequence[FileReport], folder: Path) -> None:
        indexed = [
            msgspec.convert(report.details, FileNames) for report in reports if report.number < len(self.planned)
        ]
        small = [(copy.rank, copy.written) for copy in self.copies]
        small += self.write_others(folder)
        sync_folders_below(folder)
        self.step.write_manifest(_manifest(self.identity, self.step.step, self.target, indexed, small))

    def check(self, folder: Path, part: int, parts: int) -> None:
        """Compares the written model with the source.

        Nothing else is compared: each tool with a `--test` writes only a model.
        """
        assert self.identity.contents == ("model",), "contents other than the model would not be tested"
        written = NativeReader.open(folder)

        def read(name: str, region: Region) -> torch.Tensor:
            info = written.info(ShardKey(name, MODEL))
            assert info is not None, "the manifest names the tensor"
            memory = torch.empty(region.numel, dtype=info.dtype)
            read_regions(written, [RegionRead(name, region, memory)])
            return memory

        check_written(self.reader, tuple(self.reader.names)[part::parts], read)


@dataclass(frozen=True, eq=False)
class PlainRoleWriter:
    """Copies a role that consists of plain files (`steps/role_files.py`) and has no layout, from the folder `source`.

    It satisfies `formats.contract.CheckpointWriter`.
    """

    source: Path
    manifest: Manifest
    step: RolesOfStep

    @cached_property
    def files(self) -> Sequence[FileToWrite]:
        return [FileToWrite(file.path, file.size) for file in self.manifest.files]

    def write(self, numbers: Sequence[int], folder: Path, progress: Callable[[int], None]) -> list[FileReport]:
        reports = []
        for number in numbers:
            record = self.manifest.files[number]
            copy_file(self.source, Copy(record, record.path, rank=0), folder)
            reports.append(FileReport(number, record.size))
            progress(record.size)
        return reports

    def finish(self, reports: Sequence[FileReport], folder: Path) -> None:
        sync_folders_below(folder)
        self.step.write_manifest(replace(self.manifest, metrics=metrics_of(self.source, self.manifest)))

    def check(self, folder: Path, part: int, parts: int) -> None:
        for record in self.manifest.files[part::parts]:
            for _ in checked_bytes(folder, record):
                pass


def _manifest(
    identity: Identity,
    step: int,
    target: Target,
    indexed: Sequence[FileNames],
    small: Sequence[tuple[int, WrittenFile]],
) -> Manifest:
    """Makes the manifest of a role. `RolesOfStep.write_manifest` adds the step's roles and attempt.

    `indexed` are the files with tensors. `small` are the other files, each with the rank of its writer.
    """
    topology = target.topology
    names = tuple(sorted({name for entry in indexed for name in entry.names}, key=natural_order))
    position = {name: number for number, name in enumerate(names)}
    records = [_record(entry.file, entry.rank, Holds.of(position[name] for name in entry.names)) for entry in indexed]
    return Manifest(
        step=step,
        role=identity.role,
        roles=(identity.role,),
        attempt="",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={**package_versions(), **identity.versions},
        contents=identity.contents,
        topology=topology,
        ranks=tuple(coordinates_of(rank, topology) for rank in range(topology.world_size)),
        stages=tuple(StageRecord(pp, vp, held.decoder, held.mtp) for (pp, vp), held in sorted(target.stages.items())),
        tensors=names,
        files=(*records, *(_record(file, rank, NO_TENSORS) for rank, file in small)),
        adapters=identity.adapters,
        model=identity.model,
        metrics=identity.metrics,
        dropped=identity.dropped,
        parts=identity.parts,
    )


def _record(file: WrittenFile, rank: int, holds: Holds) -> FileRecord:
    return FileRecord(file.path, file.kind, rank, file.size, file.crc32, file.index, holds)
