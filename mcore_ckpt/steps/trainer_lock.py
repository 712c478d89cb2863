"""Lets only one trainer at a time save a role below a root. Two trainers would delete each other's checkpoints.

The lock is a file that names the process that saves (rank 0). That process touches the file at regular intervals.
Another trainer takes the lock over if it knows that the process is dead, or if it has watched the file for
TRAINER_LEASE_S seconds without seeing a change (TORN_LEASE_S seconds if the file is damaged). The other trainer
measures this time with its own monotonic clock, so the clocks of two hosts are never compared.

With each takeover the number in the file (`generation`) grows. A trainer that was taken for dead and comes back looks
at the file right before it would put a checkpoint in place, and finds a larger number in the file than its own. So it
notices that it has lost the lock.

The watch begins when the manager is made, so a job that is started again on other hosts usually need not wait. A save
waits at most half its `timeout_s` and then raises `LockedError`. A lock file of an older version has no random number
that names one life of a process, so each process with the pid and the start time in the file counts as the holder. All
managers of one role in one process are one trainer, even if an earlier manager was never closed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import LockedError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.access import FOLDER_MODE, is_foreign, owner_of, top_mode
from mcore_ckpt.io.files import claim_file, make_folder, open_regular, replace_file
from mcore_ckpt.processes import Home
from mcore_ckpt.steps.owner import Life, Owner
from mcore_ckpt.steps.same_root import SameRoot

logger = logging.getLogger(__name__)

# The seconds between two looks of a trainer at the lock file, while it waits for the holder's sign of life.
_LOOK_S = 0.5

# BEAT: the seconds after which a trainer touches its lock file again. LEASE: the seconds for which another trainer
# watches an untouched file before it takes the lock over. The two numbers are far apart, because the thread that
# touches the file can be delayed, and because network file systems cache a file's times.
TRAINER_BEAT_S = 15.0
TRAINER_LEASE_S = 120.0

# Marks the lock files of tools.
_TOOL = "mcore_ckpt tool"

_TRAINERS_ADVICE = (
    "Two trainers would delete each other's checkpoints: stop the other one, or give this one another root or role"
)
_BESIDE_TOOL = "It is a tool that writes a step: wait until it has ended"
_TOOLS_ADVICE = "No tool writes here meanwhile: wait until that process has ended, or name another folder to write to"

# The seconds for which another trainer watches a damaged file before it takes the lock over. A power loss can damage
# the file, because it is not synced. No trainer touches a damaged file, and a trainer that is just writing the file
# (`claim_file`, on a file system without hard links) needs a moment, not minutes. A trainer that needs longer finds out
# before its commit that it has lost the lock.
TORN_LEASE_S = 5.0


@dataclass(frozen=True)
class Claim:
    """The state of a lock file. Two states are equal if the file was not touched in between."""

    content: bytes
    touched_ns: int

    @property
    def is_of_tool(self) -> bool:
        """True if a tool holds the lock (`ToolLocks`), not a trainer."""
        return _TOOL.encode() in self.content

    @property
    def owner(self) -> Owner | None:
        """The process that holds the lock; None if the file is incomplete after a crash or because a disk was full."""
        try:
            return Owner.of(fields.decode(self.content))
        except fields.FieldError:
            return None

    @property
    def generation(self) -> int:
        """A number that grows by one with each takeover; 0 if the file is damaged or of an older version."""
        try:
            return fields.get_int(fields.decode(self.content), "generation")
        except fields.FieldError:
            return 0

    @property
    def life(self) -> Life:
        """Whether the process that holds the lock is alive."""
        return Life.UNKNOWN if self.owner is None else self.owner.life


class TrainerLock:
    """The lock of one manager on a role. Only rank 0 takes the lock; the other ranks use `check_root` alone.

    All managers of one role in one process belong to the same trainer, so their locks use the same lock file and never
    exclude each other.

    Args:
        root: the folder of the steps.
        role: the role that this trainer saves.
        mode: the mode of a root that has to be made, before the umask is applied. None: the mode that
            `access.top_mode(None)` returns.
        is_tool: True if a tool writes the role, not a trainer.

    Example:
        >>> lock = TrainerLock(Path("checkpoints"), "actor")  # doctest: +SKIP
        >>> lock.take(patience_s=60.0)  # doctest: +SKIP
    """

    def __init__(self, root: Path, role: str, mode: int | None = None, is_tool: bool = False) -> None:
        # Two managers may spell the path of one folder differently, but they must use the same lock file.
        self._path = file_names.trainer_file(root.resolve(), role)
        self._same_root = SameRoot(root)
        self._role = role
        self._mode = mode
        self._is_tool = is_tool
        self._hold: _Hold | None = None
        self._seen: Claim | None = None
        self._seen_at = 0.0

    def look(self) -> None:
        """Begins to watch the holder of the lock, so that `take` waits less. Raises nothing."""
        # Ignore errors, because a trainer that only loads may lack the permission to read the file.
        with contextlib.suppress(OSError):
            self._notice(read_claim(self._path))

    def check_root(self) -> None:
        """Raises OSError, and CommitError if the root is no longer the folder that it was when this lock was made.

        Every rank may call this method, because ranks on other hosts have mounted the root themselves.
        """
        self._same_root.check()

    def take(self, patience_s: float) -> None:
        """Takes the lock. Returns immediately if this process holds it already.

        Args:
            patience_s: the longest wait for a sign of life from a holder that this process cannot see, in seconds.

        Raises:
            LockedError: another trainer or a tool holds the lock, or may still hold it.
            CommitError: the root is not the same folder any more (`check_root`).
            OSError: the lock file cannot be written.
        """
        # Check before making anything: if the root's file system is gone, an empty folder is in its place.
        self.check_root()
        with _mutex:
            hold = _holds.get(self._path)
            if hold is None or read_claim(self._path, hold.content) is None:
                lost, hold = hold, self._acquire(patience_s, 0 if hold is None else hold.generation)
                if lost is not None:
                    lost.end()
                _holds[self._path] = hold
            if self._hold is not hold:
                self._hold = hold
                hold.users += 1

    def release(self) -> None:
        """Gives the lock up. The last manager of this process to release it removes the lock file. Raises nothing."""
        with _mutex:
            hold, self._hold = self._hold, None
            if hold is None:
                return
            hold.users -= 1
            if hold.users == 0:
                hold.end()
                if _holds.get(self._path) is hold:
                    del _holds[self._path]

    def _acquire(self, patience_s: float, generation: int) -> _Hold:
        make_folder(self._path.parent, top_mode(None) if self._mode is None else self._mode)
        deadline = time.monotonic() + patience_s
        waited_for: Claim | None = None
        while True:
            claim = self._found()
            generation = max(generation, 0 if claim is None else claim.generation)
            content = self._content(generation + 1)
            if claim is None:
                try:
                    claim_file(self._path, content)
                except FileExistsError:
                    continue  # another trainer was faster
                except OSError as error:
                    # The error names a temporary file, which says nothing to the user, so name the folder instead.
                    advice = "no checkpoint can be saved here: make the folder writable, or choose another root"
                    raise OSError(error.errno, f"{error.strerror}, so {advice}", str(self._path.parent)) from error
                return _Hold(self._path, content, generation + 1)
            self._notice(claim)
            if self._is_dead(claim):
                if read_claim(self._path) == claim:
                    logger.info("%s: taking the place of %s", self._path, claim.owner or "nobody")
                    # Replacing the file leaves no moment without a lock file. If two trainers do this at the same time,
                    # the later trainer keeps the lock, and the earlier trainer notices its loss before it commits.
                    self._replace(content)
                    return _Hold(self._path, content, generation + 1)
                continue
            has_moved = waited_for is not None and waited_for != claim
            if has_moved or claim.life is Life.ALIVE or time.monotonic() >= deadline:
                raise LockedError(self._why(claim))
            if waited_for is None and self._is_tool:
                logger.warning(
                    "%s: waiting up to %.0f s for a sign of life of %s",
                    self._path,
                    patience_s,
                    claim.owner or "its owner",
                )
            waited_for = claim
            time.sleep(min(_LOOK_S, TRAINER_LEASE_S / 10))

    def _found(self) -> Claim | None:
        try:
            return read_claim(self._path)
        except PermissionError as error:
            raise LockedError(self._why_foreign("it cannot be read")) from error

    def _replace(self, content: bytes) -> None:
        try:
            replace_file(self._path, content)
        except PermissionError as error:
            if not is_foreign(self._path):
                raise
            raise LockedError(self._why_foreign("its process is dead, but it cannot be replaced")) from error

    def _why_foreign(self, what: str) -> str:
        return (
            f"{self._path}: {what}: it is the lock of another trainer, and belongs to {owner_of(self._path)}. Let that "
            "user delete the file if no training of that user saves here any more, or give this training another "
            "root or role"
        )

    def _content(self, generation: int) -> bytes:
        by = {"by": _TOOL} if self._is_tool else {}
        claim = {"claim": uuid.uuid4().hex, "generation": generation}
        return fields.encode(asdict(Owner.this_process()) | claim | by)

    def _notice(self, claim: Claim | None) -> None:
        if claim != self._seen:
            self._seen, self._seen_at = claim, time.monotonic()

    @property
    def _silence_s(self) -> float:
        return time.monotonic() - self._seen_at

    def _is_dead(self, claim: Claim) -> bool:
        # `_acquire` runs only if this process does not hold the lock. If the file names this process nevertheless, the
        # file was left behind without `release`.
        if claim.owner is not None and claim.owner.is_this_process:
            return True
        life = claim.life
        return life is Life.DEAD or (life is Life.UNKNOWN and self._silence_s >= _lease_s(claim.owner))

    def _why(self, claim: Claim) -> str:
        advice = _TOOLS_ADVICE if self._is_tool else _BESIDE_TOOL if claim.is_of_tool else _TRAINERS_ADVICE
        if claim.life is Life.ALIVE:
            return f"{self._path}: {claim.owner} saves {self._role} here, and is alive. {advice}"
        holder = claim.owner or "an unknown process (the file is damaged)"
        left = max(0.0, _lease_s(claim.owner) - self._silence_s)
        return (
            f"{self._path}: {holder} saves {self._role} here, and was last seen alive at most {self._silence_s:.0f} s "
            f"ago. {advice}. If that process is surely dead, delete the file, or save again in {left:.0f} s: without a "
            "sign of life until then, the lock is taken over"
        )


class ToolLocks:
    """The locks of the roles that a tool writes below a root. A `with` block holds them.

    The block also excludes trainers of other roles, because their retention would judge the new step. Tools that write
    other roles may run at the same time. A root that has to be made gets `mode`, restricted by the umask.

    Raises OSError, and LockedError if a trainer saves below the root, or another tool writes one of the roles.
    """

    def __init__(self, root: Path, roles: Sequence[str], mode: int = FOLDER_MODE) -> None:
        self._root = root.resolve()
        self._locks = [TrainerLock(root, role, mode, is_tool=True) for role in roles]
        self._roles = frozenset(roles)

    def __enter__(self) -> ToolLocks:
        try:
            for lock in self._locks:
                lock.take(_patience_s())
            for role in self._other_trainers():
                lock = TrainerLock(self._root, role, is_tool=True)
                lock.take(_patience_s())
                lock.release()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for lock in self._locks:
            lock.release()

    def keep(self) -> None:
        """Raises LockedError if another process has taken a lock over. Also raises what `TrainerLock.take` raises."""
        for lock in self._locks:
            lock.take(patience_s=0)

    def _other_trainers(self) -> Iterator[str]:
        for name in os.listdir(self._root):
            role = file_names.role_of_trainer_file(name)
            if role is None or role in self._roles:
                continue
            try:
                claim = read_claim(self._root / name)
            except PermissionError:
                yield role  # taking the lock of this role raises the error that names its holder
                continue
            if claim is not None and not claim.is_of_tool:
                yield role


def _patience_s() -> float:
    # The wait is the lease and some margin, so that the lock of a trainer that died on another host is taken over.
    return TRAINER_LEASE_S + 2 * _LOOK_S


def _lease_s(owner: Owner | None) -> float:
    return TRAINER_LEASE_S if owner is not None else min(TORN_LEASE_S, TRAINER_LEASE_S)


class _Hold:
    """A lock that this process holds, and the thread that touches its file."""

    def __init__(self, path: Path, content: bytes, generation: int) -> None:
        self._path = path
        self.content = content
        self.generation = generation
        self.users = 0
        self._home = Home()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show_life, name="mcore_ckpt trainer lock", daemon=True)
        self._thread.start()

    def end(self) -> None:
        # A forked child has neither the thread nor the lock. It must not touch `_over`, which may have been in use at
        # the fork.
        if not self._home.is_here:
            return
        self._over.set()
        self._thread.join()
        try:
            if read_claim(self._path, self.content) is not None:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s could not be removed; the next trainer takes it over: %s", self._path, error)

    def _show_life(self) -> None:
        fails = False
        while not self._over.wait(TRAINER_BEAT_S):
            try:
                if read_claim(self._path, self.content) is not None:
                    os.utime(self._path)
                fails = False
            except OSError as error:
                if not fails:
                    logger.warning(
                        "%s could not be touched, so another trainer may consider this one dead: %s", self._path, error
                    )
                fails = True


_mutex = threading.Lock()
_holds: dict[Path, _Hold] = {}


def _forget_in_child() -> None:
    """Drops the parent's locks in a forked child, because a thread of the parent may have used them at the fork."""
    global _mutex
    _mutex = threading.Lock()
    _holds.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def read_claim(path: Path, content: bytes | None = None) -> Claim | None:
    """Returns the state of the lock file; None if it is missing or its content is not `content`. Raises OSError."""
    try:
        # Open the file, because an NFS client asks the server for fresh times only at an open, not at a `stat` by name.
        descriptor = open_regular(path)
    except FileNotFoundError:
        return None
    try:
        # A lock file is short. A longer file is damaged, and its first bytes are enough to notice that.
        claim = Claim(os.pread(descriptor, limits.SMALL_BYTES, 0), os.fstat(descriptor).st_mtime_ns)
    finally:
        os.close(descriptor)
    return claim if content is None or claim.content == content else None


# Runs after the exit handler of save/background.py, which finishes saves. Exit handlers run in reverse order of their
# registration, and save/background.py is imported after this module.
@atexit.register
def _release_all() -> None:
    for hold in _holds.values():
        hold.end()
