"""Tries, in an empty folder, each ability of a file system that saving, loading and deleting checkpoints relies on.

Each probe makes the same system calls as this package, if possible by the same function, and returns one finding.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mcore_ckpt.io.file_systems import of_name
from mcore_ckpt.io.files import claim_file, replace_file, sync_dir, sync_file, write_file
from mcore_ckpt.io.mounts import Mount
from mcore_ckpt.io.pages import PAGE_BYTES
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.trainer_lock import TORN_LEASE_S, TRAINER_BEAT_S, TRAINER_LEASE_S
from mcore_ckpt.tools.examine.doctor.findings import Finding, Severity, emulated, fine
from mcore_ckpt.tools.examine.doctor.known import abilities_of

Probe = Callable[[Path, Mount | None], Finding]

DIRECT = "O_DIRECT"
WRITES = "writes in any order"
RESERVE = "reserved space"
SYNC = "sync"
RENAME = "rename"
EXCHANGE = "exchange of folders"
LINKS = "hard links"
EXCLUSIVE = "exclusive creation"
FLOCK = "flock"
TIMES = "times of files"
NAMES = "names"
MAPPING = "mmap"
DELETED = "open files that are deleted"

# If the clocks of two hosts, or of a host and a file server, differ by more seconds than this, a finding reports the
# difference.
CLOCK_S = 2.0
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def try_all(folder: Path, mount: Mount | None) -> list[Finding]:
    """Runs all probes, each in a new folder below `folder`, which exists. An error in a probe becomes a finding."""
    findings = []
    for number, (topic, probe) in enumerate(_PROBES):
        own = folder / str(number)
        try:
            own.mkdir()
            findings.append(probe(own, mount))
        except OSError as error:
            findings.append(_bad(topic, f"failed: {error.strerror or error}"))
    return findings


def has_direct(findings: Iterable[Finding]) -> bool:
    """Returns True if the probes have found that O_DIRECT bypasses the page cache."""
    return any(finding.topic == DIRECT and finding.values for finding in findings)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Opens a file for the `with` block, and makes it if `flags` has O_CREAT. Yields its descriptor. Raises OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o664)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _direct(folder: Path, mount: Mount | None) -> Finding:
    if mount is not None and of_name(mount.kind).place == "memory":
        return fine(DIRECT, "not needed in memory")
    path, able = folder / "file", None if mount is None else abilities_of(mount)
    cost = "bytes go through the page cache, which takes memory and processor time from the training"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o664)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return emulated(DIRECT, f"refused at open: {error.strerror}", cost)
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:  # memory from mmap begins at a page, as O_DIRECT requires
            page[:] = b"\x5a" * PAGE_BYTES
            os.pwrite(descriptor, page, 0)
            os.preadv(descriptor, [page], 0)
            if page[0] != 0x5A:
                return _broken(DIRECT)
            if able is not None and not able.direct:
                return emulated(DIRECT, "accepted, but without effect under these mount options", cost)
            return fine(DIRECT, f"works, in blocks of {PAGE_BYTES} bytes", block_bytes=PAGE_BYTES)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return emulated(DIRECT, f"refused in blocks of {PAGE_BYTES} bytes: {error.strerror}", cost)
    finally:
        os.close(descriptor)


def _writes(folder: Path, mount: Mount | None) -> Finding:
    """Writes a file as saves do: threads and replicas write ranges in any order, and the length is set at the end."""
    path = folder / "file"
    with opened(path, os.O_RDWR | os.O_CREAT) as first:
        with opened(path, os.O_RDWR) as second:
            os.pwrite(first, b"2" * PAGE_BYTES, PAGE_BYTES)
            os.pwrite(second, b"1" * PAGE_BYTES, 0)
            os.ftruncate(first, PAGE_BYTES + 1)
            os.fsync(second)
        found = os.pread(first, 2 * PAGE_BYTES, 0)
    return fine(WRITES, "work") if found == b"1" * PAGE_BYTES + b"2" else _broken(WRITES)


def _reserve(folder: Path, mount: Mount | None) -> Finding:
    if mount is not None and of_name(mount.kind).place == "memory":
        return fine(RESERVE, "not needed in memory")
    with opened(folder / "file", os.O_RDWR | os.O_CREAT) as descriptor:
        number = fallocate(descriptor, 1 << 20)
    if number in _UNSUPPORTED:
        cost = "a save notices a full disk only while it writes, and files may be more fragmented"
        return emulated(RESERVE, "fallocate is not supported, so files grow while they are written", cost)
    if number:
        raise OSError(number, os.strerror(number))
    return fine(RESERVE, "fallocate works")


def fallocate(descriptor: int, nbytes: int) -> int:
    """Reserves space for the first `nbytes` of a file. Returns 0, or the system's error number.

    Does not use `os.posix_fallocate`, which would write zeros if the file system cannot reserve space.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    zero, size = ctypes.c_int64(0), ctypes.c_int64(nbytes)
    return ctypes.get_errno() if libc.fallocate(descriptor, 0, zero, size) else 0


def _sync(folder: Path, mount: Mount | None) -> Finding:
    write_file(folder / "file", [b"x"])
    sync_file(folder / "file")
    sync_dir(folder)
    return fine(SYNC, "files and folders can be synced")


def _rename(folder: Path, mount: Mount | None) -> Finding:
    staging, place = folder / "staging", folder / "place"
    (staging / "model").mkdir(parents=True)
    write_file(staging / "model" / "file", [b"x"])
    os.rename(staging, place)
    if not (place / "model" / "file").exists() or staging.exists():
        return _broken(RENAME)
    replace_file(folder / "tracker", b"1")
    replace_file(folder / "tracker", b"2")
    if (folder / "tracker").read_bytes() != b"2":
        return _broken(RENAME)
    return fine(RENAME, "a folder with files can be renamed, and a file replaced")


def _exchange(folder: Path, mount: Mount | None) -> Finding:
    first, second = folder / "first", folder / "second"
    for place in (first, second):
        place.mkdir()
        (place / place.name).mkdir()
    if commit.exchange(first, second):
        return fine(EXCHANGE, "works") if (first / "second").is_dir() else _broken(EXCHANGE)
    return emulated(
        EXCHANGE,
        "not supported, so a step that is saved again is put in place by two renames",
        "between the two renames the step is missing, and `load` takes an older step; after a crash at this moment, "
        "the next start of the trainer puts the step back. Steps that are saved only once need no exchange",
    )


def _links(folder: Path, mount: Mount | None) -> Finding:
    write_file(folder / "file", [b"x"])
    try:
        os.link(folder / "file", folder / "link")
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        return emulated(
            LINKS,
            f"not supported: {error.strerror}",
            "a trainer that crashes while it takes its lock leaves a damaged lock file, and the next trainer waits "
            f"{TORN_LEASE_S:g} s; in a step that is saved again, files of other programs are moved only after the "
            "exchange",
        )
    os.unlink(folder / "file")
    return fine(LINKS, "work") if (folder / "link").read_bytes() == b"x" else _broken(LINKS)


def _exclusive(folder: Path, mount: Mount | None) -> Finding:
    claim_file(folder / "lock", b"1")
    try:
        claim_file(folder / "lock", b"2")
    except FileExistsError:
        return fine(EXCLUSIVE, "a lock file that exists cannot be made again")
    return _bad(EXCLUSIVE, "a lock file that exists can be made again")


def _flock(folder: Path, mount: Mount | None) -> Finding:
    path = folder / "file"
    write_file(path, [b"x"])
    cost = (
        "retention can delete a step while it is read: the load then finds a file missing, and takes another step. A "
        "load never gets wrong bytes"
    )
    with opened(path, os.O_RDWR) as first, opened(path, os.O_RDWR) as second:
        try:
            fcntl.flock(first, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return fine(FLOCK, "works")
        except OSError as error:
            return emulated(FLOCK, f"not supported: {error.strerror}", cost)
    return emulated(FLOCK, "has no effect: two processes get the same lock", cost)


def _times(folder: Path, mount: Mount | None) -> Finding:
    path = folder / "file"
    before = time.time()
    write_file(path, [b"x"])
    after, first = time.time(), path.stat().st_mtime
    # A trainer touches its lock file every 15 seconds, and other trainers must see that the time has changed.
    os.utime(path, (first - TRAINER_BEAT_S, first - TRAINER_BEAT_S))
    touched = path.stat().st_mtime
    os.utime(path)
    if not touched < path.stat().st_mtime:
        return Finding(
            TIMES,
            Severity.BAD,
            "touching a file does not change its time",
            f"a living trainer would be taken for dead after {TRAINER_LEASE_S:g} s, and two trainers could save at "
            "once",
            "use another file system",
        )
    ahead = max(0.0, first - after) - max(0.0, before - first)
    values = {"server_clock_ahead_s": ahead}
    if abs(ahead) > CLOCK_S:
        side = "ahead of" if ahead > 0 else "behind"
        fact = f"the clock of the file server is {abs(ahead):.0f} s {side} this host's clock"
        cost = "times of files mislead people; this package itself does not compare them with a clock"
        return Finding(TIMES, Severity.RISK, fact, cost, "synchronise the clocks (NTP)", values)
    return fine(TIMES, "change when a file is touched, and agree with this host's clock", **values)


def _names(folder: Path, mount: Mount | None) -> Finding:
    # Hidden folders have the longest names: a role of 128 letters, `replaced-` and an id of 32 digits. So a name of 180
    # letters is tried.
    try:
        (folder / ("n" * 180)).mkdir()
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EINVAL):
            raise
        most = os.statvfs(folder).f_namemax
        cost = "saves of roles with long names fail"
        advice = f"give roles names of at most {max(1, most - 50)} letters"
        return Finding(NAMES, Severity.RISK, f"names can have at most {most} letters", cost, advice)
    (folder / "role").mkdir()
    if (folder / "ROLE").exists():
        return fine(
            NAMES,
            "long names work; upper and lower case are the same, so the names of roles must differ in more than case",
        )
    return fine(NAMES, "long names work, and upper and lower case differ")


def _mapping(folder: Path, mount: Mount | None) -> Finding:
    path = folder / "file"
    write_file(path, [b"x" * PAGE_BYTES])
    cost = "`torch.load(mmap=True)` fails here; saves and loads of this package do not need it"
    with open(path, "rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return fine(MAPPING, "works") if mapped[0] == ord("x") else _broken(MAPPING)
        except OSError as error:
            return emulated(MAPPING, f"not supported: {error.strerror}", cost)


def _deleted(folder: Path, mount: Mount | None) -> Finding:
    path = folder / "file"
    write_file(path, [b"x"])
    with opened(path, os.O_RDONLY) as descriptor:
        try:
            os.unlink(path)
            found = os.pread(descriptor, 1, 0)
        except OSError as error:
            cost = "if locks do not work either, a load whose step is deleted takes another step"
            return emulated(DELETED, f"cannot be read after the deletion: {error.strerror}", cost)
    return fine(DELETED, "stay readable") if found == b"x" else _broken(DELETED)


def _broken(topic: str) -> Finding:
    return _bad(topic, "the bytes that are read differ from the written bytes")


def _bad(topic: str, fact: str) -> Finding:
    return Finding(topic, Severity.BAD, fact, _COSTS[topic], "use another file system")


_PROBES: Sequence[tuple[str, Probe]] = (
    (DIRECT, _direct),
    (WRITES, _writes),
    (RESERVE, _reserve),
    (SYNC, _sync),
    (RENAME, _rename),
    (EXCHANGE, _exchange),
    (LINKS, _links),
    (EXCLUSIVE, _exclusive),
    (FLOCK, _flock),
    (TIMES, _times),
    (NAMES, _names),
    (MAPPING, _mapping),
    (DELETED, _deleted),
)
# The `cost` of a finding that a probe failed, by the probe's topic.
_COSTS = dict.fromkeys((topic for topic, _ in _PROBES), "checkpoints cannot be saved here") | {
    EXCLUSIVE: "two trainers could save one role at once, and delete each other's checkpoints",
    EXCHANGE: "a step cannot be saved again over an existing one",
    MAPPING: "`torch.load(mmap=True)` fails here",
}
