"""Ends saves beside the training: the threads, the handle, and how the trainer learns of a failure."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from weakref import WeakSet

from mcore_ckpt.errors import CheckpointError, CommitError, from_record, to_record
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.save.save import Save
from mcore_ckpt.save.save_report import SaveReport
from mcore_ckpt.steps.upload_queue import UploadHandle

logger = logging.getLogger(__name__)


class SaveHandle:
    """A save that is under way or has ended.

    Example:
        >>> handle = manager.save(100)  # doctest: +SKIP
        >>> handle.wait().disk_gb_per_s  # doctest: +SKIP
        3.1
    """

    def __init__(self, save: Save) -> None:
        self._save: Save | None = save
        self.step = save.step
        self._ended = threading.Event()
        self._progress = save.progress()
        self._report: SaveReport | None = None
        self._exception: CheckpointError | None = None
        self._upload: UploadHandle | None = None
        self._failure_seen = False

    @property
    def done(self) -> bool:
        """True if the save has ended, with success or not."""
        return self._ended.is_set()

    @property
    def committed(self) -> bool:
        """True if the checkpoint is in its place. False while the save is under way, and for ever if it fails."""
        return self._report is not None

    @property
    def exception(self) -> CheckpointError | None:
        """The error that the save failed with; None while it is under way, and if it succeeded."""
        return self._exception

    @property
    def report(self) -> SaveReport | None:
        """The report of the save on this rank; None until it is committed."""
        return self._report

    @property
    def upload(self) -> UploadHandle | None:
        """The upload to the remote store, once the checkpoint is committed.

        None on other ranks than 0, and without `remote`.
        """
        return self._upload

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes of tensors that this rank has written, and the bytes that it has to write."""
        save = self._save
        return self._progress if save is None else save.progress()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Waits until the checkpoint is committed, and returns the report.

        Args:
            timeout: how long to wait, in seconds; None: until the save ends.

        Raises:
            TimeoutError: the save is still under way after `timeout` seconds, and goes on. It is Python's own error,
                because nothing has failed.
            CheckpointError: the save failed; the previous checkpoint stays.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save of step {self.step} is still under way after {timeout:g} s")
        if self._exception is not None:
            self._failure_seen = True
            raise self._exception
        assert self._report is not None
        return self._report

    def run(self, stall_s: float | None) -> Callable[[], None] | None:
        """Ends the save, on the calling thread. Raises nothing: `wait` does.

        Returns what remains to be done after the commit, deleting old steps; None if the save failed.
        """
        assert self._save is not None
        save = self._save
        try:
            report = save.finish(stall_s)
            self._upload, self._report = save.upload(), report
        except CheckpointError as error:
            self._exception = error
        except BaseException as error:
            self._exception = CommitError(f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
            logger.exception("a save has failed in a way that it should not")
        finally:
            self._progress = save.progress()
            self._save = None
            self._ended.set()
        return None if self._exception is not None else save.after_commit


class BackgroundSaves:
    """The saves of one manager beside the training: at most one is under way at a time.

    Old steps are deleted on another thread, so that a new save need not wait for it.

    Args:
        commits: the agreement that saves end with.
        warns: whether a failure is logged instead of raised.
    """

    def __init__(self, commits: Agreement, warns: bool) -> None:
        self._commits = commits
        self._warns = warns
        self._handle: SaveHandle | None = None
        self._save = _Worker("mcore_ckpt save")
        self._deletions = _Worker("mcore_ckpt deletion")
        _all_saves.add(self)

    @property
    def busy(self) -> bool:
        """True if a save has not ended yet. A committed save has ended, though old steps may still be deleted."""
        return self._handle is not None and not self._handle.done

    @property
    def is_deleting(self) -> bool:
        """True if old steps are being deleted."""
        return self._deletions.is_busy

    def launch(self, handle: SaveHandle, stall_s: float) -> None:
        """Ends a save on a thread of its own. No other may be under way."""
        self._handle = handle
        self._save.add(partial(self._end, handle, stall_s))

    def run(self, handle: SaveHandle) -> None:
        """Ends a save on the calling thread. Deleting old steps does not hold up the caller."""
        self._delete(handle.run(None))

    def wait_for_save(self) -> None:
        """Waits until no save is under way. Deadlines within the save bound the wait."""
        self._save.wait()

    def wait_for_deletions(self) -> None:
        """Waits until no old step is being deleted for a save that is committed."""
        self._deletions.wait()

    def wait_until_idle(self) -> None:
        """Waits until no save is under way and no old step is being deleted."""
        self.wait_for_save()
        self.wait_for_deletions()

    def failure(self) -> Record | None:
        """The failure of the last save, if the trainer has not seen it yet."""
        handle = self._handle
        if self._warns or handle is None or handle.exception is None or handle._failure_seen:
            return None
        record = to_record(handle.exception, self._commits.rank)
        return record | {"message": f"an earlier save, of step {handle.step}, has failed: {record['message']}"}

    def mark_failure_seen(self) -> None:
        """Records that the trainer has seen the failure of the last save, so that it is not raised again."""
        if self._handle is not None:
            self._handle._failure_seen = True

    def raise_failure(self) -> None:
        """Raises the failure of the last save, if the trainer has not seen it yet."""
        record = self.failure()
        if record is not None:
            self.mark_failure_seen()
            raise from_record(record, CommitError)

    def shorten(self) -> None:
        """Shortens the waits for other ranks: they may be dead when the interpreter ends."""
        self._commits.limit_waits(deadlines.EXIT_WAIT_S)

    def _end(self, handle: SaveHandle, stall_s: float) -> None:
        rest = None
        try:
            rest = handle.run(stall_s)
        finally:
            if handle.exception is not None:
                # Log it now, because there may be no next call to raise it.
                consequence = "; going on without a checkpoint" if self._warns else ""
                logger.error("the save of step %d has failed%s: %s", handle.step, consequence, handle.exception)
        self._delete(rest)

    def _delete(self, rest: Callable[[], None] | None) -> None:
        if rest is not None:
            self._deletions.add(rest)


class _Worker:
    """Does what it is given, one after the other, on a thread that lives only while there is something to do."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        _workers.add(self)

    def add(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append(work)
            if self._thread is not None and self._thread.is_alive():
                return
            # A daemon, because the interpreter would wait for any other thread without a deadline. `_finish_all` has
            # a deadline.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # a system that grants no thread makes a save slower, and must not make it fail
                self._thread = None
            else:
                self._thread = thread
                return
        self._run()

    @property
    def is_busy(self) -> bool:
        with self._lock:
            return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Returns when nothing is left to do."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception:
                logger.exception("the thread %r goes on after a failure that should not happen", self._name)


# Weak, because a running thread keeps its worker and its save alive, even if the trainer has dropped the manager.
_all_saves: WeakSet[BackgroundSaves] = WeakSet()
_workers: WeakSet[_Worker] = WeakSet()


@atexit.register
def _finish_all() -> None:
    saves = list(_all_saves)
    for each in saves:
        each.shorten()
    for each in saves:
        each.wait_for_save()
    # After the saves, because each of them may add a deletion.
    for worker in list(_workers):
        worker.wait()
