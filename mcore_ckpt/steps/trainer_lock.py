"""One trainer at a time for a role below a root: two would sweep away each other's saves and checkpoints.

A file names the process that saves there (rank 0), which touches it every now and then. A file whose process is known
to be dead, or which has not been touched for a while, is taken over. No clock is compared with another: what counts is
whether the file changes while this process, by its own monotonic clock, looks on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import LockedError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import claim_file, make_folder, open_regular, replace_file
from mcore_ckpt.steps.owner import Owner

logger = logging.getLogger(__name__)

# How often a process that waits for another's sign of life looks (seconds).
_LOOK_S = 0.5

# How often a trainer touches its lock file, and how long another one watches an untouched file before it takes the lock
# over (seconds). The two are far apart because a thread may be held up and network file systems cache a file's times.
TRAINER_BEAT_S = 15.0
TRAINER_LEASE_S = 120.0


@dataclass(frozen=True)
class _Claim:
    """A lock file as it was seen: equal to a later one if its process has given no sign of life in between."""

    content: bytes
    touched_ns: int

    @property
    def owner(self) -> Owner | None:
        """None where a crash, or a disk that was full, has left half a file."""
        try:
            return Owner.of(fields.decode(self.content))
        except fields.FieldError:
            return None


class TrainerLock:
    """A manager's share in this process's lock on a role; used on rank 0 alone.

    Args:
        root: the folder of the steps.
        role: whose trainer this is. Managers of one role in one process are the same trainer.
    """

    def __init__(self, root: Path, role: str) -> None:
        # One file, however a manager spells its folder.
        self._path = file_names.trainer_file(root.resolve(), role)
        self._role = role
        self._hold: _Hold | None = None
        self._seen: _Claim | None = None
        self._seen_at = 0.0

    def look(self) -> None:
        """Begins to watch whoever holds the lock: what is seen long before `take` need not be waited for there.

        Raises nothing: who only loads need not be able to read it.
        """
        with contextlib.suppress(OSError):
            self._notice(_read(self._path))

    def take(self, patience_s: float) -> None:
        """Returns when this process holds the lock; at once if it does already.

        Args:
            patience_s: how long to wait at most for a sign of life of a holder that cannot be asked, in seconds.

        Raises:
            LockedError: another trainer holds it, or may do so.
            OSError: the file cannot be written.
        """
        with _mutex:
            hold = _holds.get(self._path)
            if hold is None or _read(self._path, hold.content) is None:
                lost, hold = hold, self._acquire(patience_s)
                if lost is not None:
                    lost.end()
                _holds[self._path] = hold
            if self._hold is not hold:
                self._hold = hold
                hold.users += 1

    def release(self) -> None:
        """Gives up this manager's share. The last one removes the file. Raises nothing."""
        with _mutex:
            hold, self._hold = self._hold, None
            if hold is None:
                return
            hold.users -= 1
            if hold.users == 0:
                hold.end()
                if _holds.get(self._path) is hold:
                    del _holds[self._path]

    def _acquire(self, patience_s: float) -> _Hold:
        make_folder(self._path.parent)
        content = fields.encode(asdict(Owner.this_process()) | {"claim": uuid.uuid4().hex})
        deadline = time.monotonic() + patience_s
        waited_for: _Claim | None = None
        while True:
            claim = _read(self._path)
            if claim is None:
                try:
                    claim_file(self._path, content)
                except FileExistsError:
                    continue  # somebody was faster
                return _Hold(self._path, content)
            self._notice(claim)
            if self._is_dead(claim):
                if _read(self._path) == claim:
                    logger.info("%s: taking the place of %s", self._path, claim.owner or "nobody")
                    # Never absent in between. Of two that do this at once the later one stays, and the other finds
                    # that out before it puts a checkpoint in place.
                    replace_file(self._path, content)
                    return _Hold(self._path, content)
                continue
            has_moved = waited_for is not None and waited_for != claim
            if has_moved or self._is_alive(claim) or time.monotonic() >= deadline:
                raise LockedError(self._why(claim))
            waited_for = claim
            time.sleep(min(_LOOK_S, TRAINER_LEASE_S / 10))

    def _notice(self, claim: _Claim | None) -> None:
        if claim != self._seen:
            self._seen, self._seen_at = claim, time.monotonic()

    @property
    def _silence_s(self) -> float:
        return time.monotonic() - self._seen_at

    def _is_dead(self, claim: _Claim) -> bool:
        owner = claim.owner
        if owner is not None and owner.is_on_this_host:
            # This process itself, if it holds no lock, has left the file by some other way than `release`.
            return not owner.is_alive_here or owner == Owner.this_process()
        return self._silence_s >= TRAINER_LEASE_S

    def _is_alive(self, claim: _Claim) -> bool:
        owner = claim.owner
        return owner is not None and owner.is_on_this_host and owner.is_alive_here

    def _why(self, claim: _Claim) -> str:
        advice = (
            "Two trainers would delete each other's checkpoints: stop the other one, or give this one another root or "
            "role"
        )
        if self._is_alive(claim):
            return f"{self._path}: {claim.owner} saves {self._role} here, and is alive. {advice}"
        holder = claim.owner or "a process that is not named (the file is damaged)"
        left = max(0.0, TRAINER_LEASE_S - self._silence_s)
        return (
            f"{self._path}: {holder} saves {self._role} here; it was last seen alive {self._silence_s:.0f} s ago or "
            f"less. {advice}. If it is surely dead, delete the file, or save again in {left:.0f} s: without a sign of "
            "life until then it is taken over"
        )


class _Hold:
    """A lock file of this process, and the thread that shows that the process lives."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self.content = content
        self.users = 0
        self._process = os.getpid()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show_life, name="mcore_ckpt trainer lock", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        # In a forked child neither the thread nor the lock is its own.
        if self._process != os.getpid():
            return
        self._thread.join()
        try:
            if _read(self._path, self.content) is not None:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s stays behind, and is taken over by the next trainer: %s", self._path, error)

    def _show_life(self) -> None:
        fails = False
        while not self._over.wait(TRAINER_BEAT_S):
            try:
                if _read(self._path, self.content) is not None:
                    os.utime(self._path)
                fails = False
            except OSError as error:
                if not fails:
                    logger.warning("%s: a trainer elsewhere may take this one for dead: %s", self._path, error)
                fails = True


_mutex = threading.Lock()
_holds: dict[Path, _Hold] = {}
# A child has another pid: what its parent holds it does not.
os.register_at_fork(after_in_child=_holds.clear)


def _read(path: Path, content: bytes | None = None) -> _Claim | None:
    """The lock file; None if there is none, or if it is not the one with `content`. Raises OSError."""
    try:
        # Opened, not looked at by name: an NFS client asks the server again when a file is opened.
        descriptor = open_regular(path)
    except FileNotFoundError:
        return None
    try:
        # A claim is short: what is longer is damaged, and is none of its length.
        claim = _Claim(os.pread(descriptor, limits.SMALL_BYTES, 0), os.fstat(descriptor).st_mtime_ns)
    finally:
        os.close(descriptor)
    return claim if content is None or claim.content == content else None


# Runs after what ends saves that are under way (background.py), which is imported, and so registered, later.
@atexit.register
def _release_all() -> None:
    for hold in _holds.values():
        hold.end()
