"""Makes real saves of random bytes, with the planner, the writer and the commit of this package, without a trainer.

One process acts for all ranks of a node: it copies with as many threads as the ranks would, and writes each rank's
files with a separate writer and thread. So a trial save takes as long as a save by the ranks, except for messages
between ranks and for reading the trainer's objects.
"""

from __future__ import annotations

import datetime
import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, StageRecord, WrittenFile
from mcore_ckpt.checkpoint.manifest_text import NO_TENSORS, Holds
from mcore_ckpt.checkpoint.plain_files import pickle_plain, write_plain
from mcore_ckpt.config import TIMEOUT_S
from mcore_ckpt.formats.native.file_plan import FilePlan, FileWrite, StructureCache, plan_file
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.io import _native
from mcore_ckpt.io.disk_space import Need
from mcore_ckpt.io.files import sync_dir, sync_names
from mcore_ckpt.io.host_memory import HostMemory
from mcore_ckpt.io.pages import page_ceil
from mcore_ckpt.io.tuning import HOST_THREADS
from mcore_ckpt.ranks.meeting import single_process_agreement
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.ranks.topology import Topology, coordinates_of
from mcore_ckpt.sharding.plan import MODEL, PARAM, ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.steps import commit, leftovers
from mcore_ckpt.steps.retention import PreservationPolicy
from mcore_ckpt.steps.space_watch import Saving, SpaceWatch
from mcore_ckpt.steps.tracker import move_tracker
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.transaction import check_seen, commit_together, open_together

ROLE = "actor"
BYTES_PER_PARAMETER = 14
"""The bytes of a parameter: 2 for the model in bf16, 4 each for the main parameter and Adam's two moments in fp32."""

_TOPIC = "a trial save"
_KINDS = (PARAM, "exp_avg", "exp_avg_sq")
# The number of parameters in one tensor: a matrix of 2048 x 2048.
_PARAMETERS = 1 << 22
_TILE_BYTES = 1 << 20
# The size of the state of torch's generator on a CPU.
_RANDOM_STATE_BYTES = 5056


@dataclass(frozen=True)
class SaveTimes:
    """The durations of the parts of a trial save, in seconds.

    Attributes:
        open_s: until the staging folder existed: taking the lock, checking the free space, first round.
        copy_s: until the state was copied into host images; 0 if the state was written in place.
        write_s: until all files were on the disk.
        commit_s: until the checkpoint was in its place and the tracker named it.
    """

    open_s: float
    copy_s: float
    write_s: float
    commit_s: float

    @property
    def stall_s(self) -> float:
        """How long an async save holds the training up."""
        return self.open_s + self.copy_s

    @property
    def seconds(self) -> float:
        """The time from the call until the commit."""
        return self.open_s + self.copy_s + self.write_s + self.commit_s


@dataclass(frozen=True, eq=False)
class _Rank:
    """The files of one rank, the addresses of each file's tensors, and the path and bytes of its random states."""

    plans: tuple[FilePlan, ...]
    sources: tuple[tuple[int, ...], ...]
    random_states: tuple[str, bytes]


class TrialSaves:
    """Saves the same random bytes again and again, each time as a new step, and deletes each step afterwards.

    `nbytes` is the size of the tensors of all ranks together. This class makes the folder `root`; the caller must
    remove it.

    Raises MemoryError: there is not enough memory for the tensors.

    Example:
        >>> with TrialSaves(folder, 1 << 30, ranks=1) as saves:  # doctest: +SKIP
        ...     saves.save(copied=True).seconds
        0.62
    """

    def __init__(self, root: Path, nbytes: int, ranks: int) -> None:
        self._root = root
        self._threads = HOST_THREADS * ranks
        self._topology = Topology(world_size=ranks, tp=ranks, etp=ranks)
        parameters = max(1, nbytes // ranks // BYTES_PER_PARAMETER)
        self._state = _random_bytes(page_ceil(parameters * BYTES_PER_PARAMETER) * ranks)
        self._ranks = tuple(self._plan(rank, parameters) for rank in range(ranks))
        self.nbytes = sum(plan.nbytes for rank in self._ranks for plan in rank.plans)
        sizes = [(plan.path, plan.least_size) for rank in self._ranks for plan in rank.plans]
        sizes += [(path, len(data)) for path, data in (rank.random_states for rank in self._ranks)]
        self._need = Need.of(sizes)
        self._opening, self._commits = (single_process_agreement(name, TIMEOUT_S) for name in ("opening", "commits"))
        self._lock = TrainerLock(root, ROLE)
        self._space = SpaceWatch(root, lambda: False)
        self._images = HostMemory()
        self._steps = itertools.count(1)

    def __enter__(self) -> TrialSaves:
        return self

    def __exit__(self, *exc: object) -> None:
        self._images.release()
        self._lock.release()

    def save(self, copied: bool) -> SaveTimes:
        """Makes one save and deletes it.

        If `copied`, the tensors are first copied into host images, as in an async save. Otherwise they are written in
        place, as in a synchronous save of a state in host memory.

        Raises:
            NoRoomError: the files do not fit on the disk.
            CheckpointError: the files cannot be written.
        """
        role_dir, times = self.keep(copied)
        commit.remove_folder(role_dir.parent)
        return times

    def copy(self) -> float:
        """Copies the tensors into images, without a save. Returns the seconds."""
        buffer = self._images.take(self._arena_bytes())
        began = time.perf_counter()
        self._copy(buffer)
        return time.perf_counter() - began

    def keep(self, copied: bool) -> tuple[Path, SaveTimes]:
        """Makes one save as `save` does, but keeps the checkpoint. Returns the role's folder, and the times."""
        step = next(self._steps)
        saving = Saving(file_names.step_dir(self._root, step) / ROLE, step, PreservationPolicy())
        buffer = self._images.take(self._arena_bytes()) if copied else None
        began = time.perf_counter()
        prepare = lambda need: self._take_place(saving, need)  # noqa: E731
        attempt = open_together(self._opening, _TOPIC, saving.role_dir, prepare=prepare, need=self._need)
        opened = time.perf_counter()
        writes = self._write_from_state() if buffer is None else self._copy(buffer)
        captured = written = time.perf_counter()
        files: list[tuple[int, WrittenFile]] = []

        def write(staging: Path) -> Record:
            nonlocal written
            files.extend(self._write(staging, writes))
            written = time.perf_counter()
            return {}

        def describe(_: Sequence[Record]) -> Manifest:
            return self._manifest(attempt.staging, step, attempt.number, files)

        commit_together(self._commits, _TOPIC, attempt, write, describe, lambda: move_tracker(self._root))
        ended = time.perf_counter()
        return saving.role_dir, SaveTimes(opened - began, captured - opened, written - captured, ended - written)

    def _plan(self, rank: int, parameters: int) -> _Rank:
        """Plans a model file and an optimizer file, with tensors at consecutive places of the random bytes."""
        place, model, optimizer = coordinates_of(rank, self._topology).place, [], []
        for number, first in enumerate(range(0, parameters, _PARAMETERS)):
            name = f"decoder.layers.{number}.rank{rank}.weight"
            region = Region.whole((min(_PARAMETERS, parameters - first),))
            model.append(_tensor((name,), ShardKey(name, MODEL), region, torch.bfloat16))
            optimizer += [
                _tensor(("state", name, kind), ShardKey(name, kind), region, torch.float32) for kind in _KINDS
            ]
        requests = (
            WriteRequest(file_names.model_file(rank, 0), "model", tuple(model)),
            WriteRequest(file_names.optimizer_file(*place), "optimizer", tuple(optimizer), tree=("state",)),
        )
        begin = self._state.data_ptr() + page_ceil(parameters * BYTES_PER_PARAMETER) * rank
        sizes = [[write.tensor.nbytes for write in request.tensors] for request in requests]
        starts = itertools.accumulate(itertools.chain.from_iterable(sizes), initial=begin)
        return _Rank(
            tuple(plan_file(request, 0, StructureCache()) for request in requests),
            tuple(tuple(itertools.islice(starts, len(of_file))) for of_file in sizes),
            (file_names.rng_file(*place), pickle_plain({"torch": torch.zeros(_RANDOM_STATE_BYTES, dtype=torch.uint8)})),
        )

    def _arena_bytes(self) -> int:
        return sum(page_ceil(plan.nbytes) for rank in self._ranks for plan in rank.plans)

    def _write_from_state(self) -> list[list[FileWrite]]:
        files = (zip(rank.plans, rank.sources, strict=True) for rank in self._ranks)
        return [[FileWrite(plan, list(sources), owner=self._state) for plan, sources in each] for each in files]

    def _copy(self, buffer: _native.HostBuffer) -> list[list[FileWrite]]:
        writes, place = [], 0
        destinations, addresses, sizes = list[int](), list[int](), list[int]()
        for rank in self._ranks:
            of_rank = []
            for plan, sources in zip(rank.plans, rank.sources, strict=True):
                parts = plan.parts
                destinations += (buffer.address + place + at for at in parts.at)
                addresses += (sources[tensor] + skip for tensor, skip in zip(parts.tensor, parts.skip, strict=True))
                sizes += parts.nbytes
                of_rank.append(FileWrite(plan, buffer=buffer, offset=place))
                place += page_ceil(plan.nbytes)
            writes.append(of_rank)
        _native.copy_host(destinations, addresses, sizes, self._threads)
        return writes

    def _take_place(self, saving: Saving, need: Need) -> None:
        """Does what `CheckpointManager` does on rank 0 before a save."""
        self._lock.take(patience_s=0)
        leftovers.remove_sibling_leftovers(saving.role_dir)
        self._space.check(saving, need, patience_s=0)
        self._lock.take(patience_s=0)

    def _write(self, staging: Path, writes: Sequence[Sequence[FileWrite]]) -> list[tuple[int, WrittenFile]]:
        """Writes the files of all ranks, with a separate thread for each rank. Returns each file with its rank."""
        check_seen(staging)
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            by_rank = list(pool.map(lambda rank, own: self._write_rank(staging, rank, own), self._ranks, writes))
        return [(number, file) for number, files in enumerate(by_rank) for file in files]

    def _write_rank(self, staging: Path, rank: _Rank, writes: Sequence[FileWrite]) -> list[WrittenFile]:
        path, data = rank.random_states
        with FileWriter(staging, writes, self._commits) as writer:
            writer.start()
            written = [write_plain(staging, path, "rng", data), *writer.finish()]
        sync_names(staging, {file.path for file in written})
        return written

    def _manifest(self, staging: Path, step: int, attempt: str, written: Sequence[tuple[int, WrittenFile]]) -> Manifest:
        commit.check_files(staging, written)
        common = write_plain(staging, file_names.COMMON_FILE, "common", pickle_plain({"optimizers": []}))
        sync_dir((staging / common.path).parent)
        names = tuple(sorted({name for rank in self._ranks for plan in rank.plans for name in plan.names}))
        position = {name: number for number, name in enumerate(names)}
        holds: dict[str, Holds] = {
            plan.path: Holds.of(position[name] for name in plan.names) for rank in self._ranks for plan in rank.plans
        }
        return Manifest(
            step=step,
            role=ROLE,
            roles=(ROLE,),
            attempt=attempt,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions={},
            contents=("model", "optimizer", "extra"),
            topology=self._topology,
            ranks=tuple(coordinates_of(rank, self._topology) for rank in range(self._topology.world_size)),
            stages=(StageRecord(0, 0, (0,), ()),),
            tensors=names,
            files=tuple(
                FileRecord(
                    file.path, file.kind, rank, file.size, file.crc32, file.index, holds.get(file.path, NO_TENSORS)
                )
                for rank, file in (*written, (0, common))
            ),
        )


def _tensor(path: tuple[str, ...], key: ShardKey, region: Region, dtype: torch.dtype) -> TensorWrite:
    stand_in = torch.empty(region.local_shape, dtype=dtype, device="meta")
    return TensorWrite(path, key, region, stand_in, region.local_shape)


def _random_bytes(nbytes: int) -> torch.Tensor:
    """Returns memory full of random bytes, because some file systems compress bytes that repeat.

    torch allocates the memory, as for a trainer's tensors. A host buffer would have huge pages, from which copies are
    faster than from a trainer's tensors.
    """
    tiles = torch.empty(-(-nbytes // _TILE_BYTES), _TILE_BYTES, dtype=torch.uint8)
    tiles.copy_(torch.frombuffer(bytearray(os.urandom(_TILE_BYTES)), dtype=torch.uint8))
    return tiles
