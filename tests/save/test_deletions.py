"""Old steps are deleted beside the next save, and never a step that a save needs."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.save.root_commit import OldSteps
from mcore_ckpt.steps.listing import complete_steps
from tests.support.unsharded_model import Model
from tests.support.waiting import LONG_S, wait_for


class Deletions:
    """Holds up each deletion of old steps until the test lets it go on. They are numbered from 1, as the saves are."""

    def __init__(self, delete: Callable[..., Any]) -> None:
        self._delete = delete
        self.passes = threading.Semaphore(0)
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.at_a_time = self.most_at_a_time = 0

    def __call__(self, old: OldSteps) -> None:
        number = len(self.begun) + 1
        self.begun.append(number)
        self.at_a_time += 1
        self.most_at_a_time = max(self.most_at_a_time, self.at_a_time)
        assert self.passes.acquire(timeout=LONG_S)
        try:
            self._delete(old)
        finally:
            self.at_a_time -= 1
        self.ended.append(number)

    def let(self, count: int = 1000) -> None:
        for _ in range(count):
            self.passes.release()


@pytest.fixture
def deletions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deletions]:
    held = Deletions(OldSteps.delete)
    monkeypatch.setattr(OldSteps, "delete", lambda old: held(old))
    yield held
    held.let()


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def manager(request: pytest.FixtureRequest, deletions: Deletions, tmp_path: Path) -> Iterator[CheckpointManager]:
    config = CheckpointConfig(
        save_contents=("model",), load_contents=("model",), async_save=request.param, max_to_keep=1
    )
    made = CheckpointManager(tmp_path, Model(), config=config)
    yield made
    deletions.let()
    made.close()


def steps_below(root: Path) -> list[int]:
    return [status.step for status in complete_steps(root)]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_save_does_not_wait_for_the_deletions_of_the_last_ones(
    manager: CheckpointManager, deletions: Deletions
) -> None:
    for step in (1, 2, 3):
        manager.save(step).wait()
    wait_for(lambda: deletions.begun == [1])
    assert steps_below(manager.root) == [1, 2, 3], "three saves are committed, and nothing is deleted yet"
    deletions.let(1)
    wait_for(lambda: deletions.begun == [1, 2])
    assert steps_below(manager.root) == [1, 2, 3], "nothing was too old when step 1 was committed"
    deletions.let(1)
    wait_for(lambda: deletions.begun == [1, 2, 3])
    assert steps_below(manager.root) == [2, 3]
    deletions.let()
    manager.wait()
    assert (deletions.ended, deletions.most_at_a_time) == ([1, 2, 3], 1), "in order, and one at a time"
    assert steps_below(manager.root) == [3]


@pytest.mark.parametrize("how", ["wait", "close", "load"])
def test_wait_close_and_load_wait_for_deletions(how: str, manager: CheckpointManager, deletions: Deletions) -> None:
    for step in (1, 2):
        manager.save(step).wait()
    waiting = in_thread(getattr(manager, how))
    waiting.join(0.2)
    assert waiting.is_alive()
    deletions.let()
    waiting.join(LONG_S)
    assert not waiting.is_alive()
    assert steps_below(manager.root) == [2]


def test_a_save_of_a_step_that_may_be_deleted_waits(manager: CheckpointManager, deletions: Deletions) -> None:
    """Step 1 is being deleted. A save into its folder would be moved away with it."""
    manager.save(1).wait()
    manager.save(2).wait()
    done = threading.Event()
    saving = in_thread(lambda: (manager.save(1), done.set()))
    saving.join(0.2)
    assert not done.is_set()
    deletions.let(2)
    saving.join(LONG_S)
    assert done.is_set()
    deletions.let()
    manager.wait()
    assert steps_below(manager.root) == [1], "step 1 was saved last"


def test_a_save_of_another_step_waits_for_no_deletion_even_if_the_step_is_there(
    manager: CheckpointManager, deletions: Deletions
) -> None:
    """Another role has saved the step before. The last save before the machine goes has no time for a deletion."""
    manager.save(1).wait()
    manager.save(2).wait()
    file_names.step_dir(manager.root, 3).mkdir()
    done = threading.Event()
    saving = in_thread(lambda: (manager.save(3).wait(), done.set()))
    saving.join(LONG_S)
    assert done.is_set()
    assert not deletions.ended


def test_a_deletion_follows_the_policy_of_its_own_save(manager: CheckpointManager, deletions: Deletions) -> None:
    """A save with a generous policy keeps its steps, although an earlier deletion with a strict one ends later."""
    manager.save(1).wait()
    manager.save(2).wait()
    manager.save(3, max_to_keep=5).wait()
    deletions.let()
    manager.wait()
    assert steps_below(manager.root) == [2, 3]


def test_a_deletion_that_fails_does_not_end_the_later_ones(
    manager: CheckpointManager, deletions: Deletions, caplog: pytest.LogCaptureFixture
) -> None:
    delete, failing = deletions._delete, [True]

    def fail_once(*arguments: Any) -> None:
        if failing:
            failing.pop()
            raise KeyError("should not happen")
        delete(*arguments)

    deletions._delete = fail_once
    for step in (1, 2, 3):
        manager.save(step).wait()
    deletions.let()
    manager.wait()
    assert steps_below(manager.root) == [3]
    assert "continues after an unexpected error" in caplog.text
