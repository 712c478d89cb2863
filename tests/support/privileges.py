"""Permissions that count although the tests are root's."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

# capability.h: _LINUX_CAPABILITY_VERSION_3, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH.
_VERSION = 0x20080522
_OVERRIDES = 1 << 1 | 1 << 2


@contextmanager
def without_privileges() -> Iterator[None]:
    """This thread may, until the end, read and write only what the permissions of files and folders say."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    # Effective, permitted and inheritable ones, twice 32 of them.
    sets = (ctypes.c_uint32 * 6)()

    def call(function: str) -> None:
        if getattr(libc, function)(header, sets):
            raise OSError(ctypes.get_errno(), function)

    call("capget")
    effective = sets[0]
    sets[0] = effective & ~_OVERRIDES
    call("capset")
    try:
        yield
    finally:
        sets[0] = effective
        call("capset")


def protect(path: str | os.PathLike[str]) -> None:
    """Nobody may look into a folder, or change it."""
    os.chmod(path, 0)
