"""Small checkpoints of a few ranks, written and read back by the storage layer alone, without megatron."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, WrittenFile
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.checkpoint.plain_files import pickle_plain, write_plain
from mcore_ckpt.formats.native.file_plan import StructureCache, plan_file
from mcore_ckpt.formats.native.folder import Folder, LocalFolder
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.formats.native.writer import Exchange, FileWriter
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io.files import sync_names
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.save.capture import FileTensors, capture_in_place
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import ReadRange, ShardKey, runs
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.steps import commit, tracker
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps.owner import Owner
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps
from mcore_ckpt.steps.transaction import Attempt, check_seen, commit_together, open_together

ROLE = "actor"

# In hexadecimal, as an attempt's id is.
ATTEMPT = "a" * 32

# The first is of more than one CRC block, the others are not whole pages.
SHAPES = {"embedding.weight": (521, 577), "decoder.norm.weight": (577,), "decoder.bias": (3,)}

# Of those that all ranks hold, and write together.
SHARED_SHAPES = {"embedding.weight": (150, 101), "decoder.norm.weight": (577,), "decoder.bias": (3,)}

# Small enough that each rank of a few has a range of SHARED_SHAPES to write, in more than one piece.
SMALL_KNOBS = {"SHARE_BYTES": 4096, "WRITE_BYTES": 4096}


def tensors(version: int, rank: int) -> dict[str, torch.Tensor]:
    """What a rank alone holds in a version of the state: no two ranks or versions hold the same."""
    generator = torch.Generator().manual_seed(1000 * version + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def shared_tensors(version: int) -> dict[str, torch.Tensor]:
    """What every rank holds."""
    generator = torch.Generator().manual_seed(1000 * version + 999)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHARED_SHAPES.items()}


def small_state(version: int, rank: int) -> dict[str, Any]:
    return {"version": version, "rank": rank, "seen": list(range(version))}


def requests(version: int, rank: int, world: int) -> list[WriteRequest]:
    """One rank's files of tensors: one of its own, and one that all ranks write a part of."""
    own = tuple(_write(("state", name, "exp_avg"), t) for name, t in tensors(version, rank).items())
    shared = tuple(_write((name,), t) for name, t in shared_tensors(version).items())
    return [
        WriteRequest(file_names.optimizer_file(0, 0, 0, rank), "optimizer", own, tree=("state",)),
        WriteRequest(file_names.model_file(0, 0), "model", shared, writers=tuple(range(world))),
    ]


def _write(path: tuple[str, ...], tensor: torch.Tensor) -> TensorWrite:
    name, kind = (path[1], path[2]) if len(path) > 1 else (path[0], "model")
    return TensorWrite(path, ShardKey(name, kind), Region.whole(tuple(tensor.shape)), tensor, tuple(tensor.shape))


def write_files(staging: Path, exchange: Exchange, version: int, world: int) -> list[WrittenFile]:
    """One rank's part: what of all files of tensors is its to write, and a small file."""
    rank, images = exchange.rank, StructureCache()
    wanted = requests(version, rank, world)
    plans = [plan_file(request, rank, images) for request in wanted]
    capture = capture_in_place(
        plans, [FileTensors.of([write.tensor for write in request.tensors]) for request in wanted]
    )
    with FileWriter(staging, capture.writes, exchange) as writer:
        writer.start()
        small = pickle_plain(small_state(version, rank))
        written = [write_plain(staging, file_names.rng_file(0, 0, 0, rank), "rng", small)]
        written += writer.finish()
    sync_names(staging, [file.path for file in written])
    return written


def manifest_of(
    files: Sequence[tuple[int, WrittenFile]], world: int, step: int, attempt: str, role: str, roles: Sequence[str]
) -> Manifest:
    names = tuple(SHAPES)
    return Manifest(
        step=step,
        role=role,
        roles=tuple(roles),
        attempt=attempt,
        created="2025-01-01T00:00:00+00:00",
        versions={"torch": str(torch.__version__)},
        contents=("model", "extra"),  # no common.pt, which is what "optimizer" promises
        parts=_parts_in([file.path for _, file in files]),
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
                # Every file of tensors holds them all.
                Holds(runs(range(len(names))) if file.holds else ()),
            )
            for rank, file in files
        ),
    )


def _parts_in(paths: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    ranks: dict[str, set[int]] = {}
    for place in filter(None, map(file_names.parse_part, paths)):
        ranks.setdefault(place[0], set()).add(place[1])
    return {part: runs(sorted(ranks[part])) for part in sorted(ranks)}


def save_together(agreement: Agreement, root: Path, step: int, version: int, keep: int | None = None) -> None:
    """One rank's part of a save, as saving.Save does it."""
    attempt = begin(agreement, root, step)
    finish(agreement, attempt, root, step, version)
    if agreement.is_coordinator:
        delete_old(root, step, keep)


def begin(agreement: Agreement, root: Path, step: int, failure: Record | None = None, role: str = ROLE) -> Attempt:
    role_dir = file_names.step_dir(root, step) / role
    return open_together(agreement, f"saving step {step}", role_dir, failure=failure)


def finish(
    agreement: Agreement,
    attempt: Attempt,
    root: Path,
    step: int,
    version: int,
    roles: Sequence[str] = (ROLE,),
    may_commit: Callable[[], object] = lambda: None,
    write_more: Callable[[Path], list[WrittenFile]] = lambda staging: [],
) -> None:
    def write(staging: Path) -> Record:
        check_seen(staging)
        files = [*write_more(staging), *write_files(staging, agreement, version, agreement.world_size)]
        return {"files": [msgspec.to_builtins(file) for file in files]}

    def describe(records: Sequence[Record]) -> Manifest:
        files = [
            (rank, msgspec.convert(item, WrittenFile))
            for rank, record in enumerate(records)
            for item in record["files"]
        ]
        commit.check_files(attempt.staging, files)
        return manifest_of(files, agreement.world_size, step, attempt.number, attempt.role_dir.name, roles)

    after = lambda: tracker.update_tracker(root)  # noqa: E731
    commit_together(agreement, f"saving step {step}", attempt, write, describe, after, may_commit)


def delete_old(root: Path, step: int, keep: int | None) -> None:
    if keep is not None:
        delete_old_steps(root, PreservationPolicy(keep), step)


class Alone:
    """The exchange of a rank that shares no file."""

    rank = 0

    def give(self, key: str, record: Record) -> None:
        raise AssertionError(f"nobody takes {key}")

    def take(self, key: str, rank: int) -> Record:
        raise AssertionError(f"there is no rank {rank}")


def write_alone(folder: Path, request: WriteRequest, images: StructureCache | None = None) -> WrittenFile:
    """One file, written by one rank from where its tensors are."""
    plan = plan_file(request, Alone.rank, images or StructureCache())
    capture = capture_in_place([plan], [FileTensors.of([write.tensor for write in request.tensors])])
    with FileWriter(folder, capture.writes, Alone()) as writer:
        writer.start()
        (written,) = writer.finish()
    return written


def stage(role_dir: Path, version: int, roles: Sequence[str] | None = None) -> tuple[Path, str]:
    """A sealed staging folder of a world of one, ready for `commit.publish`; and its attempt's id.

    The folder is a role's in a step's, or a step's own, of ROLE alone.
    """
    flat = file_names.parse_step(role_dir.name) is not None
    role = ROLE if flat else role_dir.name
    step = file_names.parse_step(role_dir.name if flat else role_dir.parent.name)
    assert step is not None
    attempt = commit.new_attempt()
    staging = commit.open_staging(role_dir, attempt)
    files = [(0, file) for file in write_files(staging, Alone(), version, 1)]
    manifest = manifest_of(files, 1, step, attempt, role, roles or (role,))
    commit.write_manifest(staging, manifest)
    return staging, attempt


def make(role_dir: Path, version: int, roles: Sequence[str] | None = None) -> None:
    """A committed checkpoint of a world of one."""
    staging, attempt = stage(role_dir, version, roles)
    commit.publish(staging, role_dir, attempt)


def read_version(role_dir: Path) -> int:
    """`read_folder` of a local checkpoint."""
    return read_folder(LocalFolder(role_dir))


def read_folder(folder: Folder) -> int:
    """Which version a checkpoint holds. Fails unless every rank's every byte is that version's."""
    manifest = folder.manifest()
    world = manifest.topology.world_size
    small = {file.rank: folder.plain(file) for file in manifest.files_of("rng")}
    version = small[0]["version"]
    assert small == {rank: small_state(version, rank) for rank in range(world)}
    indexed = manifest.files_of("optimizer")
    assert [file.rank for file in indexed] == list(range(world))
    for file in indexed:
        _assert_tensors(folder, file, tensors(version, file.rank))
    (shared,) = manifest.files_of("model")
    _assert_tensors(folder, shared, shared_tensors(version))
    return int(version)


def _assert_tensors(folder: Folder, file: FileRecord, wanted: dict[str, torch.Tensor]) -> None:
    index, names = folder.index(file), folder.manifest().tensors
    shards = {shard.key.name: shard for name in names for shard in index.of(name).shards}
    assert shards.keys() == wanted.keys()
    found = {name: torch.full_like(tensor, float("nan")) for name, tensor in wanted.items()}
    reads = [(ReadRange(shards[name], Rows(0, 0, tensor.numel())), tensor) for name, tensor in found.items()]
    folder.fill({file.path: file}, reads)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{file.path}: {name}"


def checkpoints(root: Path) -> dict[int, int]:
    """The version of each complete step on disk, each read whole."""
    return {status.step: read_version(status.path / ROLE) for status in steps.complete_steps(root)}


def remains(root: Path) -> list[str]:
    """What a sweep must not leave: folders of work in progress, owner files, step folders with nothing in them."""
    found = [path for path in root.rglob("*") if _is_work(path.name) or path.name == file_names.OWNER_FILE]
    found += [path for paths in file_names.step_dirs(root).values() for path in paths if not any(path.iterdir())]
    found += [path for path in root.rglob("*") if file_names.is_dropped_dir(path.name)]
    dropped = [path.parent for path in root.rglob(file_names.MANIFEST_FILE) if b'"dropped"' in path.read_bytes()]
    found += [folder / file_names.OPTIMIZER_DIR for folder in dropped if (folder / file_names.OPTIMIZER_DIR).exists()]
    return sorted(path.relative_to(root).as_posix() for path in found)


def _is_work(name: str) -> bool:
    return file_names.parse_work_dir(name) is not None or file_names.is_deleted_dir(name)


def own(folder: Path, owner: Owner) -> None:
    record = {"host": owner.host, "pid": owner.pid, "start": owner.start}
    (folder / file_names.OWNER_FILE).write_bytes(fields.encode(record))


def dead_owner(pid: int) -> Owner:
    return Owner(Owner.this_process().host, pid, 1)


def other_host() -> Owner:
    me = Owner.this_process()
    return Owner(me.host + "-another", me.pid, me.start)


class Crash(BaseException):
    """The end of a process, in a test that goes on: nothing of the package may catch it."""


def crash(*args: object, **kwargs: object) -> None:
    raise Crash


def alone_in_the_world() -> Agreement:
    return Agreement(dist.HashStore(), 0, 1, "test", 30.0)  # type: ignore[attr-defined]
