"""Formats sizes, speeds and times for people."""

from __future__ import annotations

_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def size_text(size: float) -> str:
    """Formats a size, in powers of 1000 as disks do.

    >>> size_text(999), size_text(68_400_000)
    ('999 B', '68.4 MB')
    """
    if round(size) < 1000:
        return f"{size:.0f} B"
    units = ("kB", "MB", "GB", "TB")
    # A number that would be rounded to 1000 gets the next unit.
    exponent = next((each for each in range(1, len(units)) if round(size / 1000**each, 1) < 1000), len(units))
    return f"{size / 1000**exponent:.1f} {units[exponent - 1]}"


def rate_text(size: float, seconds: float) -> str:
    """Formats a speed.

    >>> rate_text(68_400_000, 2)
    '34.2 MB/s'
    """
    return f"{size_text(size / seconds)}/s"


def moved_text(size: float, seconds: float) -> str:
    """Formats how much was read or written, in what time, and at what speed.

    >>> moved_text(68_400_000, 2)
    '68.4 MB in 2.0 s (34.2 MB/s)'
    """
    return f"{size_text(size)} in {seconds:.1f} s ({rate_text(size, seconds)})"


def duration_text(seconds: float) -> str:
    """Formats a duration in whole units, and in no more than two units.

    >>> duration_text(7.4), duration_text(200), duration_text(90_000)
    ('7 s', '3 min 20 s', '25 h')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    if minutes:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{rest} s"


def age_text(seconds: float | None) -> str:
    """Formats how long ago something was; returns an empty text for None.

    >>> age_text(3), age_text(200), age_text(90_000)
    ('3 s ago', '3 min ago', '1 d ago')
    """
    if seconds is None:
        return ""
    for unit, name in _AGES:
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
