"""Runs commands and functions in processes with a time limit, and leaves no process of theirs behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_checks.outcome import Outcome

SCRIPTS = Path(__file__).resolve().parents[1]
REPOSITORY = SCRIPTS.parent
# Where calls find their modules. Commands do not: they find the package and `tests`.
FOR_CALLS = (SCRIPTS, REPOSITORY / "benchmarks")

# All processes that a command starts inherit this variable. Process groups would not do, because torchrun and tests
# make groups of their own.
MARK = "MCORE_CKPT_GPU_CHECK"
# The kernel removes a killed process only when the GPU's driver lets go of it, and perhaps never.
KILL_S = 30.0


@dataclass(frozen=True)
class Command:
    """A command to run.

    Attributes:
        words: the program and its arguments.
        log: the file for what it prints.
        more: variables added to the environment.
        output: the file for its standard output. None: the log.
    """

    words: tuple[str, ...]
    log: Path
    more: Mapping[str, str] = field(default_factory=dict)
    output: Path | None = None


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: its exit status, which is negative for a signal. None: it was killed.
        was_late: whether it was killed at the time limit. Otherwise it was killed because another one had failed.
        log: the file with what it has printed.
        seconds: how long it ran.
    """

    status: int | None
    was_late: bool
    log: Path
    seconds: float

    @property
    def why(self) -> str:
        """Why it is not over as it should be, with the last line that it has printed."""
        if self.status is None:
            ended = f"has not ended after {self.seconds:.0f} s" if self.was_late else "was killed, as another failed"
        elif self.status < 0:
            ended = f"was ended by {signal.Signals(-self.status).name}"
        else:
            ended = f"ended with status {self.status}"
        return f"{ended}; last words: {last_line(self.log)!r}; log: {self.log}"


@dataclass(frozen=True)
class Call:
    """A call of a function in a process of its own.

    Attributes:
        function: its name, as "gpu_checks.graphs:captures".
        arguments: texts.
        more: variables added to the environment.
    """

    function: str
    arguments: tuple[str, ...] = ()
    more: Mapping[str, str] = field(default_factory=dict)


def call_all(calls: Sequence[Call], limit_s: float, folder: Path) -> list[Outcome]:
    """Makes all calls at the same time, and returns how each ended, its exit included.

    When one has failed, the others are killed, because they may wait for it.

    Args:
        calls: the calls.
        limit_s: after how many seconds all that still run are killed.
        folder: an empty or missing folder for results and logs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = [folder / f"{number}.json" for number in range(len(calls))]
    commands = [
        Command(
            (sys.executable, "-m", "gpu_checks.child", call.function, str(result), *call.arguments),
            result.with_suffix(".log"),
            {"PYTHONPATH": _python_path(*FOR_CALLS), **call.more},
        )
        for call, result in zip(calls, results, strict=True)
    ]
    ended = run_all(commands, limit_s)
    return [_outcome(each, result) for each, result in zip(ended, results, strict=True)]


def _outcome(ended: Ended, result: Path) -> Outcome:
    if not result.exists():
        return Outcome("failed", f"the process {ended.why}")
    outcome = Outcome.of(json.loads(result.read_text()))
    if outcome.status == "passed" and ended.status != 0:
        return Outcome("failed", f"after its last line, the process {ended.why}")
    return outcome


def run_all(commands: Sequence[Command], limit_s: float) -> list[Ended]:
    """Runs commands at the same time, until all have ended, one has failed, or the time is over.

    Then it kills what is left of them, wherever their processes have gone.
    """
    mark = f"{os.environ.get(MARK, '')}/{uuid.uuid4().hex}"
    started = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += [_start(command, mark) for command in commands]
        was_late = not _wait(processes, started + limit_s)
        seconds = time.monotonic() - started
        statuses = [process.poll() for process in processes]
    finally:
        _kill_marked(mark, processes)
    return [Ended(status, was_late, command.log, seconds) for command, status in zip(commands, statuses, strict=True)]


def run(command: Command, limit_s: float) -> Ended:
    """Runs one command. See `run_all`."""
    return run_all([command], limit_s)[0]


def _start(command: Command, mark: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": _python_path(), **command.more, MARK: mark}
    with open(command.log, "wb") as log, open(command.output or os.devnull, "wb") as output:
        return subprocess.Popen(
            command.words,
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output if command.output else log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the runner, which then kills
        )


def _python_path(*own: Path) -> str:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [entry for entry in given if entry and Path(entry) not in (REPOSITORY, *FOR_CALLS)]
    return os.pathsep.join(map(str, (REPOSITORY, *own, *others)))


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Waits until all have ended or one has failed. Returns False if the deadline comes first."""
    while True:
        statuses = [process.poll() for process in processes]
        if None not in statuses or any(statuses):
            return True
        if time.monotonic() >= deadline:
            return False
        running = [os.pidfd_open(each.pid) for each, status in zip(processes, statuses, strict=True) if status is None]
        try:
            select.select(running, [], [], max(0.0, deadline - time.monotonic()))
        finally:
            for descriptor in running:
                os.close(descriptor)


def _kill_marked(mark: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills all processes that inherited the mark, and waits for the own ones, for a limited time.

    Processes of this program are found by their environment, also when their parents are dead.
    """
    deadline = time.monotonic() + KILL_S
    while (left := list(_marked(mark))) and time.monotonic() < deadline:
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap(processes, 0.1)
    _reap(processes, 0.1)
    if left:
        print(f"gpu_check: processes {left} cannot be killed", file=sys.stderr)


def _reap(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    for process in processes:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def _marked(mark: str) -> Iterator[int]:
    begin = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is of another user
            continue
        # A nested runner's mark begins with that of the outer one.
        if any(each == begin or each.startswith(begin + b"/") for each in variables):
            yield int(entry.name)


def last_line(log: Path) -> str:
    """Returns the last line of a log that is not empty, shortened."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:300]
