"""How fast a training comes back from its nodes' memory, and what saves into the fast tier cost it.

    python benchmarks/fast_tier.py [--ranks 2] [--gigabytes 1.7] [--pairs 9] [--gigabits 4] [--only stall,recovery]

Starts its own ranks, one stage of a pipeline on each, and makes each of them a node (own_node.py; as root). The network
between them is the machine's loopback, limited to --gigabits a second so that it is slower than memory, as between real
nodes; 0: not limited.

- stall: the call `manager.save(step)` into the fast tier, compared with an asynchronous save to the disk.
- recovery: `manager.load()` after a crash, compared with copying the rank's files out of its node's memory; and after
  the last node was lost, compared with sending the lost bytes over the same network by a plain socket.
- training: training steps with a save always in flight, without and with a copy on another node, compared with steps
  alone. On a CPU, saves and copies take the training's own cores.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from measuring import Comparison, Contender, Findings, common_arguments, compare, each_rank, run, show
from own_node import become_node, in_limited_network
from references import HostBuffer, bytes_of_all_ranks, delete
from stall import train
from training_state import TrainingState, build, shape_of_size

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.checkpoint import file_names

PARTS = ("stall", "recovery", "training")
_LIMITED = "FAST_TIER_BENCHMARK_IS_LIMITED"


def main() -> None:
    parser = common_arguments(__doc__, PARTS)
    parser.add_argument("--gigabits", type=float, default=4.0, help="the rate of the network; 0: not limited")
    parser.add_argument("--train-steps", type=int, default=5, help="steps of each block of training")
    if "--result" not in sys.argv and _LIMITED not in os.environ:
        gigabits = parser.parse_known_args()[0].gigabits
        os.environ[_LIMITED] = "yes"
        if gigabits:
            command = in_limited_network(gigabits, [sys.executable, *sys.argv])
            os.execvp(command[0], command)
    run(parser, __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    node = arguments.folder / "node"
    become_node(dist.get_rank(), node)
    shape, stages = shape_of_size(arguments.gigabytes), dist.get_world_size()
    state = build(replace(shape, num_layers=-(-shape.num_layers // stages) * stages), pp=stages)
    if "stall" in arguments.only:
        measure_stall(arguments, findings, state, node)
    if "recovery" in arguments.only:
        measure_recovery(arguments, findings, state, node)
    if "training" in arguments.only:
        measure_training(arguments, findings, state, node)


class Saving:
    """A manager, with or without a fast tier, that saves one step after the other."""

    def __init__(self, root: Path, state: TrainingState, fast: FastTier | None) -> None:
        config = CheckpointConfig(async_save=True, max_to_keep=1, fast=fast)
        self.manager = CheckpointManager(root, state.model, state.optimizer, state.scheduler, config=config)
        self.handle: Any = None
        self._steps = itertools.count(1)

    def start(self) -> None:
        self.handle = self.manager.save(next(self._steps))

    def finish(self) -> None:
        """Waits until nothing of the save is under way any more, neither copies nor deletions."""
        self.manager.wait()
        copies = self.handle.copies
        assert copies is None or copies.complete, copies.problem

    def save(self) -> None:
        self.start()
        self.finish()

    def stalling(self, name: str) -> Contender:
        return Contender(name, self.start, after=self.finish)


def _tier(node: Path, name: str, replicas: int) -> FastTier:
    return FastTier(node / name, replicas=replicas, keep=1, durable_every=None)


# -- how long training waits ------------------------------------------------------------------------------


def measure_stall(arguments: argparse.Namespace, findings: Findings, state: TrainingState, node: Path) -> None:
    to_disk = Saving(arguments.folder / "disk", state, None)
    to_disk.save()
    nbytes = bytes_of_all_ranks(to_disk.handle.report.nbytes)
    findings.facts["checkpoint_bytes"] = nbytes
    fast = Saving(arguments.folder / "unused", state, _tier(node, "stall", 1))
    found = compare(
        fast.stalling("stall of a save into the fast tier, one copy"),
        to_disk.stalling("stall of an async save to the disk"),
        arguments.pairs,
        nbytes,
        "cost",
    )
    findings.comparisons.append(found)
    findings.at_most("stall of a save into the fast tier / of an async save to the disk", found.ratio, 1.05)
    for saving in (fast, to_disk):
        saving.manager.close()
    _delete_all(arguments, node)


# -- coming back ------------------------------------------------------------------------------------------


def measure_recovery(arguments: argparse.Namespace, findings: Findings, state: TrainingState, node: Path) -> None:
    saving = Saving(arguments.folder / "unused", state, _tier(node, "recovery", 1))
    saving.save()
    saving.manager.close()
    config = CheckpointConfig(fast=_tier(node, "recovery", 1))
    manager = CheckpointManager(
        arguments.folder / "unused", state.model, state.optimizer, state.scheduler, config=config
    )
    own = _own_files(node / "recovery")
    nbytes = sum(path.stat().st_size for path in own)
    buffer = HostBuffer(max(each_rank(nbytes)))
    loading = Contender("load from the node's own memory", manager.load)
    found = compare(loading, _copying_out(own, buffer), arguments.pairs, sum(each_rank(nbytes)), "cost")
    findings.comparisons.append(found)
    findings.at_most("load after a crash / copying the files out of memory", found.ratio, 1.3)
    _lose_last_node(node)
    lost = each_rank(nbytes)[-1]
    with _Link() as link:
        found = compare(
            Contender("load after a node was lost", manager.load),
            Contender("sending its bytes by a plain socket", lambda: link.send(lost, buffer)),
            arguments.pairs,
            lost,
            "cost",
        )
    findings.comparisons.append(found)
    findings.at_most("load after a lost node / sending its bytes", found.ratio, 1.3)
    manager.close()
    _delete_all(arguments, node)


def _own_files(folder: Path) -> list[Path]:
    """Returns the large files that this rank has written."""
    (role_dir,) = folder.glob("global_steps_*/actor")
    rank = dist.get_rank()
    return [role_dir / file_names.model_file(0, rank), role_dir / file_names.optimizer_file(rank, 0, 0, 0)]


def _copying_out(files: list[Path], buffer: HostBuffer) -> Contender:
    def copy() -> None:
        at = 0
        for path in files:
            at += _read_in_pieces(path, buffer.view[at:])

    return Contender("copying the rank's files out of memory", copy)


def _read_in_pieces(path: Path, target: memoryview, threads: int = 2, piece: int = 16 << 20) -> int:
    size = path.stat().st_size
    with path.open("rb") as file, ThreadPoolExecutor(threads) as pool:
        list(
            pool.map(
                lambda at: os.preadv(file.fileno(), [target[at : min(at + piece, size)]], at), range(0, size, piece)
            )
        )
    return size


def _lose_last_node(node: Path) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        shutil.rmtree(node / "recovery" / "global_steps_1")
    dist.barrier()


class _Link:
    """A plain TCP connection from the first rank to the last one."""

    def __enter__(self) -> _Link:
        rank, world = dist.get_rank(), dist.get_world_size()
        listening = socket.create_server(("127.0.0.1", 0)) if rank == 0 else None
        port = each_rank(listening.getsockname()[1] if listening is not None else None)[0]
        self._socket: socket.socket | None = None
        if listening is not None:
            self._socket, _ = listening.accept()
            listening.close()
        elif rank == world - 1:
            self._socket = socket.create_connection(("127.0.0.1", port))
        return self

    def __exit__(self, *exc: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def send(self, nbytes: int, buffer: HostBuffer) -> None:
        if self._socket is None:
            return
        memory = buffer.view[: min(len(buffer.view), nbytes)]
        assert len(memory) == nbytes
        if dist.get_rank() == 0:
            self._socket.sendall(memory)
            return
        while memory:
            memory = memory[self._socket.recv_into(memory) :]


# -- how much slower it trains ----------------------------------------------------------------------------


def measure_training(arguments: argparse.Namespace, findings: Findings, state: TrainingState, node: Path) -> None:
    train(state, arguments.train_steps)
    savings = {
        f"{replicas} copies": Saving(arguments.folder / "unused", state, _tier(node, f"training{replicas}", replicas))
        for replicas in (0, 1)
    }
    times: dict[str, list[float]] = {"alone": [], **{name: [] for name in savings}}
    for number in range(arguments.slow_pairs):
        order = list(times) if number % 2 == 0 else list(times)[::-1]
        for name in order:
            between = None if name == "alone" else _Flight(savings[name])
            times[name].append(train(state, arguments.train_steps, between))
            if between is not None:
                between.finish()
        show(f"training with and without saves: round {number + 1} of {arguments.slow_pairs}")
    for name, saving in savings.items():
        nbytes = bytes_of_all_ranks(saving.handle.report.nbytes)
        findings.comparisons.append(
            Comparison(
                f"training steps with a save in flight, {name}",
                "training steps alone",
                "cost",
                nbytes,
                tuple(times[name]),
                tuple(times["alone"]),
            )
        )
        saving.manager.close()
    findings.facts["cores"] = os.cpu_count()
    _delete_all(arguments, node)


class _Flight:
    """Keeps a save in flight: begins the next one when all ranks have seen the last one committed and copied."""

    def __init__(self, saving: Saving) -> None:
        self._saving, self._is_saving = saving, False

    def __call__(self) -> None:
        handle = self._saving.handle
        is_over = not self._is_saving or (handle.committed and handle.copies.done)
        if all(each_rank(is_over)):
            self._saving.start()
            self._is_saving = True

    def finish(self) -> None:
        if self._is_saving:
            self._saving.finish()
            self._is_saving = False


def _delete_all(arguments: argparse.Namespace, node: Path) -> None:
    dist.barrier()
    for path in node.iterdir():
        shutil.rmtree(path)
    delete(arguments.folder / "disk")
    dist.barrier()


if __name__ == "__main__":
    main()
