"""The host memory file images are made in."""

from __future__ import annotations

import torch

PAGE_BYTES = 4096


class Arena:
    """One page-aligned host buffer, pinned if there is a GPU, grown when needed and reused from save to save."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer of `nbytes` that starts on a page.

        Its content is whatever was there; the next `take` reuses it.
        """
        if self._buffer is None or self._buffer.numel() < nbytes + PAGE_BYTES:
            self._buffer = None  # the old one goes before the new one comes: both at once might not fit
            self._buffer = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        start = -self._buffer.data_ptr() % PAGE_BYTES
        return self._buffer[start : start + nbytes]

    def release(self) -> None:
        self._buffer = None
