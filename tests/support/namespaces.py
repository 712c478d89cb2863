"""Enters the namespaces of another process, to fork into a simulated host (hosts.py) or to listen on its network."""

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# linux/sched.h. The module `os` has them, and setns, from Python 3.12 on.
_MOUNTS, _NAME, _SHARED_MEMORY, _PROCESSES, _NETWORK = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Namespaces:
    """The namespaces of a host.

    Attributes:
        pid: the first process of the host, which keeps them alive.
        address: of the host in its network.
    """

    pid: int
    address: str

    @contextmanager
    def forking(self) -> Iterator[Callable[[], None]]:
        """Makes what this thread forks in the block a process of the host, whose pid the caller sees as of a child.

        Yields a function that the child has to call. It takes the child into the other namespaces, and leaves the
        working directory at the same path.
        """
        # By a descriptor: in the child, and there in another /proc, the pid would mean another process.
        target, own = os.pidfd_open(self.pid), os.open("/proc/self/ns/pid", os.O_RDONLY)

        def enter() -> None:
            folder = os.getcwd()
            _set(target, _MOUNTS | _NAME | _SHARED_MEMORY | _NETWORK)
            os.chdir(folder)

        try:
            _set(target, _PROCESSES)
            try:
                yield enter
            finally:
                _set(own, _PROCESSES)
        finally:
            os.close(target)
            os.close(own)

    def listen(self) -> socket.socket:
        """A socket of this process that listens on a free port of the host."""
        target, own = os.pidfd_open(self.pid), os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            _set(target, _NETWORK)
            try:
                return socket.create_server((self.address, 0))
            finally:
                _set(own, _NETWORK)
        finally:
            os.close(target)
            os.close(own)


def _set(descriptor: int, kinds: int) -> None:
    if _libc.setns(descriptor, kinds) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
