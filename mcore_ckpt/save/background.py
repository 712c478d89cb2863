"""Finishes saves in the background: runs their threads, defines their handle, and tells the trainer of failures.

    trainer's thread   BackgroundSaves.launch   returns immediately; `SaveHandle.wait` waits for the save's end
    save's thread      SaveHandle.run           finishes the save: writes the files and commits
    deletion's thread  Following.delete         deletes old steps; a new save need not wait for the deletion

A thread of `steps/space_watch.py` checks whether the next save will fit on the disk. Nothing waits for this thread.

Each thread ends when it has no more work. An exiting interpreter waits for the threads of saves and of deletions
(`_finish_all`).
"""

from __future__ import annotations

import atexit
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol
from weakref import WeakSet

from mcore_ckpt.errors import CheckpointError, CommitError, HungDiskError, from_record, to_record
from mcore_ckpt.events import ErrorText
from mcore_ckpt.fast.copies import CopyHandle
from mcore_ckpt.fast.drains import DrainHandle, shorten_drains
from mcore_ckpt.interrupts import is_interrupt
from mcore_ckpt.io.worker import Handle, Worker, all_workers
from mcore_ckpt.processes import emptied_in_child
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.save.destination import Following
from mcore_ckpt.save.save_times import SaveReport
from mcore_ckpt.steps.transaction import EarlierSaveError
from mcore_ckpt.steps.upload_queue import UploadHandle

logger = logging.getLogger(__name__)

# How many recent saves are remembered. The next save is expected to take no longer than the slowest of these saves.
_REMEMBERED = 5
# A wait for a copy to the root checks in intervals of this many seconds whether the machine is about to be taken away.
_LOOK_S = 0.2

# Writes and commits a save. The argument is how long the trainer was held up, in seconds; None if the trainer waits
# until this function returns. Raises CheckpointError if the save failed.
Finish = Callable[[float | None], tuple[SaveReport, Following]]


class Writing(Protocol):
    """The files that this rank writes in one save. `rank_files.RankFiles` implements this protocol."""

    def progress(self) -> tuple[int, int]: ...
    def limit_device_wait(self, seconds: float) -> None: ...


def _never(stall_s: float | None) -> tuple[SaveReport, Following]:
    raise AssertionError("a save that has not begun cannot be finished")


class _Nothing:
    """Stands in for the files of a skipped save, because a skipped save has no files."""

    def progress(self) -> tuple[int, int]:
        return 0, 0

    def limit_device_wait(self, seconds: float) -> None:
        pass


class SaveHandle(Handle[SaveReport]):
    """A save that is under way, has ended, or was skipped.

    Attributes:
        step: the step.
        skipped: why the save was skipped; None if it was not skipped. A save is skipped if an earlier save is under way
            and `if_busy` is "skip". All ranks skip the same saves. For a skipped save, `committed` is False, and `wait`
            returns a report of 0 bytes.
        has_begun: False if the save was skipped or, with `if_failed="warn"`, refused (`NoRoomError`, `HungDiskError`).
            Then nothing was saved. The value is the same on all ranks.

    Example:
        >>> handle = manager.save(100)  # doctest: +SKIP
        >>> handle.wait().disk_gb_per_s  # doctest: +SKIP
        3.1
    """

    def __init__(self, step: int, writing: Writing, finish: Finish = _never) -> None:
        super().__init__(f"the save of step {step} is still under way", ", and continues: wait again later")
        self.step = step
        self.skipped: str | None = None
        self.has_begun = True
        self._writing: Writing | None = writing
        self._finish: Finish | None = finish
        self._progress = writing.progress()
        self._following = Following()
        self._failure_seen = False

    @classmethod
    def of_skipped(cls, step: int, reason: str, report: SaveReport) -> SaveHandle:
        """Returns the handle of a save that was skipped."""
        handle = cls(step, _Nothing())
        handle.skipped, handle.has_begun = reason, False
        handle._writing = handle._finish = None
        handle.end(report)
        return handle

    @property
    def committed(self) -> bool:
        """True if the checkpoint is committed.

        False while the save is under way, and if it has failed or was skipped.
        """
        return self._result is not None and self.skipped is None

    @property
    def report(self) -> SaveReport | None:
        """The report of the save on this rank. None until the checkpoint is committed."""
        return self._result if self.skipped is None else None

    @property
    def upload(self) -> UploadHandle | None:
        """The upload of the checkpoint to the remote store. None until the checkpoint is committed.

        Always None on ranks other than rank 0, in a run without a remote store, and for a checkpoint that is not part
        of a step.
        """
        return self._following.upload

    @property
    def copies(self) -> CopyHandle | None:
        """The copies of the step on other nodes. None until the step is committed. Always None without a fast tier."""
        return self._following.copies

    @property
    def drain(self) -> DrainHandle | None:
        """The copy of a durable step to the root.

        None until the step is committed. Always None for a step that is not durable, and without a fast tier.
        """
        return self._following.drain

    @property
    def progress(self) -> tuple[int, int]:
        """The number of bytes of tensors that this rank has written, and the number that it must write in all."""
        writing = self._writing
        return self._progress if writing is None else writing.progress()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Waits until the checkpoint is committed, and returns the report. A skipped save has a report of 0 bytes.

        Args:
            timeout: how long to wait, in seconds; None to wait until the save ends.

        Raises:
            TimeoutError: the save is still under way after `timeout` seconds, and continues. A TimeoutError is not a
                CheckpointError, because nothing has failed.
            CheckpointError: the save failed. The previous checkpoint stays.
        """
        try:
            return super().wait(timeout)
        except CheckpointError:
            self._failure_seen = self.done
            raise

    def run(self, stall_s: float | None) -> Following | None:
        """Finishes the save on the calling thread. If the save fails, only `wait` raises the error.

        Returns the commit's `Following`; the caller must call its `delete`. Returns None if the save failed.
        """
        assert self._writing is not None
        assert self._finish is not None
        try:
            report, following = self._finish(stall_s)
            # Drop `delete`: a trainer may keep this handle for long, and `delete` keeps the trainer's model alive.
            self._following, self._result = replace(following, delete=lambda: None), report
        except CheckpointError as error:
            self._exception = error
        except BaseException as error:
            self._exception = CommitError(f"{type(error).__name__}: {error}")
            # Keep the cause: `Agreement.call` looks among an error's causes for exceptions of signal handlers, and
            # raises these exceptions unchanged.
            self._exception.__cause__ = error
            if is_interrupt(error):
                raise
            logger.error("a save has failed with an unexpected error\n%s", ErrorText.of(error).stacktrace)
        finally:
            self._progress = self._writing.progress()
            self._writing = self._finish = None
            self._ended.set()
        return None if self._exception is not None else following

    def fail(self, error: CheckpointError) -> None:
        """Ends a save that has not begun."""
        self.has_begun = False
        self._writing = self._finish = None
        super().fail(error)


class BackgroundSaves:
    """Runs the saves of one manager in the background, at most one at a time.

    Old steps are deleted on a second thread, so that a new save need not wait for the deletion. If `warns` is True,
    failures are only logged: the manager's next call does not raise them.

    Attributes:
        newest_of_step: the last save that has begun and whose checkpoint is part of a step; None if there is none.
        awaits_drains: whether `finish` also waits for the copy to the root, if the saves are not async.
    """

    def __init__(self, commits: Agreement, warns: bool, is_async: bool = True) -> None:
        self._commits, self._warns, self._is_async = commits, warns, is_async
        self._handle: SaveHandle | None = None
        self.newest_of_step: SaveHandle | None = None
        self.awaits_drains = True
        self._save = Worker("mcore_ckpt save")
        self._deletions = Worker("mcore_ckpt deletion")
        self._deleting: set[Following] = set()
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        _all_saves.add(self)

    @property
    def busy(self) -> bool:
        """True if a save has not ended yet. A committed save has ended, even if old steps are still being deleted."""
        return self._handle is not None and not self._handle.done

    @property
    def is_at_work(self) -> bool:
        """True while the save's thread is finishing a save."""
        return self._save.is_at_work

    @property
    def is_deleting(self) -> bool:
        """True while old steps are being deleted, or wait to be deleted. Most commits have no steps to delete."""
        return bool(self._deleting)

    @property
    def longest_s(self) -> float | None:
        """The longest time that a recent save took from start to commit, in seconds; None before the first commit."""
        return max(self._took, default=None)

    def finish(self, handle: SaveHandle, called: float) -> SaveHandle:
        """Finishes a save after the capture: in the background, or before this returns. Returns the handle.

        No other save may be under way. `called` is when the trainer called `save` (time.perf_counter()). Old steps are
        always deleted on the deletion's thread.

        Raises CheckpointError if the save has failed before this returns.
        """
        if self._is_async:
            self.launch(handle, time.perf_counter() - called)
            return handle
        following = handle.run(None)
        self._note_time(handle)
        self._delete(following)
        handle.wait()
        if handle.drain is not None and self.awaits_drains:
            self._await_drain(handle.drain)
        return handle

    def _await_drain(self, drain: DrainHandle) -> None:
        """Waits for a copy to the root, at most until this rank's machine is taken away.

        The time when the machine is taken away may become known during the wait.
        """
        began = time.monotonic()
        while (left_s := self._commits.shortened(math.inf, began)) > 0:
            with suppress(TimeoutError):
                drain.wait(min(left_s, _LOOK_S))
                return

    def launch(self, handle: SaveHandle, stall_s: float) -> None:
        """Finishes a save on the save's thread. No other save may be under way."""
        self._handle = handle
        self._save.add(partial(self._end, handle, stall_s))

    def refuse(self, handle: SaveHandle, error: CheckpointError) -> SaveHandle:
        """Ends a save that cannot begin, as if it had failed in the background. Returns the handle."""
        handle.fail(error)
        self._handle = handle
        self._log_failure(handle)
        return handle

    def earlier_save(self, waits: bool) -> tuple[bool, Record | None]:
        """Returns whether an earlier save is under way. If none is, also returns the last save's `failure`.

        If `waits` is True, this method first waits until no save is under way.
        """
        if not waits and self.busy:
            return True, None
        self.wait_for_save()
        return False, self.failure()

    def wait_for_deletion_of(self, step: int) -> None:
        """Waits for the deletion of old steps, if `step` is one of these steps.

        Without this wait, the deletion would also remove the staging folder of a new save with the same step number.
        """
        if any(step in following.deletes for following in list(self._deleting)):
            self.wait_for_deletions()

    @contextmanager
    def raising_earlier_failure(self) -> Iterator[None]:
        """Raises the error of an earlier save that failed, and marks that error as seen."""
        try:
            yield
        except EarlierSaveError as earlier:
            self.mark_failure_seen()
            raise earlier.error from None

    def wait_for_save(self) -> None:
        """Waits until no save is under way. The save's own deadlines limit this wait."""
        self._save.wait(math.inf)

    def wait_at_most(self, seconds: float | None) -> None:
        """Waits until no save is under way, for at most `seconds` seconds; None: as long as the save lasts."""
        if self._handle is not None:
            with suppress(CheckpointError, TimeoutError):
                self._handle.wait(seconds)

    def wait_for_deletions(self) -> None:
        """Waits until the deletions that follow committed saves are done. Raises HungDiskError if the disk hangs."""
        self._deletions.wait(self._commits.timeout_s)

    def wait_until_idle(self) -> None:
        """Waits until no save is under way and no old step is being deleted."""
        self.wait_for_save()
        self.wait_for_deletions()

    def failure(self) -> Record | None:
        """Returns the last save's error as a record; None if the trainer has seen it, or errors are only logged."""
        handle = self._handle
        if self._warns or handle is None or handle.exception is None or handle._failure_seen:
            return None
        record = to_record(handle.exception, self._commits.rank)
        return record | {"message": f"an earlier save, of step {handle.step}, has failed: {record['message']}"}

    def mark_failure_seen(self) -> None:
        """Records that the trainer has seen the error of the last save, so that the error is not raised again."""
        if self._handle is not None:
            self._handle._failure_seen = True

    def raise_failure(self) -> None:
        """Raises the error of the last save if the trainer has not seen it yet."""
        record = self.failure()
        if record is not None:
            self.mark_failure_seen()
            raise from_record(record, CommitError)

    def shorten(self) -> None:
        """Shortens the waits for a GPU, and for other ranks, which may be dead when this interpreter exits."""
        self._commits.limit_waits(deadlines.EXIT_WAIT_S)
        writing = None if self._handle is None else self._handle._writing
        if writing is not None:
            writing.limit_device_wait(min(deadlines.EXIT_WAIT_S, self._commits.timeout_s))

    def _end(self, handle: SaveHandle, stall_s: float) -> None:
        following = None
        try:
            following = handle.run(stall_s)
        finally:
            if handle.exception is not None:
                self._log_failure(handle)
        self._note_time(handle)
        self._delete(following)

    def _note_time(self, handle: SaveHandle) -> None:
        report = handle.report
        if report is not None:
            # `report.seconds` may include a wait for an earlier save. The sum of the phases counts some time twice if
            # copying and writing overlap. So each number may be too large, and the smaller number counts.
            parts = (report.plan_s, report.copy_s, report.write_s, report.export_s, report.commit_s)
            self._took.append(min(report.seconds, sum(parts)))

    def _log_failure(self, handle: SaveHandle) -> None:
        """Logs the error of a save now, because the trainer may make no further call that could raise the error."""
        consequence = "; training continues without this checkpoint" if self._warns else ""
        logger.error("the save of step %d has failed%s: %s", handle.step, consequence, handle.exception)

    def _delete(self, following: Following | None) -> None:
        if following is None:
            return
        try:
            if following.deletes:
                self._deleting.add(following)
            self._deletions.add(partial(self._after_commit, following))
        except BaseException:  # raised by a signal handler: the next save deletes the old steps
            self._deleting.discard(following)
            raise

    def _after_commit(self, following: Following) -> None:
        try:
            following.delete()
        finally:
            self._deleting.discard(following)


def is_deleting_here() -> bool:
    """True if this process is deleting old steps, of any role."""
    return any(saves.is_deleting for saves in list(_all_saves))


# Weak references are enough, because a running thread keeps its worker and its save alive even if the trainer has
# dropped the manager.
_all_saves: WeakSet[BackgroundSaves] = emptied_in_child(WeakSet())


@atexit.register
def _finish_all() -> None:
    saves = list(_all_saves)
    for each in saves:
        each.shorten()
    for each in saves:
        each.wait_for_save()
    # Wait for copies to the root and for deletions last, because each save may begin a copy and deletions.
    shorten_drains()
    for worker in all_workers():
        try:
            worker.wait(deadlines.EXIT_WAIT_S)
        except HungDiskError as error:
            logger.error("the interpreter exits before all work is done: %s", error)
