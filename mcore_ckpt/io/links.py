"""Finds links that lead nowhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def broken_link(path: Path) -> str | None:
    """Says which link on the way to a path is broken, as the rest of a sentence that begins with the path.

    Returns None if no link is broken.
    """
    for place in (*reversed(path.absolute().parents), path.absolute()):
        try:
            place.stat()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP) or not place.is_symlink():
                return None
            target, is_loop = os.readlink(place), error.errno == errno.ELOOP
            if place != path.absolute():
                why = "leads back to it" if is_loop else "does not exist (is it not mounted?)"
                return f"is below {place}, a link to {target}, which {why}"
            if is_loop:
                return f"is a link to {target}, which leads back to it"
            return f"is a link to {target}, which does not exist (is it not mounted?)"
    return None
