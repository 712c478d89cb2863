"""Brings copies of committed steps of the fast tier to other nodes, while the training continues.

Each node's lead fetches the files that its node should have, from other nodes that have these files. One step is
fetched at a time. If several steps are committed meanwhile, only the newest of these steps is fetched next, because
copies of the older steps would soon be useless.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CommitError
from mcore_ckpt.events import ErrorText
from mcore_ckpt.fast.tier import NodeTier
from mcore_ckpt.fast.transaction import committed_manifest
from mcore_ckpt.fast.transport import PeerError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import make_folders, open_new, sync_dir, sync_names, write_all
from mcore_ckpt.io.threads import results_of
from mcore_ckpt.io.worker import Handle, NoThreadError, Worker
from mcore_ckpt.ranks.deadlines import deadline_after, seconds_until
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.steps.node_steps import files_here
from mcore_ckpt.steps.transaction import Attempt

logger = logging.getLogger(__name__)

_PASSED_OVER = "a newer step was saved before the copies of this step could begin"
_CLOSED = "the manager was closed"
# How long `close` waits for the thread, in seconds.
_JOIN_S = 10.0


class CopyHandle(Handle[str | None]):
    """The copies of one step on other nodes. `wait` returns `problem`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the copies of step {step} are still under way")
        self.step = step

    @property
    def exception(self) -> CheckpointError | None:
        """The `problem` as an error. `wait` does not raise this error."""
        return None if self._result is None else CommitError(self._result)

    @property
    def problem(self) -> str | None:
        """Why some node lacks copies. None while the copies are under way, and if no node lacks copies."""
        return self._result

    @property
    def complete(self) -> bool:
        """True if every file is on as many nodes as it should be."""
        return self.done and self._result is None


@dataclass(frozen=True, eq=False)
class _Wanted:
    attempt: Attempt
    handle: CopyHandle


class Copies:
    """Fetches the copies of one manager's steps on a separate thread. `agreement` is for the rounds of that thread."""

    def __init__(self, agreement: Agreement, tier: NodeTier) -> None:
        self._agreement, self._tier = agreement, tier
        self._limit = _RateLimit(tier.config.bytes_per_s)
        self._lock = threading.Lock()
        self._pending: list[_Wanted] = []  # the copies of the first entry are under way
        self._may_copy = threading.Event()
        self._may_copy.set()
        self._closed = threading.Event()
        self._complete: set[str] = set()
        self._worker = Worker("mcore_ckpt copies", must_finish=False)

    def add(self, step: int, attempt: Attempt) -> CopyHandle:
        """Queues the copies of a step that is committed. Every rank must queue the same steps in the same order."""
        wanted = _Wanted(attempt, CopyHandle(step))
        if not self._tier.config.replicas:
            self._complete.add(attempt.number)
            wanted.handle.end(None)
            return wanted.handle
        try:
            with self._lock:
                self._pending.append(wanted)
            self._worker.add(partial(self._copy, wanted))
        except NoThreadError as error:
            logger.warning("no copies reach other nodes, because %s: the next save tries again", error)
            self._end(wanted, "the system allows no more threads on this rank")
        except BaseException:  # from a signal handler
            self._end(wanted, "the save was interrupted")
            raise
        return wanted.handle

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Fetches nothing during the `with` block, in which the training state is copied."""
        self._may_copy.clear()
        try:
            yield
        finally:
            self._may_copy.set()

    def needed(self) -> set[str]:
        """Returns the ids of saves that must not be deleted, because their copies are under way or queued."""
        with self._lock:
            return {each.attempt.number for each in (*self._pending[:1], *self._pending[-1:])}

    def is_complete(self, attempt: str) -> bool:
        """Returns True if every file of a save is known to be on as many nodes as it should be."""
        return attempt in self._complete

    def mark_complete(self, attempt: str) -> None:
        """Notes that a save of an earlier manager needs no further copies."""
        self._complete.add(attempt)

    def wait(self, timeout: float | None = None, step: int | None = None) -> None:
        """Waits until no copies are under way or queued; if `step` is given, waits only for the copies of `step`.

        Raises TimeoutError.
        """
        deadline = deadline_after(timeout)
        with self._lock:
            pending = [each.handle for each in self._pending]
        for handle in pending:
            if step in (None, handle.step):
                handle.wait(seconds_until(deadline))

    def close(self) -> None:
        """Gives up the copies that are under way or queued, and waits for the end of the thread."""
        self._closed.set()
        self._worker.wait_at_most(_JOIN_S)

    def _copy(self, wanted: _Wanted) -> None:
        if self._closed.is_set():
            self._end(wanted, _CLOSED)
            return
        problem: str | None
        try:
            if self._is_passed_over(wanted):
                self._end(wanted, _PASSED_OVER)
                return
            problem = self._copy_together(wanted.attempt)
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:
            told = ErrorText.of(error)
            logger.error("copies of step %d have failed unexpectedly\n%s", wanted.handle.step, told.stacktrace)
            problem = f"{told.type}: {told.message}"
        if problem is not None and not self._closed.is_set():
            logger.warning("step %d is on too few nodes: %s", wanted.handle.step, problem)
        self._end(wanted, problem)

    def _is_passed_over(self, wanted: _Wanted) -> bool:
        """Returns True, on every rank, if some rank knows that a newer step is committed."""
        attempt = wanted.attempt

        def work() -> Record:
            with self._lock:
                return {"newer": self._pending[-1] is not wanted}

        def combine(records: Sequence[Record]) -> Record:
            return {"newer": any(record["newer"] for record in records)}

        # The rounds of each step have their own names, because a rank on which the commit has failed misses the rounds
        # of this step.
        outcome = decide(
            self._agreement,
            f"choosing whether to copy {attempt.role_dir}",
            work,
            combine,
            CommitError,
            name=f"{attempt.number}-choice",
        )
        return bool(outcome["newer"])

    def _end(self, wanted: _Wanted, problem: str | None) -> None:
        if problem is None:
            self._complete.add(wanted.attempt.number)
        with self._lock:
            if wanted in self._pending:  # a signal handler may have removed `wanted` already
                self._pending.remove(wanted)
        wanted.handle.end(problem)

    def _copy_together(self, attempt: Attempt) -> str | None:
        """Fetches this node's copies. Returns why a node lacks files; None if no node lacks a file."""

        def work() -> Record:
            return {"problem": self._fetch_all(attempt) if self._tier.is_lead else None}

        def combine(records: Sequence[Record]) -> Record:
            problems = [record["problem"] for record in records if record["problem"] is not None]
            more = f" (and more on {len(problems) - 1} other nodes)" if len(problems) > 1 else ""
            return {"problem": problems[0] + more if problems else None}

        topic = f"copying {attempt.role_dir} to other nodes"
        name = f"{attempt.number}-copies"
        outcome = decide(self._agreement, topic, work, combine, CommitError, name=name)
        problem: str | None = outcome["problem"]
        return problem

    def _fetch_all(self, attempt: Attempt) -> str | None:
        """Fetches the files that this node should have but lacks. Returns why a file is missing, None if no file is."""
        manifest = committed_manifest(attempt)
        assert manifest.placement is not None
        here = set(files_here(attempt.role_dir, manifest))
        missing = [position for position in manifest.placement.files_on(self._tier.number) if position not in here]
        with self._agreement.limited(self._agreement.timeout_s * 3 / 4) as patience_s:
            deadline = time.monotonic() + patience_s
            fetch = partial(self._fetch, attempt.role_dir, manifest, deadline=deadline)
            results = results_of(missing, fetch, tuning.PEER_THREADS)
        problems = [problem for problem in results if problem is not None]
        with suppress(FileNotFoundError):  # the step was deleted meanwhile, so `problems` has entries
            sync_names(attempt.role_dir, [manifest.files[position].path for position in missing])
            sync_dir(attempt.role_dir)
        if not problems:
            return None
        return f"{self._tier.node.name} has got {len(missing) - len(problems)} of {len(missing)} files: {problems[0]}"

    def _fetch(self, role_dir: Path, manifest: Manifest, position: int, deadline: float) -> str | None:
        """Fetches a file from the first node that sends it intact. Returns why no node does, None if a node does."""
        assert manifest.placement is not None
        file = manifest.files[position]
        problem = f"{file.path}: no other node has this file"
        for node in manifest.placement.by_file[position]:
            if node == self._tier.number:
                continue
            try:
                self._fetch_from(node, role_dir, file, position, deadline)
            except FileNotFoundError as error:
                problem = f"{file.path}: is missing: {error}"
            except (PeerError, CheckpointCorruptError, TimeoutError) as error:
                problem = f"{file.path}: {error}"
            except OSError as error:
                return f"{role_dir / file.path}: cannot be written: {error}"
            else:
                return None
        return problem

    def _fetch_from(self, node: int, role_dir: Path, file: FileRecord, position: int, deadline: float) -> None:
        store = self._tier.peer(node)
        key = str((role_dir / file.path).relative_to(self._tier.folder))
        make_folders(role_dir, file.path)
        path = role_dir / file.path
        partial_path = file_names.partial_file(role_dir, file.path, position)
        descriptor = open_new(partial_path, os.O_TRUNC)
        try:
            crc, piece = 0, bytearray(min(tuning.PEER_BYTES, file.size))
            for start in range(0, file.size, tuning.PEER_BYTES):
                memory = memoryview(piece)[: min(tuning.PEER_BYTES, file.size - start)]
                self._wait_for_turn(len(memory), deadline)
                store.read_into(key, start, memory)
                crc = crc32(memory, crc)
                write_all(descriptor, memory)
            if crc != file.crc32:
                raise CheckpointCorruptError(f"{store.url_of(key)}: has a wrong CRC: its bytes are damaged")
            os.fsync(descriptor)
            os.rename(partial_path, path)
        finally:
            os.close(descriptor)
            partial_path.unlink(missing_ok=True)

    def _wait_for_turn(self, nbytes: int, deadline: float) -> None:
        """Waits while a save is captured, and until the rate limit allows `nbytes` bytes."""
        self._may_copy.wait(max(0.0, deadline - time.monotonic()))
        # With a low rate, this wait can take hours, so `close` must end it.
        self._closed.wait(min(self._limit.take(nbytes), max(0.0, deadline - time.monotonic())))
        if self._closed.is_set():
            raise TimeoutError(_CLOSED)
        if time.monotonic() > deadline:
            raise TimeoutError("the copies took too long: allow more bytes_per_s, or save less often")


class _RateLimit:
    """Limits how many bytes a second all threads together may fetch."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int) -> float:
        """Returns how long to wait until the bytes may pass, in seconds."""
        if self._bytes_per_s is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            start = max(self._free_at, now)
            self._free_at = start + nbytes / self._bytes_per_s
        return start - now
