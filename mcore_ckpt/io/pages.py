"""Rounds file offsets to pages, which O_DIRECT asks for, and cuts files at pages."""

from __future__ import annotations

PAGE_BYTES = 4096


def page_floor(offset: int) -> int:
    """The largest multiple of a page that is not above `offset` (bytes)."""
    return offset // PAGE_BYTES * PAGE_BYTES


def page_ceil(offset: int) -> int:
    """The smallest multiple of a page that is not below `offset` (bytes)."""
    return page_floor(offset + PAGE_BYTES - 1)


def even_cuts(end: int, count: int) -> tuple[int, ...]:
    """Cuts `[0, end)` bytes into `count` ranges of about equal length; all cuts but the last are at pages.

    Example:
        >>> even_cuts(40961, 2)
        (0, 20480, 40961)
    """
    return (*(page_floor(end * number // count) for number in range(count)), end)
