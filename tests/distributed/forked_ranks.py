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
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch.distributed as dist


def start(
    world: int, work: Callable[[int], None], log: Path | IO[str], timeout: timedelta | None = None
) -> tuple[int, ...]:
    """Forks `world` ranks that run `work` in one gloo group, and returns the pid of each. `wait` ends them.

    Args:
        work: takes the rank.
        log: where the output of all ranks goes: Python's and that of libraries.
        timeout: the time limit of each collective; None for torch's.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        return tuple(_fork(rank, world, work, server, log, timeout) for rank in range(world))


def die_with_parent() -> None:
    """Has this process killed when its parent has died, so that ranks of a test run that was stopped do not stay."""
    set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def run(world: int, work: Callable[[int], None], log: Path | IO[str]) -> list[int]:
    """Runs `work` on `world` ranks until they end, and returns the exit code of each (see `wait`)."""
    return wait(start(world, work, log))


def wait(pids: Sequence[int]) -> list[int]:
    """The exit codes of ranks: 0, 1 for an error (whose traceback is in the log), -9 for a rank that was killed.

    As soon as one has failed the others are killed, because they would wait for it.
    """
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        if pid not in pids:
            continue
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] != 0:
            for other in set(pids) - codes.keys():
                os.kill(other, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            # Processes that megatron's saves have spawned wait for their rank for ever.
            os.killpg(pid, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def _fork(
    rank: int,
    world: int,
    work: Callable[[int], None],
    server: socket.socket,
    log: Path | IO[str],
    timeout: timedelta | None,
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        _print_to(log)
        _join(rank, world, server, timeout)
        work(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        # A normal exit would run the clean-up of the parent, of which a fork has a copy.
        os._exit(code)


def _print_to(log: Path | IO[str]) -> None:
    file = log.open("a", buffering=1) if isinstance(log, Path) else log
    sys.stdout = sys.stderr = file  # type: ignore[assignment]
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)


def _join(rank: int, world: int, server: socket.socket, timeout: timedelta | None) -> None:
    host, port = server.getsockname()
    # As torchrun sets them; verl's workers read them (single_controller.base.Worker).
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    listen = {"is_master": True, "master_listen_fd": server.fileno()} if rank == 0 else {"is_master": False}
    store = dist.TCPStore(host, port, world, **listen)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
