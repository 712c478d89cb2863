"""Saves that end beside the training: the thread, the handle, and how a failure finds its way to the trainer."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from functools import partial

from mcore_ckpt.errors import CheckpointError, CommitError, from_record, to_record
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.save.save import Save, SaveReport
from mcore_ckpt.steps.upload_queue import UploadHandle

logger = logging.getLogger(__name__)


class SaveHandle:
    """One save, under way or ended.

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
        self.told = False
        """Whether the trainer has been told of a failure."""

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended.is_set()

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is in place. False while the save is under way, and for ever if it fails."""
        return self._report is not None

    @property
    def exception(self) -> CheckpointError | None:
        """Why it failed; None if it has not, or not yet."""
        return self._exception

    @property
    def report(self) -> SaveReport | None:
        """What the save did on this rank; None until it is committed."""
        return self._report

    @property
    def upload(self) -> UploadHandle | None:
        """How the copy in the remote store comes on, once the checkpoint is committed; None but on rank 0, and without
        `remote`.
        """
        return self._upload

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of tensors that this rank has written, and has to write."""
        save = self._save
        return self._progress if save is None else save.progress()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Returns the report once the checkpoint is committed.

        Raises:
            TimeoutError: it is not within `timeout` seconds; the save goes on.
            CheckpointError: it failed; the previous checkpoint stays.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save of step {self.step} is still under way after {timeout:g} s")
        if self._exception is not None:
            self.told = True
            raise self._exception
        assert self._report is not None
        return self._report

    def run(self, stall_s: float | None) -> Callable[[], None] | None:
        """Ends the save, on the calling thread. Raises nothing: `wait` does.

        Returns what is left to be done if it is committed: deleting old steps, which may take long.
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
    """The one save of a manager that may be under way beside the training.

    Args:
        commits: the agreement that saves end with.
        warns: a failure is logged and not raised.
    """

    def __init__(self, commits: Agreement, warns: bool) -> None:
        self._commits = commits
        self._warns = warns
        self._handle: SaveHandle | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a save has not ended yet. One that is committed has, though old ones may still be deleted."""
        return self._handle is not None and not self._handle.done

    def launch(self, handle: SaveHandle, stall_s: float) -> None:
        """Ends a save on a thread of its own. None may be under way."""
        self._handle = handle
        self._start(partial(self._run, handle, stall_s))

    def run(self, handle: SaveHandle) -> None:
        """Ends a save on the calling thread. What is left to be done after the commit does not hold it up: it is done
        on a thread, which the next call of `settle` waits for."""
        rest = handle.run(None)
        if rest is not None:
            self._start(rest)

    def _run(self, handle: SaveHandle, stall_s: float) -> None:
        try:
            rest = handle.run(stall_s)
        finally:
            if handle.exception is not None:
                # Now: there may be no next call to raise it.
                what = "; going on without a checkpoint" if self._warns else ""
                logger.error("the save of step %d has failed%s: %s", handle.step, what, handle.exception)
        if rest is not None:
            rest()

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                _under_way.discard(self)

        # A daemon, or the interpreter would wait for it without an end in sight: _finish_all does, with one.
        self._thread = threading.Thread(target=run, name="mcore_ckpt save", daemon=True)
        _under_way.add(self)
        try:
            self._thread.start()
        except RuntimeError:  # a system that grants no thread makes a save slower, and must not make it fail
            self._thread = None
            run()

    def wait_until_idle(self) -> None:
        """Waits until no save is under way, which every save sees to by its deadlines."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def failure(self) -> Record | None:
        """How the last save failed, if the trainer was not told yet."""
        handle = self._handle
        if self._warns or handle is None or handle.exception is None or handle.told:
            return None
        record = to_record(handle.exception, self._commits.rank)
        return record | {"message": f"an earlier save, of step {handle.step}, has failed: {record['message']}"}

    def was_told(self) -> None:
        if self._handle is not None:
            self._handle.told = True

    def raise_failure(self) -> None:
        """Raises how the last save failed, if the trainer was not told yet."""
        record = self.failure()
        if record is not None:
            self.was_told()
            raise from_record(record, CommitError)

    def shorten(self) -> None:
        """From now on dead ranks are not waited for as long as a training would."""
        self._commits.limit_waits(deadlines.EXIT_WAIT_S)


# Keeps them alive: a trainer may have dropped its manager with a save under way.
_under_way: set[BackgroundSaves] = set()


@atexit.register
def _finish_all() -> None:
    saves = list(_under_way)
    for each in saves:
        each.shorten()
    for each in saves:
        each.wait_until_idle()
