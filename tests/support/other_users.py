"""Lets a function run as another user, in a process of its own."""

import ctypes
import os
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

Result = TypeVar("Result")

# Numbers that no user of a usual system has.
ALICE, BOB, MALLORY = 61001, 61002, 61003
TEAM, STRANGERS = 61100, 61200
_PR_SET_DUMPABLE = 4


def run_as(user: int, work: Callable[[], Result], umask: int = 0o022, group: int | None = None) -> Result:
    """Returns what `work` returns as a user of one group, or raises what it raises. None: a group of the user's own."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _become(user, user if group is None else group, umask)
            with open(writing, "wb") as answers:
                pickle.dump(_outcome(work), answers)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answers:
        data = answers.read()
    os.waitpid(child, 0)
    assert data, "the other user's process has died"
    is_error, result = pickle.loads(data)
    if is_error:
        raise result
    return result


def _become(user: int, group: int, umask: int) -> None:
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    os.umask(umask)
    # Else it may not look into /proc/self any more, nor read who holds a lock.
    assert ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1) == 0


def _outcome(work: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return False, work()
    except BaseException as error:
        error.add_note(traceback.format_exc())
        try:
            pickle.dumps(error)
        except Exception:
            return True, RuntimeError(traceback.format_exc())
        return True, error


@contextmanager
def common_place() -> Iterator[Path]:
    """A folder in which everybody may write, like /dev/shm. Pytest's own no other user may enter."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o1777)
    try:
        yield place
    finally:
        shutil.rmtree(place)
