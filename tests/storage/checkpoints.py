"""Small checkpoints of a few ranks, written and read back by the storage layer alone, without megatron."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt import layout
from mcore_ckpt.sharding.plan import ReadRange, ShardKey, runs
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.staging.arena import Arena
from mcore_ckpt.staging.copy import as_bytes
from mcore_ckpt.staging.host_image import ImageCache, fill_image
from mcore_ckpt.storage import commit, steps
from mcore_ckpt.storage.agreement import Agreement, Record
from mcore_ckpt.storage.files import sync_dir
from mcore_ckpt.storage.manifest import FileRecord, IndexPlace, Manifest, encode_manifest
from mcore_ckpt.storage.reader import RangeReader, read_index, read_manifest, read_plain
from mcore_ckpt.storage.requests import TensorWrite, WriteRequest, WrittenFile
from mcore_ckpt.storage.transaction import commit_together
from mcore_ckpt.storage.writer import write_image, write_plain
from mcore_ckpt.topology import RankCoordinates, Topology

ROLE = "actor"

# In hexadecimal, as an attempt's id is.
ATTEMPT = "a" * 32

# The first is of more than one CRC block, the others are not whole pages.
SHAPES = {"embedding.weight": (521, 577), "decoder.norm.weight": (577,), "decoder.bias": (3,)}


def tensors(version: int, rank: int) -> dict[str, torch.Tensor]:
    """What a rank holds in a version of the state: no two ranks or versions hold the same."""
    generator = torch.Generator().manual_seed(1000 * version + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def small_state(version: int, rank: int) -> dict[str, Any]:
    return {"version": version, "rank": rank, "seen": list(range(version))}


def write_files(staging: Path, rank: int, version: int) -> list[WrittenFile]:
    """One rank's files: an indexed one of its own, and a small one."""
    writes = tuple(
        TensorWrite(
            ("state", name, "exp_avg"), ShardKey(name, "exp_avg"), Region.whole(tuple(t.shape)), t, (t.numel(),)
        )
        for name, t in tensors(version, rank).items()
    )
    request = WriteRequest(layout.optimizer_file(0, 0, 0, rank), "optimizer", writes, tree=("state",))
    host = fill_image(request, ImageCache(), Arena())
    written = [
        write_image(staging, request, host.image, host.buffer),
        write_plain(staging, layout.rng_file(0, 0, 0, rank), "rng", small_state(version, rank)),
    ]
    for folder in {(staging / file.path).parent for file in written}:
        sync_dir(folder)
    return written


def manifest_of(
    files: Sequence[tuple[int, WrittenFile]], world: int, step: int, attempt: str, role: str, roles: Sequence[str]
) -> Manifest:
    names = tuple(SHAPES)
    position = {name: number for number, name in enumerate(names)}
    return Manifest(
        step=step,
        role=role,
        roles=tuple(roles),
        attempt=attempt,
        created="2025-01-01T00:00:00+00:00",
        versions={"torch": str(torch.__version__)},
        contents=("optimizer", "extra"),
        topology=Topology(world_size=world, dp=world),
        ranks=tuple(RankCoordinates(dp=rank) for rank in range(world)),
        stages=(),
        tensors=names,
        files=tuple(
            FileRecord(
                file.path,
                file.kind,
                rank,
                file.size,
                file.crc32,
                file.index,
                tuple(runs(position[name] for name in file.names)),
            )
            for rank, file in files
        ),
    )


def save_together(agreement: Agreement, root: Path, step: int, version: int, keep: int | None = None) -> None:
    """One rank's part of a save, as saving.save_checkpoint does it."""

    def write(staging: Path) -> Record:
        return {"files": [asdict(file) for file in write_files(staging, agreement.rank, version)]}

    def describe(staging: Path, attempt: str, records: Sequence[Record]) -> Manifest:
        files = [(rank, _written(item)) for rank, record in enumerate(records) for item in record["files"]]
        commit.check_files(staging, files)
        return manifest_of(files, agreement.world_size, step, attempt, ROLE, (ROLE,))

    role_dir = layout.step_dir(root, step) / ROLE
    topic = f"saving step {step}"
    commit_together(agreement, topic, role_dir, lambda: None, write, describe, lambda: steps.update_tracker(root))
    if keep is not None and agreement.is_coordinator:
        steps.delete_old_steps(root, keep, commit.new_attempt(), step)


def _written(item: Record) -> WrittenFile:
    index = IndexPlace(**item["index"]) if item["index"] else None
    return WrittenFile(item["path"], item["kind"], item["size"], item["crc32"], index, tuple(item["names"]))


def stage(role_dir: Path, version: int, roles: Sequence[str] | None = None) -> tuple[Path, str]:
    """A sealed staging folder of a world of one, ready for `commit.publish`; and its attempt's id."""
    attempt = commit.new_attempt()
    staging = commit.open_staging(role_dir, attempt)
    files = [(0, file) for file in write_files(staging, 0, version)]
    step = layout.parse_step(role_dir.parent.name)
    assert step is not None
    manifest = manifest_of(files, 1, step, attempt, role_dir.name, roles or (role_dir.name,))
    commit.seal(staging, encode_manifest(manifest))
    return staging, attempt


def make(role_dir: Path, version: int, roles: Sequence[str] | None = None) -> None:
    """A committed checkpoint of a world of one."""
    staging, attempt = stage(role_dir, version, roles)
    commit.publish(staging, role_dir, attempt)


def read_version(role_dir: Path) -> int:
    """Which version a checkpoint holds. Fails unless every rank's every byte is that version's."""
    manifest = read_manifest(role_dir, layout.MANIFEST_FILE)
    world = manifest.topology.world_size
    small = {file.rank: read_plain(role_dir, file) for file in manifest.files_of("rng")}
    version = small[0]["version"]
    assert small == {rank: small_state(version, rank) for rank in range(world)}
    indexed = manifest.files_of("optimizer")
    assert [file.rank for file in indexed] == list(range(world))
    for file in indexed:
        _assert_tensors(role_dir, file, tensors(version, file.rank))
    return int(version)


def _assert_tensors(role_dir: Path, file: FileRecord, wanted: dict[str, torch.Tensor]) -> None:
    shards = {shard.key.name: shard for shard in read_index(role_dir, file).shards}
    assert shards.keys() == wanted.keys()
    scratch = torch.empty(4 << 20, dtype=torch.uint8)
    with RangeReader(role_dir, {file.path: file}, scratch) as reader:
        for name, tensor in wanted.items():
            found = torch.full_like(tensor, float("nan"))
            reader.read(ReadRange(shards[name], 0, tensor.numel(), 0), as_bytes(found))
            assert torch.equal(found, tensor), f"{file.path}: {name}"


def checkpoints(root: Path) -> dict[int, int]:
    """The version of each complete step on disk, each read whole."""
    return {status.step: read_version(status.path / ROLE) for status in steps.complete_steps(root)}


def remains(root: Path) -> list[str]:
    """What a sweep must not leave: folders of work in progress, owner files, step folders with nothing in them."""
    found = [path for path in root.rglob("*") if _is_work(path.name) or path.name == layout.OWNER_FILE]
    found += [path for paths in layout.step_dirs(root).values() for path in paths if not any(path.iterdir())]
    return sorted(path.relative_to(root).as_posix() for path in found)


def _is_work(name: str) -> bool:
    return layout.parse_work_dir(name) is not None or layout.is_deleted_dir(name)


class Crash(BaseException):
    """The end of a process, in a test that goes on: nothing of the package may catch it."""


def crash(*args: object, **kwargs: object) -> None:
    raise Crash


def alone_in_the_world() -> Agreement:
    return Agreement(dist.HashStore(), 0, 1, "test", 30.0)  # type: ignore[attr-defined]
