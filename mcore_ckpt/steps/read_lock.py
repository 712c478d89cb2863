"""Prevents the deletion of steps while they are read, with advisory locks on their manifests.

Readers share the lock. Retention needs the lock exclusively, and skips a step if it cannot get the lock. Nobody waits.
The lock is a `flock` on the manifest, because NFS passes locks on files over the network, but not locks on folders.

On a file system without locks, readers and retention work without locking. A reader may then find a file missing or
stale, and raises an error. A reader never returns wrong bytes, because it checks each block and because retention
renames a step as a whole before it deletes the first file.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io.files import inside, open_regular
from mcore_ckpt.processes import Home

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@contextmanager
def reading(role_dirs: Iterable[Path]) -> Iterator[None]:
    """Prevents the deletion of these roles by any process during the `with` block, if the file system has locks.

    A role whose manifest cannot be opened is skipped. Reading the role will raise the error.

    Example:
        >>> with reading([Path("checkpoints/global_steps_5/actor")]):
        ...     pass
    """
    home = Home()
    with ExitStack() as stack:
        for role_dir in role_dirs:
            try:
                descriptor = open_regular(inside(role_dir, file_names.MANIFEST_FILE))
            except (OSError, CheckpointCorruptError):
                continue
            stack.callback(os.close, descriptor)
            # Unlock the file before it is closed. If a child that was forked meanwhile (such as a data loader) has the
            # descriptor, too, closing the file would not release the lock.
            stack.callback(_unlock, descriptor, home)
            _lock(descriptor, fcntl.LOCK_SH)
        yield


@contextmanager
def unread(role_dirs: Iterable[Path]) -> Iterator[bool]:
    """Tries to lock these roles exclusively during the `with` block. Yields False if a reader holds one of the locks.

    Raises FileNotFoundError if a role is gone, CheckpointCorruptError if a manifest is a link that leads out of its
    folder, and OSError if a manifest cannot be opened.
    """
    home = Home()
    with ExitStack() as stack:
        alone = True
        for role_dir in role_dirs:
            descriptor = _open_for_lock(inside(role_dir, file_names.MANIFEST_FILE))
            stack.callback(os.close, descriptor)
            stack.callback(_unlock, descriptor, home)
            alone = alone and _lock(descriptor, fcntl.LOCK_EX)
        yield alone


def _open_for_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS gives an exclusive lock only on a file open for writing
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _lock(descriptor: int, kind: int) -> bool:
    """Locks a file without waiting.

    Returns False if another process may hold the lock; True on a file system without locks.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        # After any other error a reader may hold the lock: NFS refuses a file that is open only for reading (EBADF),
        # and a server may not answer.
        return error.errno in _NO_LOCKS
    return True


def _unlock(descriptor: int, home: Home) -> None:
    if not home.is_here:  # a forked child would release the lock of its parent
        return
    with suppress(OSError):  # the file system has no locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
