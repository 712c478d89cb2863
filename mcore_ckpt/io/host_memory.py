"""Provides the host memory for host images. A thread prepares the memory before a save needs it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from weakref import WeakSet

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io import _native, tuning

logger = logging.getLogger(__name__)


class HostMemory:
    """One host buffer, pinned if there is a GPU. It grows when needed and is reused from save to save.

    The system needs seconds to provide the pages of a buffer (0.5 to 2 GB/s are typical). `prepare` fetches the pages
    while training continues, so that `take` need not fetch them.

    Args:
        limit: the largest size of the buffer in bytes; None for no limit.

    Example:
        >>> memory = HostMemory()
        >>> memory.prepare(1 << 20)
        >>> memory.take(1 << 20).address % 4096
        0
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._buffer: _native.HostBuffer | None = None
        self._preparation: _Preparation | None = None

    def prepare(self, nbytes: int) -> None:
        """Starts a thread that fetches `nbytes` bytes of memory, unless there is a buffer already. Never raises.

        Without a GPU, the buffer has a spare address range. If `nbytes` turns out somewhat too small, `take` fetches
        only the missing part. With a GPU, the buffer has no spare range, because it is pinned as a whole. If it is too
        small, `take` replaces it.
        """
        if self._buffer is not None or nbytes < 1:
            return
        spare = max(nbytes // tuning.PREPARE_SPARE_PART, tuning.PREPARE_SPARE_BYTES)
        most = nbytes if torch.cuda.is_available() else nbytes + spare
        if self._limit is not None:
            most, nbytes = min(most, self._limit), min(nbytes, self._limit)
        try:
            self._buffer = _native.HostBuffer.reserve(most, to_pin=torch.cuda.is_available())
            self._preparation = _Preparation(self._buffer, nbytes)
        except (MemoryError, RuntimeError) as error:  # no address space, or no thread
            self._buffer = None
            logger.debug("host memory cannot be prepared, so the first save allocates it: %s", error)

    @property
    def bytes_at_once(self) -> int | None:
        """The number of bytes that `take` returns without waiting; None if nothing is being prepared."""
        preparation = self._preparation
        return None if preparation is None or preparation.has_ended else preparation.fetched

    def take(self, nbytes: int, pinned: bool = True) -> _native.HostBuffer:
        """Returns a buffer of at least `nbytes` bytes with arbitrary content. The next `take` reuses the buffer.

        If fewer bytes are prepared, ends the preparation, and fetches the missing ones on several threads.

        Args:
            nbytes: how many bytes the caller needs.
            pinned: whether GPUs will copy into the memory. Without a GPU, this has no effect.

        Raises:
            UnsupportedError: `nbytes` is above the limit.
            MemoryError: the system does not have the memory.
            RuntimeError: CUDA cannot pin the memory.
        """
        self.check_limit(nbytes)
        if self._preparation is not None and self._buffer is not None and nbytes <= self._buffer.nbytes:
            self._take_prepared(self._preparation, self._buffer, nbytes, pinned)
        elif self._buffer is None or self._buffer.nbytes < nbytes:
            self.release()  # first, because the old and the new buffer together might not fit
            self._buffer = _native.HostBuffer(nbytes, pinned=torch.cuda.is_available(), threads=tuning.HOST_THREADS)
        assert self._buffer is not None
        return self._buffer

    def check_limit(self, nbytes: int) -> None:
        """Raises UnsupportedError if `nbytes` bytes are above the limit."""
        if self._limit is not None and nbytes > self._limit:
            raise UnsupportedError(
                f"this rank's part of the checkpoint needs {nbytes} bytes of host memory, but max_host_bytes is "
                f"{self._limit}: raise max_host_bytes. A state in CPU memory can also be saved with async_save=False, "
                "without this memory"
            )

    def release(self) -> None:
        """Ends the preparation and frees the memory."""
        if self._preparation is not None:
            self._preparation.stop()
            self._preparation = None
        self._buffer = None

    def _take_prepared(self, preparation: _Preparation, buffer: _native.HostBuffer, nbytes: int, pinned: bool) -> None:
        is_pinned = buffer.pinned or not (pinned and torch.cuda.is_available())
        if nbytes <= preparation.fetched and is_pinned:
            return
        preparation.stop()
        wanted = nbytes if is_pinned else buffer.nbytes
        if wanted > preparation.fetched:
            buffer.fetch(preparation.fetched, wanted - preparation.fetched, threads=tuning.HOST_THREADS)
            preparation.fetched = wanted
        if not is_pinned:
            buffer.pin()


class _Preparation:
    """A thread that fetches the pages of a buffer and hardly slows the training down.

    The thread fetches small pieces, and after each piece pauses for as long as the piece took. It has a low priority.
    If all cores are busy with other work, it gets a tenth of a core (Linux gives niceness 10 the weight 110 of 1024).
    Then the pieces take longer, and so do the pauses. So the thread costs the training at most 5 % of one core.
    """

    def __init__(self, buffer: _native.HostBuffer, wanted: int) -> None:
        self.wanted = wanted
        self.fetched = 0
        self._buffer = buffer
        self._is_stopped = threading.Event()
        # CUDA pins memory for the thread's current GPU, which is GPU 0 in a new thread.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        # The thread is a daemon, so an exiting interpreter does not wait for all pages. `_stop_all` ends the thread.
        self._thread = threading.Thread(target=self._run, name="mcore_ckpt host memory", daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread and waits for it. That takes at most as long as fetching one piece, or as pinning."""
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            _lower_priority()
            while self.fetched < self.wanted and not self._is_stopped.is_set():
                piece = min(tuning.PREPARE_BYTES, self.wanted - self.fetched)
                started = time.perf_counter()
                self._buffer.fetch(self.fetched, piece)
                self.fetched += piece
                self._is_stopped.wait(time.perf_counter() - started)
            if self._device is not None and not self._is_stopped.is_set():
                with torch.cuda.device(self._device):
                    self._buffer.pin()
        except (MemoryError, RuntimeError) as error:
            # Training continues. The save that needs the memory tries again, and raises the error if it occurs again.
            logger.debug("host memory could not be prepared after %d bytes: %s", self.fetched, error)


def _lower_priority() -> None:
    try:
        # On Linux each thread has a niceness of its own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), tuning.PREPARE_NICENESS)
    except OSError as error:  # a container may forbid the call
        logger.debug("the thread that prepares host memory keeps its priority: %s", error)


# Preparations that may still run when the interpreter exits.
_running: WeakSet[_Preparation] = WeakSet()


@atexit.register
def _stop_all() -> None:
    # A daemon thread that returns from native code after the interpreter has ended would abort the process.
    for preparation in list(_running):
        preparation.stop()
