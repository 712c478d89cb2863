"""Ranks as forked processes: importing verl takes seconds, which every rank of every start would pay again.

Each is as new as a process of torchrun: nothing in the parent has run but imports.
"""

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist


def start(world: int, work: Callable[[], None], log: Path) -> list[int]:
    """Runs `work` on so many ranks, in one gloo group. What they print goes to `log`.

    Returns:
        What each rank exited with, as `os.waitstatus_to_exitcode` says it: 0, 1 for an error (whose traceback is in
        `log`), -9 for a rank that was killed. A rank that waits for one that is gone is killed with it.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        processes = [_fork(rank, world, work, server, log) for rank in range(world)]
    codes = {}
    while len(codes) < world:
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] != 0:
            for other in set(processes) - codes.keys():
                os.kill(other, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            # What megatron's saves have spawned waits for its rank for ever.
            os.killpg(pid, signal.SIGKILL)
    return [codes[pid] for pid in processes]


def _fork(rank: int, world: int, work: Callable[[], None], server: socket.socket, log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        _print_to(log)
        _join(rank, world, server)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not the parent's clean-up, of which a fork has a copy.
        os._exit(code)


def _print_to(log: Path) -> None:
    """All of it: what Python prints, which pytest would have, and what libraries do."""
    sys.stdout = sys.stderr = log.open("a", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)


def _join(rank: int, world: int, server: socket.socket) -> None:
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
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
