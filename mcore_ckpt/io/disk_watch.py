"""Runs work on another thread, and gives the work up if one of its calls to a file system does not return.

A file system that is frozen, or whose server has gone, gives no answer, not even an error. Nothing wakes a thread that
waits for such a file system. So while the caller waits, the caller checks which calls to the system the threads of the
work are in. If a single call lasts longer than the caller allows, the caller gives the work up. Slow work is not given
up, however long it takes.
"""

from __future__ import annotations

import ctypes
import gc
import linecache
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar, cast

from mcore_ckpt.errors import HungDiskError

Result = TypeVar("Result")

# The first look comes after _FIRST_LOOK_S seconds, because nearly all work is over by then. The later pauses are a
# fraction (1 / _LOOKS) of the time that a call may last, but at most _LONGEST_PAUSE_S.
_FIRST_LOOK_S, _LONGEST_PAUSE_S, _LOOKS = 0.05, 1.0, 20
# How much time interrupted work has to end, in seconds.
_INTERRUPTION_S = 10.0

# Modules outside this package that call the file system.
_CALLERS = ("os", "pathlib", "shutil", "posixpath", "genericpath", "glob", "tempfile", "zipfile", "codecs")
# Packages whose native code reads and writes files, and waits for nothing else. huggingface_hub does not belong here,
# because it waits for the network.
_CALLING_PACKAGES = ("transformers", "safetensors", "json", "yaml")
# Modules of this package in which threads wait for something other than a disk. The waits in these modules have their
# own deadlines.
_WAITERS = (
    *(f"mcore_ckpt.{room}." for room in ("ranks", "state", "models", "sharding", "load")),
    *(f"mcore_ckpt.io.{name}" for name in ("device_waits", "disk_watch")),
    "mcore_ckpt.fast.peer_",
)


class Job(Protocol):
    """A job of the C++ extension, which calls the system on threads that Python does not see."""

    def longest_call(self) -> tuple[str, str, float] | None: ...
    def cancel(self) -> None: ...


@dataclass(frozen=True)
class Call:
    """A call to the system on `path`, which has not returned for at least `seconds`. `doing` names the operation."""

    doing: str
    path: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.doing} has not returned for {self.seconds:.0f} s: the disk, or the server that has "
            "it, hangs. Once the disk answers, everything works again. Look at the system's log (dmesg) and at the "
            "server"
        )


class _GivenUp(BaseException):
    """Ends work that nobody waits for any more, as soon as its thread runs again."""


@contextmanager
def in_job(job: Job) -> Iterator[None]:
    """Marks this thread as waiting for a job of the C++ extension."""
    thread = threading.current_thread()
    thread.native_job = job  # type: ignore[attr-defined]
    try:
        yield
    finally:
        thread.native_job = None  # type: ignore[attr-defined]


def _job_of(thread: threading.Thread) -> Job | None:
    return getattr(thread, "native_job", None)


@contextmanager
def in_function_of_trainer() -> Iterator[None]:
    """Marks this thread as running a function of the trainer.

    A function of the trainer may wait for anything. So only a wait that cannot be interrupted counts as a call to a
    disk.
    """
    thread = threading.current_thread()
    before = _runs_trainer(thread)
    thread.runs_trainer = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        thread.runs_trainer = before  # type: ignore[attr-defined]


def _runs_trainer(thread: threading.Thread) -> bool:
    return getattr(thread, "runs_trainer", False)


class Look:
    """Watches whether a thread, and the threads that it has started (`io/threads.py`), make progress."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._seen: dict[int, tuple[tuple[int, int, int], float]] = {}

    def longest(self) -> Call | None:
        """Returns the call that has lasted longest, according to the looks so far."""
        now, frames = time.monotonic(), _frames()
        calls = [self._call_of(thread, frames, now) for thread in _family(self._thread)]
        return max((call for call in calls if call is not None), key=lambda call: call.seconds, default=None)

    def wait(self, has_ended: Callable[[float], bool], most_s: float, total_s: float = float("inf")) -> Call | None:
        """Waits until the thread has ended, or a call has lasted `most_s` seconds. Returns that call.

        Returns None if the thread has ended, or if `total_s` seconds have passed. `has_ended(seconds)` waits at most
        `seconds` for the end of the thread, and returns whether it has ended.
        """
        pause, until = _FIRST_LOOK_S, time.monotonic() + total_s
        while not has_ended(pause):
            call = self.longest()
            if call is not None and call.seconds >= most_s:
                return call
            if time.monotonic() >= until:
                return None
            pause = max(_FIRST_LOOK_S, min(_LONGEST_PAUSE_S, most_s / _LOOKS))
        return None

    def _call_of(self, thread: threading.Thread, frames: dict[int, FrameType], now: float) -> Call | None:
        number = cast(int, thread.ident)
        job = _job_of(thread)
        if job is not None:
            found = job.longest_call()
            return None if found is None else Call(*found)
        frame = frames.get(number)
        if frame is None or not (_is_in_call(frame) or _waits_for_disk(thread)):
            self._seen.pop(number, None)
            return None
        place = (id(frame), frame.f_lasti, _cpu_time(thread))
        before, since = self._seen.get(number, (None, now))
        if place != before:
            self._seen[number] = (place, now)
            return None
        words = _words(frame)
        return None if "sleep(" in words else Call(words, _path(frame), now - since)


# Held while `_frames` has disabled the garbage collection, so that no other look enables it meanwhile.
_frames_lock = threading.Lock()


def _frames() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread, by the thread's identifier.

    In some versions of Python (seen in 3.11.7), `sys._current_frames` holds the interpreter's lock of all threads while
    it makes its dictionary. If the garbage collector begins meanwhile, the collector can run Python code, and so let
    another thread run. If the other thread starts a thread or calls `sys._current_frames`, the two threads wait for
    each other, and the process hangs for ever (python/cpython issue 106883). So the collector is disabled during the
    call.
    """
    # Wait only a second: in a forked child, the lock may be held by a thread that the child does not have.
    is_held = _frames_lock.acquire(timeout=1.0)
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()
        if is_held:
            _frames_lock.release()


def _family(thread: threading.Thread) -> list[threading.Thread]:
    members = [thread]
    for other in threading.enumerate():
        if getattr(other, "started_by", None) in members:
            members.append(other)
    return members


def _is_in_call(frame: FrameType) -> bool:
    """Returns whether a thread in this frame may be in a call to the file system.

    The thread is in a call if it stays in the frame without computing.
    """
    name = str(frame.f_globals.get("__name__", ""))
    package = name.split(".")[0]
    if package != "mcore_ckpt":
        return name in _CALLERS or package in _CALLING_PACKAGES
    return not name.startswith(_WAITERS)


def _waits_for_disk(thread: threading.Thread) -> bool:
    """Returns whether a function of the trainer is in a call that cannot be interrupted, such as a call to a disk."""
    if not _runs_trainer(thread):
        return False
    with suppress(OSError, IndexError):
        state = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(errors="replace").rpartition(")")[2]
        return state.split()[0] == "D"
    return False


def _cpu_time(thread: threading.Thread) -> int:
    """Returns how long a thread has computed, in nanoseconds; 0 if the system does not tell."""
    try:
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _words(frame: FrameType) -> str:
    """Returns the text of the call that a frame is in, such as "os.rename(staging, role_dir)"."""
    code = frame.f_code
    # The thread may run meanwhile. A frame that is just beginning or ending has no line, so each number may be None.
    first, last, start, stop = next(islice(code.co_positions(), max(0, frame.f_lasti // 2), None), (None,) * 4)
    line = linecache.getline(code.co_filename, first or frame.f_lineno or 0)
    words = line.encode()[start:stop].decode(errors="replace") if first == last else line.strip()
    return words or code.co_name


def _path(frame: FrameType | None) -> str:
    """Returns the path that a call is about: the first path found, from the innermost frame outwards."""
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, Path) or (isinstance(value, str) and value.startswith("/")):
                # A path that pathlib is still making has no text yet.
                with suppress(AttributeError):
                    return str(value)
        frame = frame.f_back
    return "a file"


class Work(Generic[Result]):
    """Work that runs on a separate thread. The thread enters the context `around`.

    A single call to the system may last `timeout_s` seconds. If a call lasts longer, the work is given up, and added to
    `left`. `who` begins the error's message.
    """

    def __init__(
        self,
        work: Callable[[], Result],
        timeout_s: float,
        around: AbstractContextManager[object] | None = None,
        who: str = "",
        left: list[Work[Any]] | None = None,
    ) -> None:
        self._work, self._timeout_s, self._around, self._who = work, timeout_s, around or nullcontext(), who
        self._left = [] if left is None else left
        # An error may be raised in any thread at any place (`give_up`, Ctrl-C). In a method of `threading.Event` the
        # error would leave the event's lock locked, and every thread that sets the event or waits for the event would
        # hang. So this class has no event.
        self._has_ended, self._is_given_up, self._running = False, False, threading.Lock()
        self._running.acquire()
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mcore_ckpt work", daemon=True)
        self._look = Look(self._thread)
        try:
            self._thread.start()
        except RuntimeError:  # the system grants no thread: do the work here, without a watch
            self._run()
        except BaseException:  # such as Ctrl-C; the thread may have begun already
            self.give_up()
            raise

    @property
    def ended(self) -> bool:
        """True if the work has ended."""
        return self._has_ended

    @property
    def longest(self) -> Call | None:
        """The call that has lasted longest."""
        return self._look.longest()

    def wait(self, patience_s: float = float("inf"), total_s: float = float("inf")) -> bool:
        """Waits for the end of the work, and returns True.

        Returns False as soon as a call to the system has lasted `patience_s`, or when `total_s` seconds have passed.

        Raises HungDiskError as soon as a call has lasted the `timeout_s` of the work. The work is then given up: its
        thread ends when the call returns.
        """
        try:
            call = self._look.wait(self._await_end, min(self._timeout_s, patience_s), total_s)
        except BaseException:  # such as Ctrl-C, which must end the work, too
            self.give_up()
            self._await_end(_INTERRUPTION_S)
            raise
        if call is not None and call.seconds >= self._timeout_s:
            self._left.append(self)
            self.give_up()
            raise _error(self._who, call)
        return call is None and self._has_ended

    def result(self) -> Result:
        """Waits for the end of the work like `wait`, and returns its result or raises its error."""
        self.wait()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._result[0]
        finally:
            # Otherwise the error and this frame would refer to each other, and would keep all objects of the callers in
            # memory. The error's frames also refer to this work, so for the same reason this work does not keep the
            # error.
            del self, error

    def give_up(self) -> None:
        """Ends the work as soon as its threads run again."""
        if self._has_ended or self._is_given_up:
            return
        self._is_given_up = True
        for thread in _family(self._thread):
            if thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_GivenUp))
            job = _job_of(thread)
            if job is not None:
                job.cancel()

    def _run(self) -> None:
        with suppress(_GivenUp):  # `_GivenUp` may be raised after the work has ended
            try:
                with self._around:
                    if not self._is_given_up:
                        self._result.append(self._work())
            except BaseException as error:
                self._error = error
            finally:
                self._has_ended = True
            self._running.release()

    def _await_end(self, seconds: float) -> bool:
        if not self._has_ended and self._running.acquire(timeout=seconds):
            self._running.release()  # for other threads that wait
        return self._has_ended


def _error(who: str, call: Call | None) -> HungDiskError:
    error = HungDiskError(f"{who}the disk has hung, and answers again: try again" if call is None else f"{who}{call}")
    error.names_rank = bool(who)
    return error


class DiskWatch:
    """Runs the work of threads that use the same file systems; implements `ranks.rounds.Runner`.

    Args:
        timeout_s: how long a single call to the system may last, in seconds.
        around: called on the thread that asks for work; returns the context that the working thread enters.
        who: the beginning of messages, such as "rank 3: ".
        beside: the watch of other threads that use the same file systems. If work of one watch hangs, both watches
            refuse work.
    """

    def __init__(
        self,
        timeout_s: float,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        who: str = "",
        beside: DiskWatch | None = None,
    ) -> None:
        self._timeout_s, self._around, self._who = timeout_s, around, who
        self._left: list[Work[Any]] = [] if beside is None else beside._left

    @classmethod
    def of_one_call(
        cls, timeout_s: float, rank: int, around: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> DiskWatch:
        """Returns the watch of a call that has no manager.

        While work of one watch that this method has returned hangs, all watches that it has returned refuse work.
        """
        return cls(timeout_s, around, f"rank {rank}: ", beside=_calls)

    def start(self, work: Callable[[], Result]) -> Work[Result]:
        """Starts work. Raises HungDiskError if earlier work hangs."""
        for each in list(self._left):
            if not each.ended:
                raise _error(self._who, each.longest)
            with suppress(ValueError):  # a watch of another thread may have removed the work
                self._left.remove(each)
        return Work(work, self._timeout_s, self._around(), self._who, self._left)

    def run(self, work: Callable[[], Result]) -> Result:
        """Does work, and returns its result.

        Raises HungDiskError if a call to the system has not returned in time, or if earlier work hangs.
        """
        started = self.start(work)
        try:
            return started.result()
        finally:
            del started  # an error refers to this frame, so the work would live as long as the error

    def leave(self, work: Work[Any]) -> None:
        """Refuses all other work until this work has ended."""
        self._left.append(work)


# The watch of all calls that have no manager. If such a call has given work up, the watch refuses all further work
# until the given-up work has ended.
_calls = DiskWatch(0.0)


def wait_for_thread(thread: threading.Thread, timeout_s: float) -> None:
    """Waits for a thread.

    Raises HungDiskError as soon as the thread has been in one call to the system for `timeout_s` seconds.
    """

    def has_ended(pause: float) -> bool:
        thread.join(pause)
        return not thread.is_alive()

    call = Look(thread).wait(has_ended, timeout_s)
    if call is not None:
        raise _error("", call)
