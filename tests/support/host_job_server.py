"""Forks the ranks of jobs into simulated hosts, for host_jobs.py in another process.

    python host_job_server.py LISTENING_FD

Each connection is one job: a request in a line of JSON, and when all of its ranks have ended a reply in another, with
[status, result] of each rank.
"""

import gc
import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NoReturn

import torch.distributed as dist

from tests.distributed import (
    forked_ranks,
    training,  # noqa: F401  # all that the ranks' scripts import, so that it is imported once
)
from tests.support.namespaces import Namespaces


def main() -> None:
    forked_ranks.die_with_parent()
    # Ranks share the memory that nobody writes to, and a collection of garbage writes to all.
    gc.collect()
    gc.freeze()
    # The parents of ranks are buried by the kernel.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        while True:
            connection, _ = listening.accept()
            with connection:
                if os.fork() == 0:
                    listening.close()
                    _be_parent(connection)


def _be_parent(connection: socket.socket) -> NoReturn:
    try:
        forked_ranks.die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with connection.makefile() as requests:
            request = json.loads(requests.readline())
        with open(request["log"], "a", buffering=1) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            reply = json.dumps(_run(request, log))
        connection.sendall(reply.encode() + b"\n")
    finally:
        # A normal exit would run the clean-up of the server, of which a fork has a copy.
        os._exit(0)


def _run(request: dict[str, Any], log: IO[str]) -> list[tuple[int, Any]]:
    places = [Namespaces(*place) for place in request["places"]]
    world = len(places) * request["ranks_per_host"]
    # In memory, for ranks cannot write where this process can read.
    results = [os.fdopen(os.memfd_create(f"result of rank {rank}"), "w+") for rank in range(world)]
    os.environ |= request["env"]
    module = _load(Path(request["script"]))

    def work(rank: int) -> None:
        tempfile.tempdir = None  # the folder may be read-only on the host, which has others
        dist.barrier()  # a rank that ended early would fail those that still connect to it
        json.dump(module.main(request["arguments"]), results[rank])
        results[rank].flush()

    timeout = timedelta(seconds=request["timeout_s"])
    codes = forked_ranks.wait(forked_ranks.start(world, work, log, timeout, places), together=False)
    return [(code, _read(result)) for code, result in zip(codes, results, strict=True)]


def _load(script: Path) -> Any:
    specification = importlib.util.spec_from_file_location(script.stem, script)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _read(result: IO[str]) -> Any:
    result.seek(0)
    text = result.read()
    try:
        return json.loads(text)
    except ValueError:  # it was killed before it had written all
        return None


if __name__ == "__main__":
    main()
