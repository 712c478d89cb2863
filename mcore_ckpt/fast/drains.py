"""Copies steps from the nodes to the root, one at a time, while the training continues."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from mcore_ckpt.errors import CheckpointError, CommitError, HungDiskError
from mcore_ckpt.events import ErrorText
from mcore_ckpt.io.worker import Handle, Worker
from mcore_ckpt.processes import emptied_in_child
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.steps.space_watch import Saving
from mcore_ckpt.steps.transaction import Attempt
from mcore_ckpt.steps.upload_queue import UploadHandle

logger = logging.getLogger(__name__)

# How many of the latest copies to the root are remembered, to predict how long the next copy takes.
_REMEMBERED = 5


class DrainHandle(Handle[Path]):
    """The copy of one step to the root. `wait` returns the folder in the root, or raises the error of the copy.

    Attributes:
        step: the step.
        path: where the checkpoint is, or will be, in the root.
        upload: the upload to the remote store. None until the step is in the root. Always None without a store, and on
            all ranks except rank 0.
    """

    def __init__(self, step: int, path: Path) -> None:
        super().__init__(f"step {step} is still being copied to {path}")
        self.step, self.path = step, path
        self.upload: UploadHandle | None = None

    @property
    def committed(self) -> bool:
        """True if the step is in the root."""
        return self.done and self._exception is None


class Draining(Protocol):
    """The copy of one step to the root, on this rank (`save/drain.py`)."""

    @property
    def agreement(self) -> Agreement: ...

    @property
    def attempt(self) -> Attempt: ...

    @property
    def saving(self) -> Saving: ...

    def run(self) -> tuple[UploadHandle | None, Callable[[], None] | None]:
        """Copies this rank's files, and commits the step in the root. Every rank calls this method.

        Returns the upload, and a function that deletes old steps; each of the two is None if there is nothing to do.
        Raises CheckpointError if the step could not be copied to the root.
        """


class Drains:
    """Runs the drains of one manager on a separate thread, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt: str | None = None
        self._worker = Worker("mcore_ckpt drain")
        self._handle: DrainHandle | None = None
        self._agreement: Agreement | None = None
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        _all_drains.add(self)

    @property
    def busy(self) -> bool:
        """True while a step is being copied to the root."""
        return self._attempt is not None

    @property
    def has_failed(self) -> bool:
        """True if the latest copy to the root has failed."""
        handle = self._handle
        return handle is not None and handle.exception is not None

    @property
    def longest_s(self) -> float | None:
        """The longest time that one of the latest copies to the root took, in seconds; None before the first copy."""
        return max(self._took, default=None)

    def needed(self) -> set[str]:
        """Returns the ids of saves that must not be deleted from this node's folder."""
        with self._lock:
            return set() if self._attempt is None else {self._attempt}

    def start(self, drain: Draining) -> DrainHandle:
        """Begins to copy a step to the root, once an earlier drain has ended. Every rank calls this."""
        # Rank 0 begins a drain only after its own part of the earlier drain has ended. But this rank may still be busy
        # with its part of the earlier drain, so wait for the end of that part.
        self.wait_for_copy()
        handle = self._handle = DrainHandle(drain.saving.step, drain.saving.role_dir)
        self._agreement = drain.agreement
        try:
            with self._lock:
                self._attempt = drain.attempt.number
            self._worker.add(partial(self._run, drain, handle))
        except BaseException:  # from a signal handler: nothing will be copied
            self._end(handle, CommitError("the save was interrupted"))
            raise
        return handle

    def wait(self) -> None:
        """Waits until no step is being copied to the root, and no old step is being deleted in the root.

        The deadlines of the ranks and of calls to the file system limit this wait.
        """
        self._worker.wait(math.inf)

    def wait_for_copy(self, step: int | None = None, timeout: float | None = None) -> bool:
        """Waits until no step is being copied to the root; if `step` is given, waits only for the copy of `step`.

        Does not wait for the deletion of old steps. The deadlines of the ranks and of calls to the file system limit
        this wait. Returns False if the copy is still under way after `timeout` seconds.
        """
        handle = self._handle
        if handle is not None and step in (None, handle.step):
            with suppress(CheckpointError):  # the failure is logged already
                try:
                    handle.wait(timeout)
                except TimeoutError:
                    return False
        return True

    def shorten(self) -> None:
        """Shortens the waits for other ranks, which may be dead when this interpreter exits."""
        if self._agreement is not None:
            self._agreement.limit_waits(deadlines.EXIT_WAIT_S)

    def _run(self, drain: Draining, handle: DrainHandle) -> None:
        error: CheckpointError | None = CommitError("the copy was interrupted")
        delete, began = None, time.monotonic()
        try:
            handle.upload, delete = drain.run()
            error = None
            self._took.append(time.monotonic() - began)
        except CheckpointError as failure:
            error = failure
        except Exception as failure:
            trace = ErrorText.of(failure).stacktrace
            logger.error("copying step %d to the root has failed unexpectedly\n%s", handle.step, trace)
            error = CommitError(f"{type(failure).__name__}: {failure}")
        finally:
            self._end(handle, error)
        if delete is not None:
            try:
                drain.agreement.runner.run(delete)
            except HungDiskError as error:
                logger.warning("old steps stay until the next save to the root: %s", error)

    def _end(self, handle: DrainHandle, error: CheckpointError | None) -> None:
        if error is not None:
            logger.error("step %d is not in the root, and stays in the fast tier: %s", handle.step, error)
        with self._lock:
            self._attempt = None
        if error is None:
            handle.end(handle.path)
        else:
            handle.fail(error)


_all_drains: WeakSet[Drains] = emptied_in_child(WeakSet())


def shorten_drains() -> None:
    """Shortens the waits of all drains of this process. Called before an exiting interpreter waits for drains."""
    for drains in list(_all_drains):
        drains.shorten()
