"""Real file systems of a given size, which tests mount, fill and measure."""

import ctypes
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

NOBODY = 65534

_PR_SET_DUMPABLE = 4  # linux/prctl.h
_QUOTACTL_FD = 443
_FREEZE, _THAW = 0xC0045877, 0xC0045878  # linux/fs.h: FIFREEZE, FITHAW
_SET_QUOTA = 0x800008
_LIMITS_OF_BYTES, _LIMITS_OF_FILES = 1, 4  # linux/quota.h: QIF_BLIMITS, QIF_ILIMITS
_KINDS = {"user": 0, "group": 1}


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"no {command[0]} here")
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[Path]:
    """A file system in a new folder, mounted with these options of mount(8). Skips the test where that is forbidden."""
    place.mkdir()
    _run("mount", *options, str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def tmpfs(place: Path, size: str = "8m", files: int = 0) -> AbstractContextManager[Path]:
    """A file system in memory. `files` limits the number of its files and folders; 0 is no limit."""
    return mounted(place, "-t", "tmpfs", "-o", f"size={size},nr_inodes={files}", "tmpfs")


@contextmanager
def ext4(place: Path, *features: str, mebibytes: int = 24, options: str = "loop") -> Iterator[Path]:
    """An ext4 file system in a file. `features` are options of mkfs.ext4(8)."""
    image = place.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(mebibytes << 20)
    _run("mkfs.ext4", "-q", "-F", "-b", "4096", *features, str(image))
    with mounted(place, "-o", options, str(image)):
        place.chmod(0o777)
        yield place


@contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """Lets all calls that change the file system wait until the end of the `with` block."""
    descriptor = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _FREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(descriptor, _THAW, 0)
    finally:
        os.close(descriptor)


def set_quota(folder: Path, kind: str, number: int, nbytes: int = 0, files: int = 0, soft: int = 0) -> None:
    """Limits what a user or group may have in a file system: hard limits of bytes and files, a soft one of bytes."""
    data = struct.pack(
        "=8QI4x", nbytes // 1024, soft // 1024, 0, files, 0, 0, 0, 0, _LIMITS_OF_BYTES | _LIMITS_OF_FILES
    )
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        command = ctypes.c_uint(_SET_QUOTA << 8 | _KINDS[kind])
        if libc.syscall(ctypes.c_long(_QUOTACTL_FD), descriptor, command, number, data) != 0:
            pytest.skip(f"no quota can be set here: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


@contextmanager
def as_nobody() -> Iterator[None]:
    """This process is meanwhile a user without any rights of root."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    # Else it may not look into /proc/self any more.
    assert ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1) == 0
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def fill(folder: Path, nbytes: int) -> Path:
    """Takes so many bytes of the disk, and returns the file that has them."""
    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        if nbytes > 0:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        os.fsync(file.fileno())
    return ballast


def bytes_below(folder: Path) -> int:
    """How much the files and folders below a folder take."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def free_bytes(disk: Path) -> int:
    """How many bytes are free for a user without reserved blocks."""
    space = os.statvfs(disk)
    return space.f_bavail * space.f_frsize
