"""Trainings that are asked to stop: all ranks stop at the same step, which is saved if there is time."""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.errors import AgreementError, CommitError, InvalidArgumentError, InvalidStateError, InvalidTypeError
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.preemption import PreemptionGuard, Stopped, requests
from mcore_ckpt.save.rank_files import RankFiles
from mcore_ckpt.steps import complete_steps
from tests.distributed.agreement import error_of, everywhere, gather, raised_everywhere
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, snapshot
from tests.distributed.training import Training, build, parallel, train

DP2 = LAYOUTS["dp2-bf16"]
STEPS = 50
FULL = pytest.mark.full

pytestmark = pytest.mark.world(2)


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """A handler that is left behind would end these ranks, which shows."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    with everywhere():
        assert [signal.getsignal(number) for number in numbers] == before


def manager_of(training: Training, root: Path, role: str = "actor", **config: Any) -> CheckpointManager:
    choices = CheckpointConfig(timeout_s=60.0, **config)
    return CheckpointManager(root, training.model, training.optimizer, training.scheduler, role=role, config=choices)


def roles_of(training: Training, root: Path, **config: Any) -> list[CheckpointManager]:
    """An actor and a critic, which save the same model."""
    roles = ("actor", "critic")
    return [manager_of(training, root, role, roles=roles, **config) for role in roles]


def steps_in(folder: Path) -> list[int]:
    dist.barrier()
    return [each.step for each in complete_steps(folder)]


def run(
    training: Training, guard: PreemptionGuard, signalled: dict[int, int], first: int = 0, saves: Any = None
) -> int:
    """Trains until the guard says stop. In some steps, some rank gets a signal. Returns the last step."""
    with guard:
        for step in range(first + 1, STEPS):
            train(training, step - 1, step)
            if signalled.get(step) == dist.get_rank():
                signal.raise_signal(signal.SIGTERM)
            if saves is not None:
                saves(step)
            if guard.should_stop(step):
                return step
    raise AssertionError("nothing has stopped the training")


@pytest.mark.parametrize(
    ("is_async", "victim"),
    [(True, 1), (False, 0), pytest.param(True, 0, marks=FULL), pytest.param(False, 1, marks=FULL)],
)
def test_a_signal_on_one_rank_stops_all_at_the_same_step_and_training_goes_on_from_it(
    is_async: bool, victim: int, shared_path: Path
) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path, async_save=is_async)
        guard = PreemptionGuard(manager, deadline_s=60.0, exit_status=75, extra_state=lambda: {"is": "last"})
        assert (guard.exit_status, guard.stopped) == (0, None)
        last = run(training, guard, {3: victim})
        steps, requested, at_stop = gather(last), gather(guard.is_requested), snapshot(training)
        with everywhere():
            assert steps[0] == steps[1]
            assert 3 <= last < 3 + 32, "short steps are passed over"
            assert guard.stopped == Stopped(last, f"SIGTERM on rank {victim}", "durable")
            assert guard.exit_status == 75
            assert requested == [victim == 0, victim == 1]
            assert guard.should_stop(last)
        manager.close()
        assert steps_in(shared_path) == [last]
        resumed = build(DP2, seed=2)
        again = manager_of(resumed, shared_path)
        result = again.load()
        with everywhere():
            assert (result.step, result.extra_state) == (last, {"is": "last"})
            assert_same(snapshot(resumed), at_stop)
        again.close()


def test_nothing_asks_for_a_stop(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path)
        with PreemptionGuard(manager, deadline_s=60.0) as guard:
            for step in range(1, 4):
                train(training, step - 1, step)
                with everywhere():
                    assert not guard.should_stop(step)
                    assert not guard.is_requested
        with everywhere():
            assert (guard.exit_status, guard.stopped) == (0, None)
        manager.close()
        assert steps_in(shared_path) == []


def test_further_signals_do_not_disturb_the_last_save(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = RankFiles.capture

    def capture_and_hear(files: RankFiles, place: Any) -> None:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        capture(files, place)

    monkeypatch.setattr(RankFiles, "capture", capture_and_hear)
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path)
        last = run(training, PreemptionGuard(manager), {1: 1})
        manager.close()
        assert steps_in(shared_path) == [last]


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch, rank: int) -> Iterator[threading.Event]:
    """On one rank, no save gets its bytes to the disk until the event is set."""
    gate, finish = threading.Event(), FileWriter.finish

    def wait_and_finish(writer: FileWriter) -> Any:
        assert gate.wait(60)
        return finish(writer)

    with monkeypatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(FileWriter, "finish", wait_and_finish)
        yield gate
        gate.set()


def test_a_save_of_the_last_step_that_is_under_way_counts(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path, async_save=True)
        with held_up(monkeypatch, rank=1) as gate, PreemptionGuard(manager, signals=[signal.SIGUSR1]) as guard:
            train(training, 0, 1)
            first = manager.save(1)
            if dist.get_rank() == 0:
                signal.raise_signal(signal.SIGUSR1)
            threading.Timer(0.3, gate.set).start()
            with everywhere():
                assert guard.should_stop(1)
                assert guard.stopped == Stopped(1, "SIGUSR1 on rank 0", "durable")
                assert manager._background.newest_of_step is first, "it was not saved again"
                assert first.committed
        manager.close()


def test_without_time_the_newest_complete_step_remains(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path, async_save=True)
        manager.save(1).wait()
        if dist.get_rank() == 0:  # rank 0 decides
            manager._background._took.append(1000.0)
        guard = PreemptionGuard(manager, deadline_s=30.0)
        last = run(training, guard, {2: 1}, first=1)
        assert guard.stopped == Stopped(last, "SIGTERM on rank 1", None)
        assert steps_in(shared_path) == [1]
        if dist.get_rank() == 0:
            assert f"step {last} is not saved" in caplog.text
            assert "a durable save takes about 1000.0 s" in caplog.text
        # A save that hangs is waited for as long as there is time.
        with held_up(monkeypatch, rank=1):
            manager.save(2)
            late = PreemptionGuard(manager, deadline_s=0.5)
            last = run(training, late, {3: 0}, first=2)
            with everywhere():
                assert late.stopped == Stopped(last, "SIGTERM on rank 0", None)
        dist.barrier()
        error_of(manager.close)


@pytest.mark.parametrize("waits_in", ["should_stop", "save"])
def test_a_rank_whose_machine_goes_waits_for_a_dead_rank_only_until_then(waits_in: str, shared_path: Path) -> None:
    """The other ranks, which have heard of no request, wait no longer. Rank 0 is dead, until rank 1 is back."""
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path)
        with PreemptionGuard(manager, deadline_s=3.0) as guard:
            wait = guard.should_stop if waits_in == "should_stop" else manager.save
            began, raised = time.monotonic(), None
            if dist.get_rank() == 1:
                # The request comes while this rank waits.
                threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
                raised = error_of(lambda: wait(1))
            dist.barrier()
            if dist.get_rank() == 0:
                raised = error_of(lambda: wait(1))
            seconds = time.monotonic() - began
            with everywhere():
                assert isinstance(raised, AgreementError if waits_in == "should_stop" else CommitError)
                assert "rank 1 waited" in str(raised)
                assert seconds < 30.0, "the timeout is 60 s"
                assert not guard.stopped
        error_of(manager.close)


def test_if_the_machine_outlives_its_deadline_the_training_still_stops_at_one_step(
    shared_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step may take longer than the deadline. Then nothing more is saved, and nobody gives up another rank."""
    caplog.set_level(logging.WARNING)
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path)
        with PreemptionGuard(manager, deadline_s=0.1) as guard:
            if dist.get_rank() == 1:
                signal.raise_signal(signal.SIGTERM)
            while guard.is_requested and time.monotonic() < guard._signals.first.at + 0.2:
                pass
            dist.barrier()
            manager.save(1)
            with everywhere():
                assert guard.should_stop(2)
                assert guard.stopped == Stopped(2, "SIGTERM on rank 1", None)
        assert steps_in(shared_path) == [1]
        if dist.get_rank() == 0:
            assert "step 2 is not saved, so the newest complete step remains: no time is left" in caplog.text
        error_of(manager.close)


def test_a_file_stops_the_training_and_is_gone_afterwards(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LOOK_S", 0.01)
    path = shared_path / "stop"

    def touch(step: int) -> None:
        if step == 2 and dist.get_rank() == 1:
            path.touch()

    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path / "root")
        guard = PreemptionGuard(manager, signals=(), trigger_file=path, deadline_s=60.0)
        last = run(training, guard, {}, saves=touch)
        with everywhere():
            assert guard.stopped == Stopped(last, f"the file {path} on rank 0", "durable")
            assert not path.exists() or dist.get_rank() != 0
        manager.close()
        assert steps_in(shared_path / "root") == [last]


@pytest.mark.parametrize(("drain_s", "saved"), [(0.0, "durable"), (1000.0, "on the nodes")])
def test_with_a_fast_tier_the_step_is_made_as_safe_as_there_is_time(
    drain_s: float, saved: str, shared_path: Path
) -> None:
    fast = FastTier(shared_path / "node", replicas=0, durable_every=100)
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path / "root", fast=fast, async_save=True)
        manager.save(0).wait()
        manager._destination._fast.drains._took.append(drain_s)  # type: ignore[attr-defined]
        guard = PreemptionGuard(manager, deadline_s=60.0)
        last = run(training, guard, {1: 1}, saves=lambda step: manager.save(step).wait())
        with everywhere():
            assert guard.stopped == Stopped(last, "SIGTERM on rank 1", saved)
        manager.close()
        assert steps_in(shared_path / "root") == ([last] if saved == "durable" else [])
        assert last in steps_in(shared_path / "node")


def test_the_training_stops_before_its_time_ends(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path)
        guard = PreemptionGuard(manager, training_ends_in_s=60.5, save_takes_s=1.0)
        with guard:
            train(training, 0, 1)
            with everywhere():
                assert not guard.should_stop(1)
        guard = PreemptionGuard(manager, training_ends_in_s=40.0)  # a save of unknown length may take a minute
        last = run(training, guard, {}, first=1)
        reasons = gather(guard.stopped and guard.stopped.reason)
        with everywhere():
            assert "the end of the training's time in " in reasons[0]
            assert "(training_ends_in_s)" in reasons[0]
            assert reasons[0] == reasons[1]
        manager.close()
        assert steps_in(shared_path) == [last]
        assert PreemptionGuard(manager, training_ends_in_s=math.inf).stopped is None


def test_what_is_no_use_is_refused_on_all_ranks(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path)
        guard = PreemptionGuard(manager)
        with everywhere(), pytest.raises(InvalidStateError, match="not entered"):
            guard.should_stop(1)
        with guard:
            messages = raised_everywhere(AgreementError, error_of(lambda: guard.should_stop(dist.get_rank())))
            assert "should_stop" in messages[0]
        with everywhere(), pytest.raises(InvalidStateError, match="make a new one"):
            guard.__enter__()
        messages = raised_everywhere(InvalidArgumentError, error_of(PreemptionGuard(manager, signals=()).__enter__))
        assert "nothing can stop this training" in messages[0]
        with PreemptionGuard(manager, signals=[signal.SIGTERM] if dist.get_rank() == 1 else ()) as guard, everywhere():
            assert not guard.should_stop(1)
        # One rank's loop runs on another thread.
        errors: list[Any] = []

        def enter() -> None:
            with PreemptionGuard(manager) as guard:
                guard.should_stop(1)

        if dist.get_rank() == 1:
            thread = threading.Thread(target=lambda: errors.append(error_of(enter)), name="the loop")
            thread.start()
            thread.join()
        else:
            errors.append(error_of(enter))
        messages = raised_everywhere(InvalidStateError, errors[0])
        assert all("the thread 'the loop' cannot handle SIGTERM, SIGUSR1" in text for text in messages)
        manager.close()


def test_a_last_save_that_fails_leaves_the_step_before(shared_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def no_state() -> dict[str, Any]:
        raise ValueError("no state") if dist.get_rank() == 1 else OSError

    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path)
        manager.save(1)
        guard = PreemptionGuard(manager, extra_state=lambda: {} if dist.get_rank() == 0 else no_state())
        last = run(training, guard, {2: 0}, first=1)
        with everywhere():
            assert guard.stopped == Stopped(last, "SIGTERM on rank 0", None)
            assert "no state" in caplog.text
        manager.close()
        assert steps_in(shared_path) == [1]


def test_megatrons_exit_signal_handler_hears_it_too(shared_path: Path) -> None:
    dist_signal_handler = pytest.importorskip("megatron.training.dist_signal_handler")
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path)
        with dist_signal_handler.DistributedSignalHandler(signal.SIGTERM) as theirs:
            last = run(training, PreemptionGuard(manager), {2: 1})
            heard = gather(theirs._signal_received)  # `signals_received` of 0.19 fails with torch 2.13
            with everywhere():
                assert heard == [False, True]
            # Ours is gone, theirs goes on.
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            heard = gather(theirs._signal_received)
            with everywhere():
                assert heard == [True, True]
        manager.close()
        assert steps_in(shared_path) == [last]


@contextmanager
def failing_saves(monkeypatch: pytest.MonkeyPatch, manager: CheckpointManager, rank: int) -> Iterator[None]:
    """Each save of the manager fails on this rank, after it has begun."""
    capture = RankFiles.capture

    def fail(files: RankFiles, place: Any) -> None:
        capture(files, place)
        if files._context is manager._context and dist.get_rank() == rank:
            monkeypatch.setattr(files, "write", lambda *_, **__: 1 / 0)

    with monkeypatch.context() as patch:
        patch.setattr(RankFiles, "capture", fail)
        yield


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=FULL)])
def test_all_roles_are_saved_and_the_worst_of_them_counts(
    is_async: bool, shared_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        actor, critic = roles_of(training, shared_path, async_save=is_async)
        guard = PreemptionGuard([actor, critic], deadline_s=60.0, extra_state={"is": "last"})
        waits: list[float] = []
        last = run(training, guard, {2: 1}, saves=lambda _: waits.append(critic._trainer.agreement.shortened(1000.0)))
        with everywhere():
            assert guard.stopped == Stopped(last, "SIGTERM on rank 1", "durable")
            assert (waits[-1] < 60.0) == (dist.get_rank() == 1), "the signal limits the waits of all roles"
            assert actor.load().extra_state == {"is": "last"}
            assert critic.load().step == last
        assert steps_in(shared_path) == [last]

        def save_both(step: int) -> Any:
            return (critic.save(step), actor.save(step))[1]

        for saves in (None, save_both) if is_async else (None,):
            guard = PreemptionGuard([actor, critic], deadline_s=60.0, save=saves)
            with failing_saves(monkeypatch, critic, rank=1):
                stopped_at = run(training, guard, {last + 1: 1}, first=last)
            with everywhere():
                assert guard.stopped == Stopped(stopped_at, "SIGTERM on rank 1", None)
                assert f"step {stopped_at} could not be saved before the machine goes" in caplog.text
                assert "ZeroDivisionError" in caplog.text
            assert steps_in(shared_path) == [last]
            caplog.clear()
        for manager in (actor, critic):
            with everywhere():
                assert manager._trainer.agreement.shortened(1000.0) < 60.0, "no wait outlasts the deadline"
            error_of(manager.close)


def test_a_manager_that_cannot_save_keeps_no_other_from_saving(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any) -> None:
        raise CommitError("there is no room")

    with parallel(DP2):
        training = build(DP2, seed=1)
        actor, critic = roles_of(training, shared_path)
        guard = PreemptionGuard([actor, critic])
        with monkeypatch.context() as patch:
            patch.setattr(actor, "save", refuse)
            last = run(training, guard, {1: 1})
        saved = critic._background.newest_of_step
        with everywhere():
            assert guard.stopped == Stopped(last, "SIGTERM on rank 1", None)
            assert saved is not None
            assert (saved.step, saved.committed) == (last, True)
            assert "there is no room" in caplog.text
        actor.close()
        with PreemptionGuard([actor, critic]) as guard:
            messages = raised_everywhere(InvalidStateError, error_of(lambda: guard.should_stop(last)))
        assert "the manager of actor is closed" in messages[0]
        critic.close()


@pytest.mark.parametrize(("drain_s", "saved"), [(0.0, "durable"), (500.0, "on the nodes")])
def test_with_a_fast_tier_all_roles_make_the_same_kind_of_save(drain_s: float, saved: str, shared_path: Path) -> None:
    fast = FastTier(shared_path / "node", replicas=0, durable_every=100)
    with parallel(DP2):
        training = build(DP2, seed=1)
        managers = roles_of(training, shared_path / "root", fast=fast, async_save=True)
        for manager in managers:
            manager.save(0).wait()
            manager._destination._fast.drains._took.append(drain_s)  # type: ignore[attr-defined]
        guard = PreemptionGuard(managers, deadline_s=900.0)  # it has time for one of them
        last = run(training, guard, {1: 1})
        with everywhere():
            assert guard.stopped == Stopped(last, "SIGTERM on rank 1", saved)
        for manager in managers:
            manager.close()
        assert steps_in(shared_path / "root") == ([last] if saved == "durable" else [])
        assert last in steps_in(shared_path / "node")


def test_a_save_function_need_not_return_handles(shared_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        actor, critic = managers = roles_of(training, shared_path, async_save=True)

        def saved_after(first: int, save: Any, of: Any = managers) -> str | None:
            guard = PreemptionGuard(of, save=save)
            last = run(training, guard, {first + 1: 0}, first=first)
            assert guard.stopped is not None
            assert guard.stopped.step == last
            return guard.stopped.saved

        def save_both(step: int) -> None:
            actor.save(step)
            critic.save(step)

        saved = saved_after(0, save_both)
        with everywhere():
            assert saved == "durable"
        assert steps_in(shared_path) == [1]
        saved = saved_after(1, lambda step: [critic.save(step, roles=("critic",))])
        with everywhere():
            assert saved == "durable", "these are all saves"
        missing = {"actor and critic": lambda step: None, "critic": actor.save}
        for first, (roles, save) in enumerate(missing.items(), 2):
            saved = saved_after(first, save)
            with everywhere():
                assert saved is None
                assert f"has not saved with the manager of {roles}: " in caplog.text
        saved = saved_after(4, lambda step: [critic.save(step), actor.save(step)], of=actor)
        with everywhere():
            assert saved == "durable"
            assert "has saved with 2 managers, but the guard has 1" in caplog.text
        saved = saved_after(5, save_both, of=critic)
        with everywhere():
            assert saved == "durable"

        def fail_afterwards(step: int) -> None:
            save_both(step)
            raise CommitError("the save's listener has failed")

        saved = saved_after(6, fail_afterwards)
        with everywhere():
            assert saved == "durable", "both are committed"
            assert "raised an error, but the step is saved: the save's listener has failed" in caplog.text
        for manager in managers:
            manager.close()


def test_managers_that_do_not_fit_together_are_refused(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        actor = manager_of(training, shared_path / "root")
        critic = manager_of(training, shared_path / "root", "critic", fast=FastTier(shared_path / "node", replicas=0))
        with everywhere():
            with pytest.raises(InvalidArgumentError, match="actor saves to the root, critic saves to the nodes and"):
                PreemptionGuard([actor, critic])
            with pytest.raises(InvalidArgumentError, match="only one for each role"):
                PreemptionGuard([actor, actor])
            with pytest.raises(InvalidArgumentError, match="at least one manager"):
                PreemptionGuard([])
            with pytest.raises(InvalidTypeError, match="has a str"):
                PreemptionGuard([actor, "critic"])  # type: ignore[list-item]
        actor.close()
        critic.close()
