"""A step that somebody reads is not deleted: advisory locks on its manifests.

A reader shares the lock, who deletes needs it alone, and nobody waits for it. It is `flock`, on a file that is there
already: NFS takes it over the network, folders could not be locked there. Where there are no locks both go on, and
what a reader can meet is a file that is missing or stale, which is an error and never other bytes: each block is
checked, and a step is moved away whole before the first of its files goes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io.files import inside, open_regular


@contextmanager
def reading(role_dirs: Iterable[Path]) -> Iterator[None]:
    """Keeps retention of any process away from these checkpoints, as far as the file system has locks."""
    with ExitStack() as stack:
        for role_dir in role_dirs:
            try:
                descriptor = open_regular(inside(role_dir, file_names.MANIFEST_FILE))
            except (OSError, CheckpointCorruptError):
                continue  # who reads it will say so
            stack.callback(os.close, descriptor)
            # Not by closing alone: a child forked meanwhile (a data loader) has the descriptor too.
            stack.callback(_unlock, descriptor)
            _lock(descriptor, fcntl.LOCK_SH)
        yield


@contextmanager
def unread(role_dirs: Iterable[Path]) -> Iterator[bool]:
    """Whether nobody is known to read these checkpoints; until the end nobody can begin to with a lock.

    Raises OSError: FileNotFoundError if one of them is no longer there; CheckpointCorruptError for a link out of it.
    """
    with ExitStack() as stack:
        alone = True
        for role_dir in role_dirs:
            descriptor = _open_for_lock(inside(role_dir, file_names.MANIFEST_FILE))
            stack.callback(os.close, descriptor)
            stack.callback(_unlock, descriptor)
            alone = alone and _lock(descriptor, fcntl.LOCK_EX)
        yield alone


def _open_for_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS locks alone only what is open for writing
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _lock(descriptor: int, kind: int) -> bool:
    """False if somebody else has it. True where the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _unlock(descriptor: int) -> None:
    with suppress(OSError):  # where there are no locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
