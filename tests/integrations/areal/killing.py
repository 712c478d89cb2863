"""SIGKILL before every change that a save makes to the disk; the next start goes on as if it had not been.

Run by tests/integrations/test_areal.py. Processes are forked from one that has trained as far as the save: what each of
them leaves on the disk is what it had done when it was killed.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.io import _native
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import trainer_lock
from mcore_ckpt.tools.examine.verify import verify
from tests.distributed.snapshot import assert_same
from tests.distributed.training import Layout
from tests.integrations.areal.children import fork, in_child
from tests.integrations.areal.recovering import Trainer, trainer_of
from tests.integrations.areal.simulated import STEPS_PER_EPOCH

# What changes the disk, by names of `os`; native threads write between the calls of theirs.
CHANGES = ("mkdir", "open", "rename", "replace", "rmdir", "unlink", "write")
NATIVE = ("start", "wait", "finish")


# As little as there can be to train: it is done for each point anew.
TINY = Layout(1, num_layers=1, precision="bf16", global_batch=2)


# Who has come back with the same bits everywhere trains on as the other would: now and then it is looked at.
GOES_ON_EVERY = 6


class Disk:
    """Counts what is done to the disk, and kills this process before one of them."""

    def __init__(self, last: int | None) -> None:
        self.done: list[str] = []
        self._last = last

    def change(self, name: str) -> None:
        if len(self.done) == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.done.append(name)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CHANGES:
                patch.setattr(os, name, self._counted(name, getattr(os, name)))
            native = _native.WriteJob
            patch.setattr(_native, "WriteJob", lambda **options: _Job(native(**options), self))
            yield

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                self.change(name)
            return original(*args, **kwargs)

        return counted


class _Job:
    def __init__(self, job: Any, disk: Disk) -> None:
        self._job, self._disk = job, disk

    def __getattr__(self, name: str) -> Any:
        if name in NATIVE:
            self._disk.change(f"native {name}")
        return getattr(self._job, name)


def _sample(done: list[str], every: int | None) -> list[tuple[int, str]]:
    """One in so many, or the first of each kind; and the last ones: those are after the commit."""
    points = list(enumerate(done))
    sample = points[::every] if every else [(done.index(name), name) for name in set(done)]
    return sorted({*sample, *points[-3:]})


def save_at_every_point(root: Path, async_save: bool, every: int | None) -> dict[str, int]:
    """Kills the save of step 2 at every point, or so many, and resumes. Returns how often which unit was found."""
    run, base = root / "run", root / "base"
    shutil.copytree(base, run)
    trainer = trainer_of(run, seed=7, layout=TINY, freq_steps=1, async_save=async_save)
    before = trainer.state()
    trainer.train_step(2, save=False)
    after = trainer.state()

    def save(disk: Disk) -> list[str]:
        with disk.watched():
            trainer.save(2)
            trainer.close()
        return disk.done

    def resume(goes_on: bool = True) -> tuple[int, dict[str, Any], dict[str, Any]]:
        trainer.poison()
        again = Trainer(trainer.engines, run, {}, {"mode": "on", "freq_steps": 1})
        start, found = again.start_step, again.state()
        if goes_on:
            again.train(start + 1)
            again.close()
        return start, found, again.state()

    def begin_anew() -> None:
        # The folders themselves stay: the trainer refuses to save to others than those that it has begun with.
        for folder in (_units(run), run):
            for each in folder.iterdir():
                if not each.is_dir():
                    each.unlink()
                elif not _units(run).is_relative_to(each):
                    shutil.rmtree(each)
        shutil.copytree(base, run, dirs_exist_ok=True)

    status, done = fork(lambda: save(Disk(None)))
    assert status == 0, done
    assert len(done) > 50, done
    status, whole = fork(resume)
    assert status == 0, whole
    start, found, one_later = whole
    assert start == 3
    assert_same(found, after)
    starts: Counter[str] = Counter()
    for number, name in _sample(done, every):
        begin_anew()
        status, _ = fork(lambda number=number: save(Disk(number)))
        # The lock is renewed by the clock, so beside an asynchronous save a run may end before this point.
        is_late = async_save and number >= len(done) - 3
        assert status == -signal.SIGKILL or (is_late and status == 0), (number, name, status)
        goes_on = number % GOES_ON_EVERY == 0
        status, result = fork(functools.partial(resume, goes_on))
        assert status == 0, (number, name, result)
        start, found, ended = result
        # The whole old unit, or the whole new one.
        assert_same(found, {2: before, 3: after}[start])
        starts[str(start)] += 1
        if goes_on:
            assert_same(ended, {2: after, 3: one_later}[start])
            *_, newest = steps.complete_steps(_units(run))
            assert newest.step == start, (number, name)
            assert verify(_units(run)).is_sound, (number, name)
    return dict(starts)


def _units(run: Path) -> Path:
    (folder,) = run.glob("checkpoints/*/*/*/recover_info")
    return folder


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a killed process has written is there, whether it is on the disk or not.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    # Killed with half a lock file written, nobody knows whose it is: it is watched so long.
    monkeypatch.setattr(trainer_lock, "TRAINER_LEASE_S", 1.0)


def first_units(base: Path) -> None:
    trainer = trainer_of(base, layout=TINY, freq_steps=1)
    trainer.train(2)
    trainer.close()


# CI kills before the first change of each kind (sync), or at few points on the way to the commit (async); and at the
# last three points, which are after it.
@pytest.mark.parametrize(
    ("async_save", "every"),
    [
        pytest.param(False, 1, id="sync-all", marks=pytest.mark.full),
        pytest.param(False, 7, id="sync-7th", marks=pytest.mark.full),
        pytest.param(True, 8, id="async-8th", marks=pytest.mark.full),
        pytest.param(False, None, id="sync"),
        pytest.param(True, 50, id="async", marks=pytest.mark.full),
    ],
)
def test_killed_at_every_point_of_a_save(tmp_path: Path, async_save: bool, every: int | None) -> None:
    assert STEPS_PER_EPOCH > 3
    in_child(first_units, tmp_path / "base")
    starts = in_child(save_at_every_point, tmp_path, async_save, every)
    # Both are seen: most changes come before the commit, and some after.
    assert starts["2"] >= (30 // every if every else 5)
    assert starts["3"] >= (max(1, 5 // every) if every else 1)


def first_save_at_every_point(root: Path, every: int) -> None:
    run = root / "run"
    trainer = trainer_of(run, seed=7, layout=TINY, freq_steps=1)
    begun = trainer.state()
    trainer.train_step(0, save=False)
    after = trainer.state()

    def save(disk: Disk) -> list[str]:
        with disk.watched():
            trainer.save(0)
        return disk.done

    def resume() -> tuple[int, dict[str, Any], list[int]]:
        again = trainer_of(run, seed=7, layout=TINY, freq_steps=1)
        start, found = again.start_step, again.state()
        again.train(2)
        return start, found, [status.step for status in steps.complete_steps(_units(run))]

    status, done = fork(lambda: save(Disk(None)))
    assert status == 0, done
    for number, name in _sample(done, every):
        shutil.rmtree(run)
        status, _ = fork(lambda number=number: save(Disk(number)))
        assert status == -signal.SIGKILL, (number, name)
        status, result = fork(resume)
        assert status == 0, (number, name, result)
        start, found, complete = result
        assert_same(found, {0: begun, 1: after}[start])
        assert complete == [1], (number, name)


# Of these, too, CI kills at the first point, at few on the way, and at the last three.
SAMPLES = pytest.mark.parametrize("every", [pytest.param(12, marks=pytest.mark.full), 80])


@SAMPLES
def test_killed_in_the_very_first_save(tmp_path: Path, every: int) -> None:
    """Nothing is there yet to go on from: it begins at the beginning, which is right only as long as nothing was."""
    in_child(first_save_at_every_point, tmp_path, every)


def saved_again_over_what_is_left(root: Path, left: str, every: int) -> None:
    run, base = root / "run", root / "base"
    trainer = trainer_of(base, layout=TINY, freq_steps=1, keep=2)
    trainer.train(3)
    trainer.close()
    newest = _units(base) / "global_steps_2"
    if left == "a damaged unit":
        damaged = newest / "default" / "model" / "mp_rank_00_000" / "model_states.pt"
        damaged.write_bytes(damaged.read_bytes()[:-1])
    else:  # beside the training the critic's save may end first
        shutil.rmtree(newest / "default")
    old = _attempts(newest)
    # As of a process that has ended.
    for path in base.rglob("*.trainer.json"):
        path.unlink()
    shutil.copytree(base, run)

    def save(disk: Disk) -> list[str]:
        again = trainer_of(run, seed=7, layout=TINY, freq_steps=1, keep=2)
        assert again.start_step == 2
        again.train_step(2, save=False)
        with disk.watched():
            again.save(2)
        return disk.done

    status, done = fork(lambda: save(Disk(None)))
    assert status == 0, done
    seen = set()
    for number, name in _sample(done, every):
        shutil.rmtree(run)
        shutil.copytree(base, run)
        status, _ = fork(lambda number=number: save(Disk(number)))
        assert status == -signal.SIGKILL, (number, name)
        found = {status.step: status for status in steps.list_steps(_units(run))}
        assert found[1].is_complete
        if 2 in found and found[2].is_complete:
            attempts = _attempts(found[2].path)
            # Nothing of the one before. That does not count, because it is damaged or not whole.
            assert not set(attempts.values()) & set(old.values()), (number, name)
            seen.add(attempts == old)
    assert seen == {False}


def _attempts(step: Path) -> dict[str, str]:
    return {path.parent.name: read_manifest(path.parent, path.name).attempt for path in step.glob("*/manifest.json")}


@pytest.mark.shows("AReaL", "parts")
@SAMPLES
@pytest.mark.parametrize("left", ["a damaged unit", pytest.param("half a unit", marks=pytest.mark.full)])
def test_a_unit_is_never_of_two_saves(tmp_path: Path, left: str, every: int) -> None:
    in_child(saved_again_over_what_is_left, tmp_path, left, every)
