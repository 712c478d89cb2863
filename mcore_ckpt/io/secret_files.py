"""Reads and writes small files that only this user may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.io.files import open_regular

# The size of the longest secret. A longer file was named by mistake.
_MOST_BYTES = 4096


def read_private(path: Path) -> bytes:
    """Returns the content of a file.

    Raises InvalidArgumentError for the same reasons as `check_private`, or if the file is too long for a secret.
    """
    with _opened(path) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise InvalidArgumentError(f"{path}: has more than {_MOST_BYTES} bytes, so it is no secret")
    return data


def check_private(path: Path) -> None:
    """Checks that a file exists and that only this user can read and write it.

    Raises InvalidArgumentError if the file is missing or cannot be read, if its mode lets other users use it, or if it
    belongs to another user. A file of root is accepted.
    """
    _opened(path).close()


def write_private(path: Path, data: bytes) -> None:
    """Makes a file that only this user may read. Raises OSError, also if the file exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)


def _opened(path: Path) -> BinaryIO:
    try:
        file = open(open_regular(path), "rb")  # noqa: SIM115
    except OSError as error:
        raise InvalidArgumentError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        _check(path, os.fstat(file.fileno()))
    except InvalidArgumentError:
        file.close()
        raise
    return file


def _check(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise InvalidArgumentError(f"{path}: belongs to user {found.st_uid}: use a file of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise InvalidArgumentError(
            f"{path}: other users may read or change it (mode {stat.S_IMODE(found.st_mode):04o}): chmod 600 it"
        )
