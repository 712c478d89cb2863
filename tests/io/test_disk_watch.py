"""Work that hangs in a call to the system: opening a pipe, which waits until somebody opens its other end."""

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.errors import HungDiskError
from mcore_ckpt.io import _native, disk_watch
from mcore_ckpt.io.disk_watch import DiskWatch, Work, in_function_of_trainer, in_job, wait_for_thread
from mcore_ckpt.io.threads import for_each
from tests.support.waiting import LONG_S, wait_for

TIMEOUT_S = 0.3


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def answer(pipe: Path) -> None:
    """Lets a call that opens the pipe for reading return."""
    os.close(os.open(pipe, os.O_WRONLY))


def opens(pipe: Path, after: Callable[[], object] = lambda: None) -> Callable[[], str]:
    def work() -> str:
        pipe.open("rb").close()
        after()
        return "opened"

    return work


def test_a_hung_call_is_named_and_other_work_refused_until_it_returns(pipe: Path) -> None:
    reached: list[str] = []
    watch = DiskWatch(TIMEOUT_S, who="rank 3: ")
    beside = DiskWatch(TIMEOUT_S, beside=watch)
    message = rf"^rank 3: {pipe}: io\.open\(.*\) has not returned for 0 s: the disk.*hangs"
    with pytest.raises(HungDiskError, match=message) as caught:
        watch.run(opens(pipe, lambda: reached.append("further")))
    assert caught.value.names_rank
    for each in (watch, beside):
        with pytest.raises(HungDiskError, match="has not returned for"):
            each.run(lambda: reached.append("other work"))
    (work,) = watch._left
    answer(pipe)
    wait_for(lambda: work.ended)
    assert reached == []  # what was given up does nothing more
    assert watch.run(lambda: 5) == 5
    assert not beside._left


def test_a_result_and_an_error_come_back() -> None:
    watch = DiskWatch(TIMEOUT_S)
    assert watch.run(lambda: threading.current_thread().name) == "mcore_ckpt work"
    with pytest.raises(ZeroDivisionError):
        watch.run(lambda: 1 // 0)
    with pytest.raises(SystemExit):
        watch.run(lambda: exit(3))


def test_patience(pipe: Path) -> None:
    """Who does not want to wait goes on, and the work does, too."""
    work = DiskWatch(LONG_S).start(opens(pipe))
    assert not work.wait(patience_s=0.1)
    answer(pipe)
    assert work.result() == "opened"


def test_slow_work_is_not_given_up() -> None:
    """It computes, sleeps, or waits for something else for longer than a call may last."""
    watch, over = DiskWatch(0.15), threading.Event()
    threading.Timer(0.5, over.set).start()
    assert watch.run(lambda: over.wait(LONG_S))

    def compute() -> int:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            sum(range(1000))
        return 1

    assert watch.run(compute) == 1


def test_looks_at_a_thread_that_runs_find_nothing() -> None:
    """A frame may be at any place, also at no line, when it is looked at."""
    end = time.monotonic() + 0.5

    def work() -> int:
        found = 0
        while time.monotonic() < end:
            found += len(list(Path("/proc/self").glob("fd*")))
        return found

    running = Work(work, LONG_S)
    while not running.ended:
        call = running.longest
        assert call is None or call.seconds < LONG_S
    assert running.result() > 0


def test_a_frame_at_no_line() -> None:
    code = SimpleNamespace(co_filename="nowhere.py", co_name="f", co_positions=lambda: iter([(None,) * 4]))
    for instruction in (-1, 0, 1000):
        frame: Any = SimpleNamespace(f_code=code, f_lasti=instruction, f_lineno=None)
        assert disk_watch._words(frame) == "f"


def test_a_path_that_is_being_made() -> None:
    outer = SimpleNamespace(f_locals={"path": Path("/whole")}, f_back=None)
    frame: Any = SimpleNamespace(f_locals={"self": object.__new__(type(Path()))}, f_back=outer)
    assert disk_watch._path(frame) == "/whole"


@pytest.mark.parametrize("module", ["transformers.tokenization_utils_base", "json"])
def test_a_call_of_a_library_is_seen(module: str, pipe: Path) -> None:
    """A tokenizer writes its own files into the folder of an export."""
    names: dict[str, Any] = {"__name__": module, "os": os, "path": str(pipe)}
    exec("def save():\n    os.close(os.open(path, os.O_RDONLY))", names)
    watch = DiskWatch(TIMEOUT_S)
    with pytest.raises(HungDiskError, match="has not returned for"):
        watch.run(names["save"])
    answer(pipe)
    wait_for(lambda: watch._left[0].ended)


def test_only_functions_of_the_trainer_are_asked_whether_they_can_be_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "1 (a thread) D 1")
    thread = threading.current_thread()
    assert not disk_watch._waits_for_disk(thread)
    with in_function_of_trainer():
        with in_function_of_trainer():
            assert disk_watch._waits_for_disk(thread)
        assert disk_watch._waits_for_disk(thread)
    assert not disk_watch._waits_for_disk(thread)


def test_threads_of_the_work_are_looked_at(pipe: Path) -> None:
    def work() -> None:
        for_each([pipe, pipe], lambda path: path.open("rb").close(), threads=2)

    with pytest.raises(HungDiskError, match=f"^{pipe}: io.open"):
        DiskWatch(TIMEOUT_S).run(work)
    answer(pipe)


def test_threads_of_work_that_was_given_up_begin_nothing_more(pipe: Path) -> None:
    reached: list[int] = []
    watch = DiskWatch(TIMEOUT_S)
    with pytest.raises(HungDiskError):
        watch.run(lambda: for_each([opens(pipe), *[lambda: reached.append(1)] * 3], lambda work: work(), threads=1))
    answer(pipe)
    wait_for(lambda: not watch._left or watch._left[0].ended)
    assert reached == []


def test_work_that_was_given_up_has_ended_when_all_its_threads_have(tmp_path: Path) -> None:
    """Else the next call would begin on a disk that still hangs, and these threads would go on beside it."""
    pipes = [tmp_path / "first", tmp_path / "second"]
    for pipe in pipes:
        os.mkfifo(pipe)
    watch = DiskWatch(TIMEOUT_S)
    with pytest.raises(HungDiskError):
        watch.run(lambda: for_each(pipes, lambda path: path.open("rb").close(), threads=2))
    (work,) = watch._left
    answer(pipes[0])
    assert not work._await_end(0.2)
    with pytest.raises(HungDiskError, match="has not returned for"):
        watch.run(lambda: None)
    answer(pipes[1])
    wait_for(lambda: work.ended)


def test_work_within_work_is_given_up_by_the_one_that_waits_for_it(pipe: Path) -> None:
    """Rank 0 opens a save in a thread that a thread of its round waits for."""
    watch, errors = DiskWatch(TIMEOUT_S), list[BaseException]()

    def outer() -> None:
        try:
            watch.start(opens(pipe)).result()
        except BaseException as error:
            errors.append(error)
            raise

    with pytest.raises(HungDiskError, match=f"^{pipe}: io.open"):
        watch.run(outer)
    assert [type(error) for error in errors] == [HungDiskError]
    with pytest.raises(HungDiskError, match="has not returned for"):
        watch.run(lambda: None)
    answer(pipe)
    wait_for(lambda: watch._left[0].ended)
    watch.run(lambda: None)


def test_threads_of_a_native_job_are_looked_at(pipe: Path) -> None:
    job = _native.ReadJob([str(pipe)], threads=1, piece_bytes=4096, block_bytes=4096, direct=False)
    memory = bytearray(4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    job.add(0, 0, 4096, None, 0, 4096, 1, 4096, address, 4096, owner=memory)

    def work() -> None:
        with in_job(job):
            job.run()

    with pytest.raises(HungDiskError, match=f"^{pipe}: opening has not returned for"):
        DiskWatch(TIMEOUT_S).run(work)
    found = job.longest_call()
    assert found is not None
    assert found[:2] == ("opening", str(pipe))
    answer(pipe)
    wait_for(lambda: job.longest_call() is None)


def test_an_interruption_ends_the_work_too(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes to the thread that waits."""
    reached: list[int] = []
    go_on = threading.Event()

    def works() -> None:
        for number in range(1000):
            go_on.wait(0.01)
            reached.append(number)

    work = Work(works, LONG_S)
    real = work._await_end
    calls = iter([KeyboardInterrupt])

    def interrupted(seconds: float) -> bool:
        for error in calls:
            raise error
        return real(seconds)

    monkeypatch.setattr(work, "_await_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert work.ended
    assert len(reached) < 1000


def test_what_is_entered_around_the_work_is_entered_on_its_thread() -> None:
    seen: list[str] = []

    @contextmanager
    def around():  # type: ignore[no-untyped-def]
        seen.append(threading.current_thread().name)
        yield

    def make():  # type: ignore[no-untyped-def]
        seen.append(threading.current_thread().name)
        return around()

    DiskWatch(TIMEOUT_S, make).run(lambda: None)
    assert seen == [threading.current_thread().name, "mcore_ckpt work"]


def test_without_threads_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert DiskWatch(TIMEOUT_S).run(lambda: threading.current_thread().name) == threading.current_thread().name


def test_waiting_for_a_thread(pipe: Path) -> None:
    thread = threading.Thread(target=opens(pipe), daemon=True)
    thread.start()
    with pytest.raises(HungDiskError, match=f"^{pipe}: io.open"):
        wait_for_thread(thread, TIMEOUT_S)
    answer(pipe)
    wait_for_thread(thread, LONG_S)


def test_nothing_is_collected_while_the_frames_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Python 3.11.7 hangs if the collection lets another thread run that starts a thread or looks, too."""
    enabled: list[bool] = []
    read = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: (enabled.append(gc.isenabled()), read())[1])
    assert gc.isenabled()
    disk_watch.Look(threading.current_thread()).longest()
    assert enabled == [False]
    assert gc.isenabled()
