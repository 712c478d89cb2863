"""What asks for a stop: signals, whose handlers only note them, and a file."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.errors import InvalidArgumentError, InvalidStateError, InvalidTypeError
from mcore_ckpt.preemption import PreemptionGuard, end_times, requests
from mcore_ckpt.preemption.requests import Signals, TriggerFile
from tests.support.unsharded_model import Model
from tests.support.waiting import LONG_S

NUMBER = signal.SIGUSR1


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[int]]:
    """What the handler that was there before has heard."""
    found: list[int] = []
    before = signal.signal(NUMBER, lambda number, frame: found.append(number))
    yield found
    signal.signal(NUMBER, before)


def test_a_signal_is_noted_once_and_the_earlier_handler_hears_of_all(heard: list[int]) -> None:
    earlier = signal.getsignal(NUMBER)
    signals = Signals([NUMBER])
    signal.raise_signal(NUMBER)
    signals.install(can_do_without=False)
    assert signals.first is None, "it came before"
    for _ in range(3):
        signal.raise_signal(NUMBER)
    assert signals.first is not None
    assert signals.first.reason == "SIGUSR1"
    assert time.monotonic() - LONG_S < signals.first.at <= time.monotonic()
    first = signals.first
    signals.remove()
    assert signal.getsignal(NUMBER) is earlier
    signal.raise_signal(NUMBER)
    assert signals.first is first
    assert len(heard) == 5


def test_a_handler_that_came_later_stays_and_reaches_the_earlier_one_through_ours(
    heard: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """As megatron's DistributedSignalHandler does: it puts back what it has found, whenever it is released."""
    signals = Signals([NUMBER])
    signals.install(can_do_without=False)
    ours = signal.getsignal(NUMBER)
    signal.signal(NUMBER, theirs := lambda number, frame: None)
    for _ in range(2):
        signals.warn_of_others()
    assert sum("SIGUSR1 has got another handler" in record.message for record in caplog.records) == 1
    signals.remove()
    assert signal.getsignal(NUMBER) is theirs
    signal.signal(NUMBER, ours)
    signal.raise_signal(NUMBER)
    assert heard == [NUMBER]
    assert signals.first is None


def status_of_forked_child(signals: Signals, number: int) -> int:
    """The exit code of a child that raises a signal: 3 if it goes on after that."""
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(number)
        os._exit(3)
    _, found = os.waitpid(pid, 0)
    signals.remove()
    return os.waitstatus_to_exitcode(found)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, 3)])
def test_only_signals_that_end_children_end_a_forked_child(number: int, status: int) -> None:
    """A data loader's worker must end when its parent ends it, and only then: Slurm signals all processes of a step."""
    before = signal.signal(number, signal.SIG_DFL)
    signals = Signals([number])
    signals.install(can_do_without=False)
    found = status_of_forked_child(signals, number)
    signal.signal(number, before)
    assert found == status
    assert signals.first is None


def test_a_handler_from_before_hears_the_signal_in_a_forked_child_too() -> None:
    signal.signal(NUMBER, lambda number, frame: os._exit(4))
    signals = Signals([NUMBER])
    signals.install(can_do_without=False)
    assert status_of_forked_child(signals, NUMBER) == 4


def ignore_signals(worker: int) -> None:
    signal.signal(NUMBER, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("context", "init"), [("fork", None), pytest.param("spawn", ignore_signals, marks=pytest.mark.full)]
)
def test_a_signal_to_all_processes_ends_no_worker_of_a_data_loader(context: str, init: Any) -> None:
    """The recipes of docs/how_to/preemption.md. A worker that ends makes the next batch raise a RuntimeError."""
    signal.signal(NUMBER, signal.SIG_DFL)
    signals = Signals([NUMBER])
    signals.install(can_do_without=False)
    loader = torch.utils.data.DataLoader(
        torch.arange(1000), num_workers=1, multiprocessing_context=context, worker_init_fn=init
    )
    batches: Any = iter(loader)
    seen = [int(next(batches))]
    for pid in (os.getpid(), batches._workers[0].pid):
        os.kill(pid, NUMBER)
    seen += [int(batch) for batch in batches]
    signals.remove()
    assert seen == list(range(1000))
    assert signals.first is not None


def test_an_ignored_signal_is_ignored_in_a_child() -> None:
    signal.signal(NUMBER, signal.SIG_IGN)
    signals = Signals([NUMBER])
    signals.install(can_do_without=False)
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(NUMBER)
        os._exit(3)
    _, status = os.waitpid(pid, 0)
    signals.remove()
    assert os.waitstatus_to_exitcode(status) == 3


def test_another_thread_is_refused_by_name_unless_there_is_a_file(caplog: pytest.LogCaptureFixture) -> None:
    raised: list[Any] = []

    def enter() -> None:
        try:
            Signals([NUMBER]).install(can_do_without=False)
        except InvalidStateError as error:
            raised.append(str(error))
        Signals([NUMBER]).install(can_do_without=True)
        Signals([]).install(can_do_without=False)

    thread = threading.Thread(target=enter, name="the loop")
    thread.start()
    thread.join()
    assert len(raised) == 1
    assert "the thread 'the loop' cannot handle SIGUSR1" in raised[0]
    assert "trigger_file" in raised[0]
    assert sum("the thread 'the loop' cannot handle" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([signal.SIGKILL], InvalidArgumentError, "SIGKILL, which no process can handle"),
        ([99], InvalidArgumentError, "signals has 99"),
        (["SIGTERM"], InvalidArgumentError, "use signals of the module signal"),
        (signal.SIGTERM, InvalidTypeError, r"use a list of signals, such as \[signal.SIGTERM\]"),
        ("SIGTERM", InvalidTypeError, "use a list of signals"),
    ],
)
def test_what_is_no_signal_is_refused_before_anything_is_entered(
    given: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    with closing(CheckpointManager(tmp_path, Model(), config=CheckpointConfig(save_contents=("model",)))) as manager:
        with pytest.raises(error, match=words):
            PreemptionGuard(manager, signals=given)
        PreemptionGuard(manager, signals=[NUMBER, NUMBER])


@pytest.mark.parametrize("ends_in_s", [None, math.inf])
def test_a_guard_that_nothing_can_stop_is_refused(
    ends_in_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (*end_times._VARIABLES, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with closing(CheckpointManager(tmp_path, Model(), config=CheckpointConfig(save_contents=("model",)))) as manager:

        def enter(**given: Any) -> None:
            with PreemptionGuard(manager, **{"signals": (), "training_ends_in_s": ends_in_s, **given}) as guard:
                assert not guard.should_stop(1)

        with pytest.raises(InvalidArgumentError, match="give signals, trigger_file or training_ends_in_s"):
            enter()
        with pytest.raises(InvalidArgumentError, match="nothing can stop this training"):
            enter(deadline_s=120)
        enter(signals=[NUMBER])
        enter(trigger_file=tmp_path / "stop")
        enter(training_ends_in_s=1000.0)
        # A job whose end is not known is trained nevertheless, unless the caller himself has said that it has none.
        monkeypatch.setenv("SLURM_JOB_END_TIME", "unknown")
        assert "nothing can stop" not in caplog.text
        if ends_in_s is None:
            enter()
            assert "the end of this job is not known: give training_ends_in_s or trigger_file" in caplog.text
        else:
            with pytest.raises(InvalidArgumentError):
                enter()


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LOOK_S", 0.01)


def wait_until_found(file: TriggerFile) -> requests.StopRequest:
    until = time.monotonic() + LONG_S
    while file.found is None:
        assert time.monotonic() < until
        time.sleep(0.005)
    return file.found


def test_a_file_asks_for_a_stop_and_is_removed(tmp_path: Path, quick_looks: None) -> None:
    path = tmp_path / "stop"
    file = TriggerFile(path, deadline_s=60.0)
    file.start()
    time.sleep(0.05)
    assert file.found is None
    path.touch()
    found = wait_until_found(file)
    assert found.reason == f"the file {path}"
    assert 0 <= time.monotonic() - found.at < LONG_S
    file.end(acted=False)
    assert path.exists()
    file.end(acted=True)
    assert not path.exists()


@pytest.mark.parametrize(("age_s", "deadline_s", "counts"), [(5, 60, True), (100, 60, False), (100, None, True)])
def test_a_file_that_is_there_already_counts_unless_it_is_of_an_earlier_run(
    age_s: float, deadline_s: float | None, counts: bool, tmp_path: Path, quick_looks: None
) -> None:
    path = tmp_path / "stop"
    path.touch()
    os.utime(path, (time.time() - age_s,) * 2)
    file = TriggerFile(path, deadline_s)
    file.start()
    if not counts:
        time.sleep(0.1)
        assert file.found is None
        path.touch()  # made once more
    found = wait_until_found(file)
    if counts:
        assert age_s <= time.monotonic() - found.at < age_s + LONG_S
    file.end(acted=True)
