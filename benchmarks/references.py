"""The references that ours is compared with: raw disk, memcpy, torch.save, torch.distributed.checkpoint, Megatron.

A reference saves the training state durably (files that its author leaves in the page cache are synced afterwards), and
loads them back into the same state.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measuring import Contender, Findings, each_rank, show, slowest
from megatron.core import dist_checkpointing
from training_state import TrainingState, rank_tensors, threads_of_rank

from mcore_ckpt.io import _native

PIECE_BYTES = 16 << 20
PAGE_BYTES = 4096
THREAD_COUNTS = (1, 2, 4)


def padded(nbytes: int, block: int = PAGE_BYTES) -> int:
    return -(-nbytes // block) * block


# -- files ------------------------------------------------------------------------------------------------


def sync_tree(folder: Path) -> None:
    """Makes a folder and everything below it durable."""
    for path in [folder, *folder.rglob("*")]:
        sync(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_caches(folder: Path) -> None:
    """Drops the files of a folder from the page cache, so that the next read comes from the disk."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # The kernel does not drop pages that are not on the disk yet.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def delete(folder: Path) -> None:
    """Deletes a folder durably, on rank 0.

    Without the sync the disk might free the blocks during the next measurement.
    """
    if dist.get_rank() == 0 and folder.exists():
        shutil.rmtree(folder)
        sync(folder.parent)


def new_folder(folder: Path) -> None:
    """Creates a folder on rank 0. It exists for all ranks when this returns."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()


# -- the raw disk and the raw memory ----------------------------------------------------------------------


class HostBuffer:
    """Warm, page-aligned host memory for raw writes, raw reads and memcpy."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, padded(nbytes))
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        # The bytes are random, because a disk might not store zeros.
        tile = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
        for part in self.tensor.split(tile.numel()):
            part.copy_(tile[: part.numel()])
        self.view = memoryview(self._memory)


def write_raw(path: Path, data: memoryview, threads: int, flags: int = os.O_DIRECT) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, len(data))
        _in_pieces(threads, len(data), lambda at: _write_piece(descriptor, data[at : at + PIECE_BYTES], at))
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def read_raw(path: Path, target: memoryview, threads: int) -> int:
    """Reads a whole file into the beginning of a buffer and returns its size."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        nbytes = os.fstat(descriptor).st_size
        _in_pieces(threads, nbytes, lambda at: _read_piece(descriptor, target[at : at + PIECE_BYTES], at, nbytes))
        return nbytes
    finally:
        os.close(descriptor)


def _in_pieces(threads: int, nbytes: int, work: Callable[[int], object]) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, range(0, nbytes, PIECE_BYTES)):
            pass


def _write_piece(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


def _read_piece(descriptor: int, target: memoryview, at: int, file_bytes: int) -> None:
    end = min(at + len(target), file_bytes)
    while at < end:
        count = os.preadv(descriptor, [target], at)
        if not count:
            raise OSError(f"the file ends at byte {at}, not at {end}")
        target, at = target[count:], at + count


def best_threads(contender: Callable[[int], Contender], rounds: int = 2) -> int:
    """Returns the number of threads on which a reference is quickest, because the bar is the disk's own speed."""
    times = {threads: [] for threads in THREAD_COUNTS}
    for _ in range(rounds):
        for threads, seen in times.items():
            seen.append(slowest(contender(threads)))
    best = min(times, key=lambda threads: min(times[threads]))
    show(f"{contender(best).name}: best on {best} of {THREAD_COUNTS} threads")
    return best


def raw_copy(files: list[Path], folder: Path, threads: int, source: Path) -> Contender:
    """Copies files past the page cache. Each thread reads a piece and writes it, so that reads and writes overlap."""
    buffers = local()
    numbers = itertools.count()

    def copy() -> None:
        folder.mkdir()
        with ThreadPoolExecutor(threads) as pool:
            for path in files:
                _copy_file(path, folder / str(next(numbers)), pool, buffers)

    return Contender("raw O_DIRECT copy", copy, before=lambda: drop_caches(source), after=deleting(folder))


def quickest_raw_copy(files: list[Path], folder: Path, source: Path, findings: Findings) -> Contender:
    """Returns the raw copy with its best number of threads, which it adds to the findings."""
    copying = lambda threads: raw_copy(files, folder, threads, source)  # noqa: E731
    threads = best_threads(copying, rounds=1)
    findings.facts["raw_copy_threads"] = threads
    return copying(threads)


def _copy_file(path: Path, target: Path, pool: ThreadPoolExecutor, buffers: local) -> None:
    reading = os.open(path, os.O_RDONLY | os.O_DIRECT)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666)
    try:
        nbytes = os.fstat(reading).st_size
        os.posix_fallocate(writing, 0, max(1, padded(nbytes)))
        pieces = range(0, nbytes, PIECE_BYTES)
        for _ in pool.map(lambda at: _copy_piece(reading, writing, at, nbytes, buffers), pieces):
            pass
        os.ftruncate(writing, nbytes)
        os.fdatasync(writing)
    finally:
        os.close(reading)
        os.close(writing)


def _copy_piece(reading: int, writing: int, at: int, nbytes: int, buffers: local) -> None:
    if not hasattr(buffers, "view"):
        buffers.view = HostBuffer(PIECE_BYTES).view
    piece = buffers.view[: min(PIECE_BYTES, padded(nbytes - at))]
    done = 0
    while done < min(len(piece), nbytes - at):
        done += os.preadv(reading, [piece[done:]], at + done)
    done = 0
    while done < len(piece):
        done += os.pwrite(writing, piece[done:], at + done)


def deleting(folder: Path) -> Callable[[], None]:
    def delete() -> None:
        shutil.rmtree(folder)
        sync(folder.parent)

    return delete


def raw_write(folder: Path, buffer: HostBuffer, nbytes: int, threads: int) -> Contender:
    """Writes a file on every rank, as large as the rank's part of a checkpoint."""
    path = folder / f"raw-{dist.get_rank()}"
    data = buffer.view[: padded(nbytes)]

    def clean() -> None:
        path.unlink()
        sync(folder)

    return Contender("raw O_DIRECT write", lambda: write_raw(path, data, threads), after=clean)


def buffered_write(folder: Path, buffer: HostBuffer, nbytes: int) -> Contender:
    """Writes a plain file to tmpfs: the CPU time that the kernel itself needs for the bytes."""
    path = folder / f"buffered-{dist.get_rank()}"
    data = buffer.view[:nbytes]

    def write() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for at in range(0, len(data), PIECE_BYTES):
                _write_piece(descriptor, data[at : at + PIECE_BYTES], at)
        finally:
            os.close(descriptor)

    return Contender("plain write to tmpfs", write, after=path.unlink)


def raw_read(files: Iterable[Path], buffer: HostBuffer, threads: int, before: Callable[[], object]) -> Contender:
    """Reads on every rank the files that it loads from, whole and past the page cache."""
    paths = list(files)

    def read() -> None:
        for path in paths:
            read_raw(path, buffer.view, threads)

    return Contender("raw O_DIRECT read", read, before=before)


@dataclass(frozen=True)
class Copy:
    """A plan to copy this rank's tensors to their places in a warm buffer."""

    sources: list[torch.Tensor]
    destinations: list[torch.Tensor]

    @classmethod
    def plan(cls, tensors: Iterable[torch.Tensor], buffer: HostBuffer) -> Copy:
        sources, destinations, at = [], [], 0
        for tensor in tensors:
            sources.append(tensor.detach().view(-1).view(torch.uint8))
            destinations.append(buffer.tensor[at : at + tensor.nbytes])
            at += padded(tensor.nbytes, 64)
        return cls(sources, destinations)

    @staticmethod
    def needed_bytes(tensors: Iterable[torch.Tensor]) -> int:
        return sum(padded(tensor.nbytes, 64) for tensor in tensors)

    def memcpy(self) -> Contender:
        to, origin = [[tensor.data_ptr() for tensor in side] for side in (self.destinations, self.sources)]
        sizes = [tensor.nbytes for tensor in self.sources]
        threads = threads_of_rank()
        return Contender("parallel memcpy", lambda: _native.copy_host(to, origin, sizes, threads))

    def by_torch(self) -> Contender:
        def copy() -> None:
            torch.set_num_threads(threads_of_rank())
            for destination, source in zip(self.destinations, self.sources, strict=True):
                destination.copy_(source)
            torch.set_num_threads(1)

        return Contender("torch copy_", copy)


# -- other people's checkpoints ---------------------------------------------------------------------------


class Reference(Protocol):
    """Another way to save and load: it saves to a folder that rank 0 has created, and loads from there."""

    name: str

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class TorchSave:
    """torch.save of the rank's own tensors: one file per rank, without any coordination."""

    name = "torch.save per rank"

    def __init__(self, state: TrainingState) -> None:
        self._tensors = rank_tensors(state)

    def save(self, folder: Path) -> None:
        path = folder / f"rank{dist.get_rank()}.pt"
        torch.save(dict(_own_storages(self._tensors)), path)
        sync(path)

    def load(self, folder: Path) -> None:
        stored = torch.load(folder / f"rank{dist.get_rank()}.pt", weights_only=True)
        for name, tensor in self._tensors.items():
            tensor.copy_(stored[name])


def _own_storages(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors that each fill their storage, without copies.

    torch.save stores the whole storage that a tensor is a view of.
    """
    for name, tensor in tensors.items():
        is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        yield name, tensor if is_whole else _range_of(tensor)


def _range_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return torch.frombuffer(flat.numpy(), dtype=tensor.dtype).view(tensor.shape)


class DistributedCheckpoint:
    """torch.distributed.checkpoint of the rank's own tensors, under names that no other rank uses."""

    name = "torch.distributed.checkpoint"

    def __init__(self, state: TrainingState) -> None:
        self._tensors = rank_tensors(state)
        # async_save communicates from a thread, which must not interfere with the group of the training.
        self._group = dist.new_group(backend="gloo")

    def save(self, folder: Path) -> None:
        dcp.save(self._tensors, storage_writer=dcp.FileSystemWriter(folder), process_group=self._group)
        _sync_by_rank_0(folder)

    def start_save(self, folder: Path) -> Future[Any]:
        writer = dcp.FileSystemWriter(folder)
        return dcp.async_save(self._tensors, storage_writer=writer, process_group=self._group)  # type: ignore[return-value]

    def load(self, folder: Path) -> None:
        dcp.load(self._tensors, storage_reader=dcp.FileSystemReader(folder), process_group=self._group)


class MegatronCheckpoint:
    """megatron.core.dist_checkpointing in format torch_dist.

    It starts processes, so scripts need a __main__ guard.
    """

    def __init__(self, state: TrainingState, sharding: str) -> None:
        self.name = f"megatron {sharding}"
        self._optimizer = state.optimizer
        # Like megatron's trainer: the names in a checkpoint contain no wrappers (DDP, Float16Module).
        self._decoder = state.model[0].module.module
        self._metadata = {"distrib_optim_sharding_type": sharding}

    def save(self, folder: Path) -> None:
        dist_checkpointing.save(self._sharded_state(False), str(folder), sharded_strategy=("torch_dist", 1))
        _sync_by_rank_0(folder)

    def load(self, folder: Path) -> None:
        loaded = dist_checkpointing.load(self._sharded_state(True), str(folder))
        self._decoder.load_state_dict(loaded["model"])
        # With torch's Adam 0.16.1 cannot apply a fully_reshardable checkpoint: it looks for a tensor "step" of each
        # parameter, which only the optimizer itself has. It is therefore only read, which costs the reference less.
        if self._metadata["distrib_optim_sharding_type"] != "fully_reshardable":
            self._optimizer.load_state_dict(loaded["optimizer"])

    def _sharded_state(self, is_loading: bool) -> dict[str, Any]:
        model = self._decoder.sharded_state_dict()
        # This call removes the model's keys from its argument, so it gets a copy.
        optimizer = self._optimizer.sharded_state_dict(dict(model), is_loading, metadata=self._metadata)
        return {"model": model, "optimizer": optimizer}


def _sync_by_rank_0(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        sync_tree(folder)
    dist.barrier()


def megatron_references(state: TrainingState) -> tuple[MegatronCheckpoint, MegatronCheckpoint]:
    return MegatronCheckpoint(state, "dp_reshardable"), MegatronCheckpoint(state, "fully_reshardable")


def saving(reference: Reference, folder: Path) -> Contender:
    """Saves with a reference to a new folder, which is deleted before the next measurement."""
    return Contender(
        reference.name,
        lambda: reference.save(folder),
        before=lambda: new_folder(folder),
        after=lambda: delete(folder),
    )


def loading(reference: Reference, folder: Path) -> Contender:
    return Contender(reference.name, lambda: reference.load(folder), before=lambda: drop_by_rank_0(folder))


def drop_by_rank_0(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        drop_caches(folder)


def bytes_of_all_ranks(nbytes: int) -> int:
    return sum(each_rank(nbytes))


def extra_memory(function: str, source: Path, target: Path, name: str) -> int:
    """Runs a function in a process of its own and returns the bytes of memory that it prints.

    The memory of this process would hide what the function takes.

    Args:
        function: a function in a module of this folder, such as "merge.print_peak_memory". It prints a number of bytes.
        source, target, name: its arguments. The source is dropped from the page cache before, the target is deleted
            afterwards.
    """
    drop_caches(source)
    call = f"import sys, {function.partition('.')[0]}; {function}(*sys.argv[1:])"
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", call, str(source), str(target), name],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    deleting(target)()
    return int(json.loads(done.stdout))
