"""Parts of a step that are no model's: what a framework keeps beside the weights, committed as one more role."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, WrittenFile
from mcore_ckpt.checkpoint.versions import package_versions
from mcore_ckpt.ranks.topology import RankCoordinates, Topology


def manifest_of(
    role: str, step: int, roles: Sequence[str], attempt: str, files: Sequence[tuple[int, WrittenFile]], world: int
) -> Manifest:
    """The manifest of a part that has files and no tensors.

    Args:
        role: the part's name.
        step: its number.
        roles: of which the step is made, this one included or not.
        attempt: of this save.
        files: what each rank has written.
        world: how many ranks took part.
    """
    return Manifest(
        step=step,
        role=role,
        roles=tuple(dict.fromkeys([*roles, role])),
        attempt=attempt,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=package_versions(),
        contents=(),
        topology=Topology(world_size=world, dp=world),
        ranks=tuple(RankCoordinates(dp=rank) for rank in range(world)),
        stages=(),
        tensors=(),
        files=tuple(FileRecord(file.path, file.kind, rank, file.size, file.crc32) for rank, file in files),
    )
