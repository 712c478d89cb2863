"""Ranks as forked processes: importing torch and megatron takes seconds, which each rank of each launch pays otherwise.

A forked rank is as new as a process of torchrun as long as its parent has done nothing but imports.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, NoReturn, Protocol

import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """Processes that run. `pids` has them by rank; `host` has the key-value store, as the agent of torchrun has it."""

    pids: tuple[int, ...]
    host: int


class Place(Protocol):
    """A host, which may be simulated (tests/support/namespaces.py)."""

    def forking(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Makes what is forked in the block a process of this host, once it has called the function that is yielded."""

    def listen(self) -> socket.socket:
        """A socket that listens on a free port of this host."""


class _Here:
    def forking(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        return contextlib.nullcontext(lambda: None)

    def listen(self) -> socket.socket:
        return socket.create_server(("127.0.0.1", 0))


_HERE: Place = _Here()


def start(
    world: int,
    work: Callable[[int], None],
    log: Path | IO[str],
    timeout: timedelta | None = None,
    places: Sequence[Place] = (_HERE,),
) -> Ranks:
    """Forks `world` ranks that run `work` in one gloo group. `wait` ends them.

    Args:
        work: takes the rank.
        log: where the output of all ranks goes: Python's and that of libraries.
        timeout: the time limit of each collective; None for torch's.
        places: hosts with equally many ranks each. The first one also has the key-value store.
    """
    local_world = world // len(places)
    assert local_world * len(places) == world
    with places[0].listen() as server:
        # Not in rank 0: the others could not even time out while it is stopped.
        host = _fork(partial(_host, world, server), log, places[0])
        pids = tuple(
            _fork(partial(_be_rank, rank, world, local_world, work, server, timeout), log, places[rank // local_world])
            for rank in range(world)
        )
    return Ranks(pids, host)


def die_with_parent() -> None:
    """Has this process killed when its parent has died, so that ranks of a test run that was stopped do not stay."""
    set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def run(world: int, work: Callable[[int], None], log: Path | IO[str]) -> list[int]:
    """Runs `work` on `world` ranks until they end, and returns the exit code of each (see `wait`)."""
    return wait(start(world, work, log))


def wait(ranks: Ranks, together: bool = True) -> list[int]:
    """The exit codes of ranks: 0, 1 for an error (whose traceback is in the log), -9 for a rank that was killed.

    Args:
        together: as soon as one has failed the others are killed, because they would wait for it.
    """
    codes: dict[int, int] = {}
    host_runs = True
    while len(codes) < len(ranks.pids):
        pid, status = os.wait()
        if pid == ranks.host:
            host_runs = False
        if pid not in ranks.pids:
            continue
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] != 0 and together:
            for other in set(ranks.pids) - codes.keys():
                os.kill(other, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            # Processes that megatron's saves have spawned wait for their rank for ever.
            os.killpg(pid, signal.SIGKILL)
    if host_runs:
        os.kill(ranks.host, signal.SIGKILL)
        os.waitpid(ranks.host, 0)
    return [codes[pid] for pid in ranks.pids]


def _fork(work: Callable[[], None], log: Path | IO[str], place: Place) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with place.forking() as enter:
        pid = os.fork()
        if pid == 0:
            _be_fork(work, log, enter)
    return pid


def _be_fork(work: Callable[[], None], log: Path | IO[str], enter: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        # Before the log is opened or a rank opens anything else, whose path may lead elsewhere on its host.
        enter()
        die_with_parent()
        # Otherwise each process that megatron's saves spawn would run the main program's imports, which takes seconds.
        vars(sys.modules["__main__"]).pop("__file__", None)
        _print_to(log)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        # A normal exit would run the clean-up of the parent, of which a fork has a copy.
        os._exit(code)


def _host(world: int, server: socket.socket) -> None:
    # Copies of the parent's pipes would keep them open when the parent has closed its own.
    os.closerange(3, server.fileno())
    os.closerange(server.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    name, port = server.getsockname()
    store = dist.TCPStore(  # noqa: F841  # it answers for as long as it is there
        name, port, world, is_master=True, wait_for_workers=False, master_listen_fd=server.fileno()
    )
    signal.pause()


def _be_rank(
    rank: int,
    world: int,
    local_world: int,
    work: Callable[[int], None],
    server: socket.socket,
    timeout: timedelta | None,
) -> None:
    name, port = server.getsockname()
    server.close()
    # As torchrun sets them; verl's workers read them (single_controller.base.Worker).
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_world),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": name,
        "MASTER_PORT": str(port),
    }
    store = dist.TCPStore(name, port, world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    work(rank)


def _print_to(log: Path | IO[str]) -> None:
    file = log.open("a", buffering=1) if isinstance(log, Path) else log
    sys.stdout = sys.stderr = file  # type: ignore[assignment]
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
