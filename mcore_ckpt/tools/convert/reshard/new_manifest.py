"""Makes the manifest of a checkpoint that a tool has written."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.checkpoint.manifest import AdapterSettings, FileRecord, Manifest, StageRecord, WrittenFile
from mcore_ckpt.checkpoint.manifest_text import NO_TENSORS, Holds
from mcore_ckpt.checkpoint.versions import package_versions
from mcore_ckpt.ranks.topology import coordinates_of
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.plan import runs
from mcore_ckpt.tools.convert.reshard.streaming import FileNames
from mcore_ckpt.tools.convert.reshard.target import Target


@dataclass(frozen=True)
class Identity:
    """The entries of a manifest that cannot be derived from the written files.

    Attributes:
        step: the step.
        role: the role.
        roles: all roles of the step.
        attempt: the id of the attempt that writes the checkpoint.
        contents: the contents of the checkpoint: `model`, `optimizer`, ...
        versions: package versions of the training, such as megatron's. They replace those of this process.
        adapters: the settings of low-rank adapters.
        model: what the model computes with its tensors.
    """

    step: int
    role: str
    roles: tuple[str, ...]
    attempt: str
    contents: tuple[str, ...]
    versions: Mapping[str, str]
    adapters: AdapterSettings | None = None
    model: Mapping[str, Any] | None = None


def build_manifest(
    identity: Identity, target: Target, indexed: Sequence[FileNames], small: Sequence[tuple[int, WrittenFile]]
) -> Manifest:
    """Makes the manifest of the written files.

    Args:
        identity: the entries that cannot be derived from the files.
        target: the layout of the checkpoint.
        indexed: the files that hold tensors.
        small: the other files, each with the rank that the manifest records as its writer.
    """
    topology = target.topology
    names = tuple(sorted({name for entry in indexed for name in entry.names}, key=natural_order))
    position = {name: number for number, name in enumerate(names)}
    records = [
        _record(entry.file, entry.rank, Holds(runs(position[name] for name in entry.names))) for entry in indexed
    ]
    return Manifest(
        step=identity.step,
        role=identity.role,
        roles=identity.roles,
        attempt=identity.attempt,
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
    )


def _record(file: WrittenFile, rank: int, holds: Holds) -> FileRecord:
    return FileRecord(file.path, file.kind, rank, file.size, file.crc32, file.index, holds)
