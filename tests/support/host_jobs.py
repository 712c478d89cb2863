"""Runs the ranks of jobs on simulated hosts (hosts.py), forked from one process that has imported torch and megatron.

    def test_it(hosts, job_server):                                       # the fixture of tests/conftest.py
        job = job_server.start(hosts, 2, Path("ranks.py"), {"step": 1})   # `main(arguments)` of ranks.py on each rank
        hosts[1].kill_processes()                                         # or lose(): whenever you like
        ends = job.wait()                                                 # Ended(status=-9, ...) for the killed ranks
        results = job_server.run(list(hosts)[::-1], 2, ...)               # what main returns; here renumbered

Ranks have the environment of torchrun and the default process group, gloo, over the network of the hosts; rank r is on
the r-th of these hosts, two on each, and the first host has the key-value store. No rank is killed because another has
failed. `main` returns what JSON can say; what a test wants to see of a rank's files is in `host.files`.
"""

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.hosts import INTERFACE, Host

_TESTS = Path(__file__).parents[1]
# Of a busy machine. A rank that waits in a collective for one on a lost host is told nothing: it waits so long.
_COLLECTIVE_S = 60.0
_JOB_S = 120.0


@dataclass(frozen=True)
class Ended:
    """What has become of a rank: its exit status, -9 if it was killed, and what its `main` has returned, if it has."""

    status: int
    result: Any


class Job:
    """Ranks that run."""

    def __init__(self, connection: socket.socket, log: Path) -> None:
        self._connection = connection
        self._log = log

    @property
    def log(self) -> str:
        """The output of all ranks."""
        return self._log.read_text()

    def has_ended(self) -> bool:
        """True once all ranks have ended. It waits for nothing, and `wait` returns at once then."""
        return bool(select.select([self._connection], [], [], 0)[0])

    def wait(self, timeout_s: float = _JOB_S) -> list[Ended]:
        """Waits until all ranks have ended, however they do."""
        self._connection.settimeout(timeout_s)
        try:
            with self._connection, self._connection.makefile() as replies:
                reply = replies.readline()
        except TimeoutError:
            raise AssertionError(f"ranks run on after {timeout_s} s:\n{self.log}") from None
        except ConnectionResetError:
            reply = ""
        assert reply, f"the parent of the ranks has died:\n{self.log}"
        return [Ended(*ended) for ended in json.loads(reply)]


class JobServer:
    """The process that ranks are forked from (host_job_server.py)."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="jobs-"))
        self._jobs = 0
        self._socket = str(self._folder / "socket")
        self._log = self._folder / "server.log"
        environment = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        # Made here, so that one can connect while the server still imports.
        with socket.socket(socket.AF_UNIX) as listening, self._log.open("w") as log:
            listening.bind(self._socket)
            listening.listen()
            self._process = subprocess.Popen(
                [sys.executable, str(_TESTS / "support" / "host_job_server.py"), str(listening.fileno())],
                env=os.environ | environment,
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def start(
        self,
        hosts: Iterable[Host],
        ranks_per_host: int,
        script: Path,
        arguments: Any = None,
        env: Mapping[str, str] = {},
        timeout_s: float = _COLLECTIVE_S,
    ) -> Job:
        """Starts the ranks of a job, which run `main(arguments)` of a script.

        Args:
            hosts: the first one has the ranks 0 to `ranks_per_host` - 1, and the key-value store.
            arguments: what JSON can say.
            env: added to the environment of the ranks.
            timeout_s: the time limit of each collective.
        """
        self._jobs += 1
        log = self._folder / f"job{self._jobs}.log"
        log.touch()
        request = {
            "places": [[host.namespaces.pid, host.address] for host in hosts],
            "ranks_per_host": ranks_per_host,
            "script": str(script),
            "arguments": arguments,
            "env": dict(env),
            "timeout_s": timeout_s,
            "log": str(log),
        }
        assert self._process.poll() is None, f"the server of jobs has died:\n{self._log.read_text()}"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._socket)
        connection.sendall(json.dumps(request).encode() + b"\n")
        return Job(connection, log)

    def run(self, hosts: Iterable[Host], ranks_per_host: int, script: Path, arguments: Any = None) -> list[Any]:
        """As `start`; waits for the ranks, all of which must succeed, and returns their results."""
        job = self.start(hosts, ranks_per_host, script, arguments)
        ends = job.wait()
        assert [end.status for end in ends] == [0] * len(ends), job.log
        return [end.result for end in ends]

    def close(self) -> None:
        """Ends the server, and with it all ranks that still run."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
