"""Finds links that lead nowhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def broken_link(path: Path) -> str | None:
    """Says which link on the way to a path leads nowhere, as the words after the path's name; None if none does.

    Example:
        >>> broken_link(Path("/")) is None
        True
    """
    for place in (*reversed(path.absolute().parents), path.absolute()):
        try:
            place.stat()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP) or not place.is_symlink():
                return None
            target = os.readlink(place)
            why = (
                "which does not exist (is it not mounted?)" if error.errno == errno.ENOENT else "which leads back to it"
            )
            return f"is {'' if place == path.absolute() else f'below {place}, '}a link to {target}, {why}"
    return None
