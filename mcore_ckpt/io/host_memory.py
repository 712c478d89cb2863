"""The host memory that file images are copied to."""

from __future__ import annotations

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io import _native
from mcore_ckpt.io.tuning import HOST_THREADS


class HostMemory:
    """One host buffer, pinned if there is a GPU, grown when needed and reused from save to save.

    Args:
        limit: bytes it may hold; None for as many as it takes.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._buffer: _native.HostBuffer | None = None

    def take(self, nbytes: int) -> int:
        """The address (on a page) of `nbytes` bytes. Their content is whatever was there; the next `take` reuses them.

        Raises:
            UnsupportedError: that is above the limit.
            MemoryError: the system does not have them.
        """
        if self._limit is not None and nbytes > self._limit:
            raise UnsupportedError(
                f"this rank's part of the checkpoint takes {nbytes} bytes of host memory, and max_host_bytes is "
                f"{self._limit}: raise it; a state in CPU memory can also be saved with async_save=False, which "
                "needs none"
            )
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer = None  # the old one goes before the new one comes: both at once might not fit
            self._buffer = _native.HostBuffer(nbytes, pinned=torch.cuda.is_available(), threads=HOST_THREADS)
        return self._buffer.address

    def release(self) -> None:
        self._buffer = None
