"""Provides host memory for images of files, or for a GPU to copy to.

A thread prepares the memory before a save needs it.

Memory is pinned in pieces of at most 256 MiB, with pauses, because the kernel and the driver hold locks while they pin
a piece. CUDA refuses a copy that reaches into two pieces, so copies are cut between pieces. The pages are requested
from the GPU's NUMA node (`mbind` with MPOL_PREFERRED, which a container may forbid). The thread has a niceness of 10,
and pauses after each piece for as long as the piece took.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.processes import emptied_in_child

logger = logging.getLogger(__name__)


class HostMemory:
    """One host buffer. It grows when needed, at most to `limit` bytes, and is reused from save to save.

    The system needs seconds to provide the pages of a buffer (0.5 to 2 GB/s are typical), and longer if they are pinned
    for a GPU. `prepare` fetches and pins the pages while training continues, so that `take` need not wait.

    Example:
        >>> memory = HostMemory()
        >>> memory.prepare(1 << 20)
        >>> memory.take(1 << 20).address % 4096
        0
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._buffer: _native.HostBuffer | None = None
        self._ready = 0  # how many bytes of the buffer are fetched and, for a GPU, pinned
        self._preparation: _Preparation | None = None

    def prepare(self, nbytes: int, device: int | None = None) -> None:
        """Starts a thread that fetches `nbytes` bytes of memory, unless there is a buffer already. Never raises.

        The buffer has a spare address range. If `nbytes` turns out somewhat too small, `take` fetches only the
        missing part. The memory is pinned for the GPU (`device`) whose copies will write to it; None: no GPU.
        """
        if self._buffer is not None or nbytes < 1:
            return
        most = nbytes + max(nbytes // tuning.PREPARE_SPARE_PART, tuning.PREPARE_SPARE_BYTES)
        if self._limit is not None:
            most, nbytes = min(most, self._limit), min(nbytes, self._limit)
        try:
            self._buffer = _reserve(most, device)
            self._preparation = _Preparation(self._buffer, nbytes)
        except (MemoryError, RuntimeError) as error:  # no address space, or no thread
            self._buffer = None
            logger.debug("host memory cannot be prepared, so the first save allocates it: %s", error)

    @property
    def bytes_at_once(self) -> int | None:
        """The number of bytes that `take` returns without waiting; None if nothing is being prepared."""
        preparation = self._preparation
        return None if preparation is None or preparation.has_ended else preparation.ready

    def take(self, nbytes: int, device: int | None = None) -> _native.HostBuffer:
        """Returns a buffer of at least `nbytes` bytes with arbitrary content. The next `take` reuses the buffer.

        If fewer bytes are prepared, ends the preparation, and fetches the missing bytes on several threads. `device` is
        the GPU whose copies will write to the memory; None: no GPU.

        Raises:
            UnsupportedError: `nbytes` is above the limit.
            MemoryError: the system does not have the memory.
            RuntimeError: CUDA cannot pin the memory.
        """
        self.check_limit(nbytes)
        buffer = self._buffer
        if buffer is None or buffer.nbytes < nbytes or device not in (None, buffer.device):
            self.release()  # frees the old buffer first, because both buffers might not fit
            self._buffer = buffer = _reserve(nbytes, device)
        if self._preparation is not None:
            if nbytes <= self._preparation.ready:
                return buffer
            self._preparation.stop()
            self._ready, self._preparation = self._preparation.ready, None
        if nbytes > self._ready:
            buffer.fetch(self._ready, nbytes - self._ready, threads=tuning.HOST_THREADS)
            if buffer.device is not None:
                buffer.pin(nbytes)
            self._ready = nbytes
        return buffer

    def check_limit(self, nbytes: int) -> None:
        """Raises UnsupportedError if `nbytes` bytes are above the limit."""
        if self._limit is not None and nbytes > self._limit:
            raise UnsupportedError(
                f"this rank's part of the checkpoint needs {nbytes} bytes of host memory, but max_host_bytes is "
                f"{self._limit}: raise max_host_bytes, or save with async_save=False, which needs no such memory"
            )

    def release(self) -> None:
        """Ends the preparation and frees the memory."""
        if self._preparation is not None:
            self._preparation.stop()
            self._preparation = None
        self._buffer, self._ready = None, 0


def _reserve(nbytes: int, device: int | None) -> _native.HostBuffer:
    """Maps memory that has no pages yet. For a GPU, the pages will come from the memory that is nearest to the GPU."""
    if device is None:
        return _native.HostBuffer.reserve(nbytes)
    return _native.HostBuffer.reserve(nbytes, device=device, numa_node=_native.numa_node_of(device))


class _Preparation:
    """A thread that fetches the pages of a buffer, pins them for the buffer's GPU, and hardly slows the training down.

    The thread takes small pieces, and after each piece pauses for as long as the piece took. The thread has a low
    priority. If all cores are busy with other work, the thread gets a tenth of a core (Linux gives niceness 10 the
    weight 110, and niceness 0 the weight 1024). Then both the pieces and the pauses take longer. So the thread costs
    the training at most 5 % of one core.
    """

    def __init__(self, buffer: _native.HostBuffer, wanted: int) -> None:
        self.ready = 0
        self._wanted = wanted
        self._buffer = buffer
        self._is_stopped = threading.Event()
        # The thread is a daemon, so an exiting interpreter does not wait for all pages. `_stop_all` ends the thread.
        self._thread = threading.Thread(target=self._run, name="mcore_ckpt host memory", daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread and waits for it. The wait takes at most as long as one piece."""
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            _lower_priority()
            fetched = 0
            while self.ready < self._wanted and not self._is_stopped.is_set():
                piece = min(tuning.PREPARE_BYTES, self._wanted - fetched)
                with self._pause_afterwards():
                    self._buffer.fetch(fetched, piece)
                fetched += piece
                if self._buffer.device is None:
                    self.ready = fetched
                elif fetched == self._wanted or fetched - self.ready >= self._buffer.PIN_BYTES:
                    with self._pause_afterwards():
                        self._buffer.pin(fetched)
                    self.ready = fetched
        except (MemoryError, RuntimeError) as error:
            # Training continues. The save that needs the memory tries again, and raises the error if it fails again.
            logger.debug("host memory could not be prepared after %d bytes: %s", self.ready, error)

    @contextmanager
    def _pause_afterwards(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._is_stopped.wait(time.perf_counter() - started)


def _lower_priority() -> None:
    try:
        # On Linux each thread has its own niceness.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), tuning.PREPARE_NICENESS)
    except OSError as error:  # a container may forbid the call
        logger.debug("the thread that prepares host memory keeps its priority: %s", error)


# Preparations that may still run when the interpreter exits.
_running: WeakSet[_Preparation] = emptied_in_child(WeakSet())


@atexit.register
def _stop_all() -> None:
    # A daemon thread that returns from native code after the interpreter has ended would abort the process.
    for preparation in list(_running):
        preparation.stop()
