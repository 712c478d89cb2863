"""Compares replicated tensors in the newest checkpoint.

Each tensor-parallel rank stores the tensors that tensor parallelism replicates, so this module can compare them.
Data-parallel replicas are stored only once, so only the training itself can compare data-parallel replicas: each save
compares some of them, or all with `verify_replicas=True`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.native.stored_tensors import StoredTensors
from mcore_ckpt.sharding.plan import MODEL, ShardKey, StoredShard
from mcore_ckpt.steps.listing import newest_complete
from mcore_ckpt.tools.examine.doctor.findings import Finding, Severity, fine

TOPIC = "replicas"


def stored_replicas(root: Path) -> list[Finding]:
    """Compares the CRCs of the newest complete step's replicated tensors. Reads the indexes, and no tensor.

    Returns one finding; none if no tensor is stored twice, or if the step cannot be read (`verify` then shows why).
    """
    compared = 0
    different: list[str] = []
    try:
        step = newest_complete(root)
        for role in sorted(step.committed) if step is not None else ():
            assert step is not None
            stored = StoredTensors.in_folder(step.role_dir(role))
            for shards in _stored_twice(stored):
                compared += 1
                if len({shard.crc32 for shard in shards}) > 1:
                    files = " and ".join(shard.file for shard in shards[:2])
                    different.append(f"{shards[0].key} of {stored.place} in {files}")
    except (CheckpointError, OSError):
        return []
    if not compared:
        return []
    if not different:
        return [fine(TOPIC, f"{compared} tensors that tensor parallelism replicates are equal in all files")]
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    advice = (
        "find out what has changed one replica; with CheckpointConfig(verify_replicas=True) each save compares all "
        "replicas"
    )
    fact = f"{len(different)} of {compared} replicated tensors differ: {different[0]}{more}"
    return [Finding(TOPIC, Severity.RISK, fact, "ranks compute with different weights", advice)]


def _stored_twice(stored: StoredTensors) -> Iterator[list[StoredShard]]:
    """Yields, for each region that several files store, the shards of this region."""
    for key in (ShardKey(name, kind) for name in stored.names for kind in (MODEL, *stored.kinds(name))):
        files = stored.files(key)
        by_place: dict[str, list[StoredShard]] = {}
        for shard in stored.shards(key, files) if len(files) > 1 else ():
            by_place.setdefault(str(shard.region), []).append(shard)
        yield from (shards for shards in by_place.values() if len(shards) > 1)
