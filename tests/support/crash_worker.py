"""Saves of a few real processes, with three parts of each step, one of which kills itself at a chosen point.

Run as a program it imports torch once and forks for each job that comes as a line of JSON on stdin; when a job has
ended, its number is written to stdout and what its ranks saw lies in the job's folder of results.
"""

import contextlib
import datetime
import functools
import io
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.save.background import BackgroundSaves, SaveHandle
from mcore_ckpt.save.destination import Following
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.transaction import Attempt
from tests.support.checkpoints import SMALL_KNOBS, begin, delete_old, finish
from tests.support.crash_parts import RankParts, make_given

WORLD = 3
TIMEOUT_S = 3.0

# A new step, the same one again (exchanged), and one more, after which the oldest may go. (step, version)
SAVES = ((2, 21), (2, 22), (3, 31))
KEEP = 2

# Far above any deadline here: a rank that hangs must fail its test, not the machine.
ALARM_S = 60

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """`port`: of the store's host, or None: rank 0 hosts it. `victim`: nobody if it is None. `background`: saves end
    on a thread of their own.

    It dies at the `kill_count`-th of its events called `kill_at`, or, if that does not come, when all is saved: which
    of two ranks makes a folder, and so has more to do, differs from run to run.
    """

    number: int
    root: str
    results: str
    port: int | None
    victim: int | None = None
    kill_at: str = ""
    kill_count: int = 0
    exchange: bool = True
    background: bool = False
    saves: tuple[tuple[int, int], ...] = SAVES

    @property
    def timeout_s(self) -> float:
        """Where nobody dies nobody is waited for in vain, and a busy machine needs no deadline."""
        return ALARM_S if self.victim is None else TIMEOUT_S


class Watch:
    """Notes what a rank does to disk and store, and tells when it is to die."""

    def __init__(self, kill_at: str, kill_count: int) -> None:
        self._kill_at = kill_at
        self._kill_count = kill_count
        self.events: list[str] = []
        self.phase = ""
        self._undo = contextlib.ExitStack()

    def event(self, name: str) -> bool:
        """Notes one. False if it is the one to die at: the caller may do half of it before it calls `die`."""
        label = f"{self.phase}:{name}"
        self.events.append(label)
        return label != self._kill_at or self.events.count(label) != self._kill_count

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Gives the events of a part of a save names of their own."""
        phase, self.phase = self.phase, f"{self.phase}-{name}"
        yield
        self.phase = phase

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def watch_io(self) -> None:
        for module, names in ((os, "open write fsync rename replace mkdir stat link unlink rmdir"), (io, "open")):
            for name in names.split():
                self._wrap(module, name)
        native = _native.WriteJob
        _native.WriteJob = lambda **options: WatchedJob(native(**options), self)  # type: ignore[assignment, misc]
        self._undo.callback(setattr, _native, "WriteJob", native)

    def _wrap(self, module: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(module, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.event(name):
                if module is os and name == "write":
                    original(args[0], memoryview(args[1])[: len(args[1]) // 2])
                self.die()
            return original(*args, **kwargs)

        setattr(module, name, watched)
        self._undo.callback(setattr, module, name, original)

    def stop(self) -> None:
        self._undo.close()


class WatchedJob:
    """Native threads that write, whose calls are events. To die in `wait` is to die when some of it is written."""

    def __init__(self, job: Any, watch: Watch) -> None:
        self._job = job
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        if name in ("start", "wait", "finish") and not self._watch.event(f"native_{name}"):
            while name == "wait" and not self._job.progress():
                pass
            self._watch.die()
        return getattr(self._job, name)


class WatchedStore:
    """A store whose calls are events. Of the checks of a wait only the last: of the others there may be any number."""

    def __init__(self, store: Any, watch: Watch) -> None:
        self._store = store
        self._watch = watch

    def check(self, keys: list[str]) -> bool:
        found = bool(self._store.check(keys))
        if found:
            self._count("check")
        return found

    def __getattr__(self, name: str) -> Any:
        self._count(name)
        return getattr(self._store, name)

    def _count(self, name: str) -> None:
        if not self._watch.event(name):
            self._watch.die()


def run_rank(job: Job, rank: int, listener: socket.socket | None) -> None:
    """Saves until all is saved or an error comes, and tells what happened. Never returns."""
    signal.alarm(ALARM_S)
    report: dict[str, Any] = {"saved": 0, "error": None, "seconds": 0.0}
    watch = Watch(job.kill_at if rank == job.victim else "", job.kill_count)
    try:
        if not job.exchange:
            commit.exchange = lambda first, second: False
        store = _connect(job, rank, listener)
        # A wait blocks its client: a thread that ends a save has its own.
        commits_store = store.clone() if job.background else store
        _meet(store, job, rank)
        agreement, commits = (
            Agreement(WatchedStore(client, watch), rank, WORLD, f"job{job.number}/{name}", job.timeout_s)
            for name, client in (("trainer", store), ("saves", commits_store))
        )
        if rank == 0:
            make_given(Path(job.root).parent, (version for _, version in job.saves))
        watch.watch_io()
        _save_all(job, agreement, commits, watch, report)
        if rank == job.victim:
            watch.die()
    except BaseException:
        report["error"] = ["unexpected", traceback.format_exc()]
    watch.stop()
    report["events"] = watch.events
    Path(job.results, f"{rank}.json").write_text(json.dumps(report))
    os._exit(0)


def _connect(job: Job, rank: int, listener: socket.socket | None) -> Any:
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    if listener is None:
        return tcp_store(LOCALHOST, job.port, is_master=False)
    port = listener.getsockname()[1]
    if rank == 0:
        return tcp_store(LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    # Else the connection would stay open when its host has died.
    listener.close()
    return tcp_store(LOCALHOST, port, is_master=False)


def _meet(store: Any, job: Job, rank: int) -> None:
    """Before any deadline begins: to connect takes seconds now and then (seen: 5)."""
    keys = [f"job{job.number}/connected/{other}" for other in range(WORLD)]
    store.set(keys[rank], b"")
    store.wait(keys, datetime.timedelta(seconds=ALARM_S))


class RankSave:
    """What a SaveHandle ends: the second half of checkpoints.save_together."""

    def __init__(
        self, job: Job, commits: Agreement, attempt: Attempt, step: int, version: int, watch: Watch, parts: RankParts
    ) -> None:
        self._job, self._commits, self._attempt, self.step, self._version = job, commits, attempt, step, version
        self._watch, self._parts = watch, parts

    def finish(self, stall_s: float | None) -> tuple[SimpleNamespace, Following]:
        root = Path(self._job.root)
        finish(self._commits, self._attempt, root, self.step, self._version, write_more=self._write_parts)
        with self._watch.within("given"):
            self._parts.committed()
        return SimpleNamespace(seconds=0, plan_s=0, copy_s=0, write_s=0, export_s=0, commit_s=0), Following(
            delete=self.delete, deletes=frozenset({0})
        )

    def _write_parts(self, staging: Path) -> list[WrittenFile]:
        with self._watch.within("parts"):
            return self._parts.write(staging)

    def delete(self) -> None:
        if self._commits.is_coordinator:
            delete_old(Path(self._job.root), self.step, KEEP)

    def progress(self) -> tuple[int, int]:
        return 0, 0


def _save_all(job: Job, agreement: Agreement, commits: Agreement, watch: Watch, report: dict[str, Any]) -> None:
    background = BackgroundSaves(commits, warns=False)
    for number, (step, version) in enumerate(job.saves):
        watch.phase = str(number)
        started = time.monotonic()
        try:
            background.wait_until_idle()
            attempt = begin(agreement, Path(job.root), step)
            parts = RankParts(commits, Path(job.root), version)
            with watch.within("parts"):
                parts.capture(attempt)
            save = RankSave(job, commits, attempt, step, version, watch, parts)
            handle = SaveHandle(step, save, save.finish)  # type: ignore[arg-type]
            if job.background:
                background.launch(handle, 0.0)
            else:
                following = handle.run(None)
                if following is not None:
                    following.delete()
            handle.wait()
        except CheckpointError as error:
            report["error"] = [type(error).__name__, str(error)]
            report["seconds"] = time.monotonic() - started
            return
        report["saved"] += 1
    background.wait_until_idle()


def run_job(job: Job) -> None:
    """All ranks of a job, from fork to burial: a process that is dead but not waited for is still in /proc."""
    listener = socket.create_server((LOCALHOST, 0)) if job.port is None else None
    ranks = {}
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            run_rank(job, rank, listener)
        ranks[pid] = rank
    if listener is not None:
        listener.close()
    ends = {}
    for pid, rank in ranks.items():
        _, status = os.waitpid(pid, 0)
        ends[rank] = os.waitstatus_to_exitcode(status)
    Path(job.results, "ends.json").write_text(json.dumps([ends[rank] for rank in range(WORLD)]))


def serve() -> None:
    for line in sys.stdin:
        record = json.loads(line)
        job = Job(**record | {"saves": tuple(map(tuple, record["saves"]))})
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run_job(job)
            os.write(1, f"{job.number}\n".encode())
            os._exit(0)


def encode(job: Job) -> str:
    return json.dumps(asdict(job)) + "\n"


if __name__ == "__main__":
    vars(tuning).update(SMALL_KNOBS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the jobs' own children; a job waits for its ranks
    serve()
