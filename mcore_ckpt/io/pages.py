"""Rounds file offsets to multiples of the page size, which O_DIRECT requires, and cuts files at such offsets."""

from __future__ import annotations

PAGE_BYTES = 4096


def page_floor(offset: int) -> int:
    """Rounds `offset` (bytes) down to a multiple of the page size."""
    return offset // PAGE_BYTES * PAGE_BYTES


def page_ceil(offset: int) -> int:
    """Rounds `offset` (bytes) up to a multiple of the page size."""
    return page_floor(offset + PAGE_BYTES - 1)


def even_cuts(end: int, count: int) -> tuple[int, ...]:
    """Returns the cuts that divide the bytes `[0, end)` into `count` ranges of about equal length.

    All cuts except the last are multiples of the page size.

    Example:
        >>> even_cuts(40961, 2)
        (0, 20480, 40961)
    """
    return (*(page_floor(end * number // count) for number in range(count)), end)
