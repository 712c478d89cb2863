"""The last save of one process: what it waits for, and for how long."""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.preemption import PreemptionGuard
from mcore_ckpt.save import drain as drain_module
from mcore_ckpt.steps import complete_steps
from tests.support.unsharded_model import Model
from tests.support.waiting import LONG_S

WORDS = ("model", "extra")
Open = Callable[..., CheckpointManager]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Makes a manager, with a fast tier if `durable_every` is given."""
    managers: list[CheckpointManager] = []

    def make(durable_every: int | None = None, role: str = "actor", **config: Any) -> CheckpointManager:
        if durable_every is not None:
            config["fast"] = FastTier(tmp_path / "node", replicas=0, durable_every=durable_every)
        choices = CheckpointConfig(save_contents=WORDS, load_contents=WORDS, **{"async_save": True, **config})
        managers.append(CheckpointManager(tmp_path / "root", Model(), role=role, config=choices))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


@contextmanager
def stopping(
    manager: CheckpointManager | list[CheckpointManager], step: int, **choices: Any
) -> Iterator[PreemptionGuard]:
    """A guard whose training was stopped at a step, by a signal."""
    choices = {"signals": [signal.SIGUSR1], "training_ends_in_s": math.inf, **choices}
    with PreemptionGuard(manager, **choices) as guard:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert guard.should_stop(step)
        assert guard.stopped is not None
        yield guard


@pytest.fixture
def held_drains(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No step gets to the root until the event is set."""
    gate, copy = threading.Event(), drain_module.copy_checked

    def wait_and_copy(*given: Any) -> Any:
        gate.wait(LONG_S)
        return copy(*given)

    monkeypatch.setattr(drain_module, "copy_checked", wait_and_copy)
    yield gate
    gate.set()


def drains_of(manager: CheckpointManager) -> Any:
    return manager._destination._fast.drains  # type: ignore[attr-defined]


def in_folder(folder: Path) -> list[int]:
    return [status.step for status in complete_steps(folder)]


def test_a_copy_to_the_root_that_takes_too_long_does_not_keep_the_step_from_the_nodes(
    opened: Open, held_drains: threading.Event, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = opened(durable_every=1)
    manager.save(1).wait()
    drains_of(manager)._took.append(43.5)  # of the 55 s that are left, a durable save needs more than 54 s
    with stopping(manager, 2, deadline_s=60.0) as guard:
        assert not held_drains.is_set()
        assert guard.stopped is not None
        assert guard.stopped.saved == "on the nodes"
    assert in_folder(tmp_path / "node") == [1, 2]
    assert "not in the root: an earlier step is still being copied to the root" in caplog.text


def test_before_a_save_of_unknown_length_only_a_part_of_the_time_is_waited(
    opened: Open, held_drains: threading.Event, tmp_path: Path
) -> None:
    manager = opened(durable_every=1)
    manager.save(1).wait()
    manager._background._took.clear()
    with stopping(manager, 2, deadline_s=6.0) as guard:
        assert not held_drains.is_set()
        assert guard.stopped is not None
        assert guard.stopped.saved == "on the nodes"
    assert in_folder(tmp_path / "node") == [1, 2]


def test_a_copy_to_the_root_that_ends_in_time_is_waited_for(
    opened: Open, held_drains: threading.Event, tmp_path: Path
) -> None:
    manager = opened(durable_every=1)
    manager.save(1).wait()
    threading.Timer(0.2, held_drains.set).start()
    with stopping(manager, 2, deadline_s=60.0) as guard:
        assert guard.stopped is not None
        assert guard.stopped.saved == "durable"
    assert 2 in in_folder(tmp_path / "root")


def test_the_copy_of_the_last_step_is_waited_for_until_the_machine_goes(
    opened: Open, held_drains: threading.Event
) -> None:
    """Without `async_save`, `save` itself waits for it."""
    manager = opened(durable_every=1, async_save=False)
    with stopping(manager, 1, deadline_s=3.0) as guard:
        assert not held_drains.is_set()
        assert guard.stopped is not None
        assert guard.stopped.saved == "on the nodes"


def test_the_copy_of_one_role_does_not_keep_the_next_role_from_the_nodes(
    opened: Open, held_drains: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = ("actor", "critic")
    managers = [opened(durable_every=1, role=role, roles=roles, async_save=False) for role in roles]
    critic, left_s = managers[1], []
    save = critic.save

    def note_and_save(*given: Any) -> Any:
        left_s.append(critic._trainer.agreement.shortened(math.inf))
        return save(*given)

    monkeypatch.setattr(critic, "save", note_and_save)
    with stopping(managers, 1, deadline_s=5.0) as guard:
        assert not held_drains.is_set()
        assert guard.stopped is not None
        assert guard.stopped.saved == "on the nodes"
    assert in_folder(tmp_path / "node") == [1]
    assert left_s[0] > 0.0, "the first role's copy has taken all the time"


@pytest.mark.parametrize(("ends_in_s", "stops"), [(300.0, False), (60.0, True)])
def test_before_the_first_copy_to_the_root_its_time_is_reserved(ends_in_s: float, stops: bool, opened: Open) -> None:
    """At the end of its time all nodes go, so a step that is only on them is lost."""
    manager = opened(durable_every=100)
    manager.save(1).wait()
    with PreemptionGuard(manager, signals=(), training_ends_in_s=ends_in_s) as guard:
        assert guard.should_stop(2) is stops


def test_a_save_to_another_folder_is_waited_for(opened: Open, tmp_path: Path) -> None:
    manager, go_on = opened(), threading.Event()
    manager.attach("slow", save=lambda folder: lambda: go_on.wait(LONG_S) and None)
    manager.save(1, path=tmp_path / "exports" / "x")
    manager.detach("slow")
    threading.Timer(0.2, go_on.set).start()
    with stopping(manager, 7) as guard:
        assert guard.stopped is not None
        assert guard.stopped.saved == "durable"
    assert in_folder(tmp_path / "root") == [7]
