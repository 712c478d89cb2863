"""Programs that start at once: their processes are forks of one that has imported what they need.

To import torch, megatron and transformers takes seconds, which every process of its own pays. A fork is as new as such
a process as long as its parent has done nothing but imports, and it ends as one: with its traceback and exit handlers.

    done = forked([SCRIPT, "--steps", 5], ranks=2, imports=["megatron.core.optimizer"])
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

REPOSITORY = Path(__file__).parents[2]
LOCALHOST = "127.0.0.1"
ENVIRONMENT = {
    # The processes share two cores, and may not share a GPU.
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
# Far above what any of them takes: one that hangs must fail its test, not the machine.
ALARM_S = 400
MESSAGE_BYTES = 1 << 16


class Server:
    """The process that imports and forks. It ends, with its forks, when this process closes its side or dies."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | ENVIRONMENT,
        )
        theirs.close()

    def ask(self, question: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        socket.send_fds(self._socket, [json.dumps(question).encode()], descriptors)
        answer = self._socket.recv(MESSAGE_BYTES)
        assert answer, f"the server of forks has ended with {self._process.wait()}"
        return json.loads(answer)


@functools.cache
def server() -> Server:
    """The server of this process, for all tests: each that imports more lets it import that, too."""
    return Server()


class Launched:
    """The processes of one launch. Has of `subprocess.Popen` what tests of programs use."""

    def __init__(
        self,
        ranks: int,
        command: Sequence[object],
        imports: Sequence[str],
        environment: dict[str, str],
        files: Sequence[int],
    ) -> None:
        tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
        # As torchrun's agent hosts it: ranks must be able to talk of one that has died.
        self._store = tcp_store(LOCALHOST, 0, is_master=True, wait_for_workers=False) if ranks else None
        job = {"command": [*map(str, command)], "imports": [*imports]}
        self.pids = []
        for rank in range(ranks or 1):
            variables = self._of_rank(rank, ranks) if ranks else {}
            question = job | {"environment": variables | environment}
            self.pids.append(server().ask(question, files))
        self._left = set(self.pids)
        self._codes: dict[int, int] = {}

    def _of_rank(self, rank: int, ranks: int) -> dict[str, str]:
        """What torchrun says to a rank."""
        assert self._store is not None
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": LOCALHOST,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    @property
    def returncode(self) -> int | None:
        """0 if all have ended with it, else another that one of them has ended with."""
        return None if self._left else next((code for code in self._codes.values() if code != 0), 0)

    def poll(self) -> int | None:
        self._ask_for_ends(waits=False)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for all. `timeout` is Popen's, and not needed: none outlives ALARM_S."""
        self._ask_for_ends(waits=True)
        assert self.returncode is not None
        return self.returncode

    def _ask_for_ends(self, waits: bool) -> None:
        if self._left:
            codes = server().ask({"ends_of": sorted(self._left), "waits": waits})
            self._codes |= {int(pid): code for pid, code in codes.items()}
            self._left -= self._codes.keys()

    def send_signal(self, number: int) -> None:
        for pid in self._left:
            os.kill(pid, number)  # it is not reaped before the server is asked

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def launch(
    command: Sequence[object],
    ranks: int = 0,
    *,
    imports: Sequence[str],
    stdout: IO[Any] | int,
    stderr: IO[Any] | int | None = None,
    environment: dict[str, str] | None = None,
) -> Launched:
    """Starts `command`, a script with its arguments.

    Args:
        ranks: how many torchrun would start; 0 for one process without torchrun.
        imports: the modules that the server has imported before it forks.
        stdout: a file, or its descriptor.
        stderr: None for the same as `stdout`.
        environment: what they have beside, or instead of, this process's variables when the server was started.
    """
    files = [file if isinstance(file, int) else file.fileno() for file in (stdout, stderr or stdout)]
    return Launched(ranks, command, imports, environment or {}, files)


def forked(command: Sequence[object], ranks: int = 0, *, imports: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs `command` (see `launch`) to its end."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        status = launch(command, ranks, imports=imports, stdout=stdout, stderr=stderr).wait()
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(command, status, stdout.read(), stderr.read())


def separate(command: Sequence[object], ranks: int = 0, *, imports: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """As `forked`, in processes of their own, which import for themselves; ranks are torchrun's."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    return subprocess.run(
        [sys.executable, *torchrun, *map(str, command)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=ALARM_S,
    )


Start = Callable[..., subprocess.CompletedProcess[str]]
"""`forked` or `separate`."""


def _serve(own: socket.socket) -> dict[str, Any]:
    """Does what it is asked for. Returns in each fork, with its job."""
    children: set[int] = set()
    while True:
        message, descriptors, *_ = socket.recv_fds(own, MESSAGE_BYTES, 2)
        if not message:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        question = json.loads(message)
        if "ends_of" in question:
            found = [os.waitpid(pid, 0 if question["waits"] else os.WNOHANG) for pid in question["ends_of"]]
            answer: Any = {pid: os.waitstatus_to_exitcode(status) for pid, status in found if pid}
            children -= answer.keys()
        else:
            for module in question["imports"]:
                importlib.import_module(module)
            # Else each fork looks through all that was imported, and copies the pages, when it collects or ends.
            gc.freeze()
            answer = os.fork()
            if answer == 0:
                own.close()
                for own_number, descriptor in enumerate(descriptors, start=1):
                    os.dup2(descriptor, own_number)
            for descriptor in descriptors:
                os.close(descriptor)
            if answer == 0:
                return question
            children.add(answer)
        own.send(json.dumps(answer).encode())


def _be(job: dict[str, Any]) -> None:
    """The rest of a fork's life: what Python does with such a command line."""
    signal.alarm(ALARM_S)
    os.environ.update(job["environment"])
    sys.argv = job["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _be(_serve(socket.socket(fileno=int(sys.argv[1]))))
