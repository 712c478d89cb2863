"""Random sequences of saves, metrics, pins, kills and rollbacks: what is on disk is what a model of the rules says."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mcore_ckpt import pin, set_metrics, unpin
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.steps import commit, leftovers, retention
from mcore_ckpt.steps.branches import Position
from mcore_ckpt.steps.listing import complete_steps, list_steps
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps
from tests.support.checkpoints import ROLE, Crash, dead_owner, own, remains
from tests.support.small_steps import FILES, save_small

BEGAN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


# -- the model of the rules ---------------------------------------------------------------------------------


@dataclass
class Kept:
    """A step that is on disk."""

    path: tuple[int, ...]  # the saves that led to it, its own last: a save's number is how many were before it
    at_s: float
    metrics: dict[str, float]
    pinned: bool = False
    has_optimizer: bool = True


@dataclass
class Rules:
    """Which steps stay, and which of them keep their optimizer."""

    policy: PreservationPolicy
    steps: dict[int, Kept] = field(default_factory=dict)

    def branch(self) -> set[int]:
        """The steps that led to the last save, itself included."""
        last = max((each.path for each in self.steps.values()), key=lambda path: path[-1], default=())
        return {step for step, each in self.steps.items() if each.path[-1] in last}

    def first_to_last(self) -> list[int]:
        branch = self.branch()
        return sorted(self.steps, key=lambda step: (step in branch, self.steps[step].path[-1]))

    def stay(self, saved: int, now_s: float) -> set[int]:
        policy, steps = self.policy, self.steps
        if policy.max_to_keep is None:
            return set(steps)
        found = {saved, *self.first_to_last()[-policy.max_to_keep :]}
        found |= {step for step in steps if policy.keep_every and step % policy.keep_every == 0}
        found |= {step for step, each in steps.items() if policy.keep_for and now_s - each.at_s < policy.keep_for}
        found |= {step for step, each in steps.items() if each.pinned}
        for metric, count, better in policy.keep_best:
            sign = 1 if better == "max" else -1
            having = [
                (sign * each.metrics[metric], each.path[-1], step)
                for step, each in steps.items()
                if metric in each.metrics and step in self.branch()
            ]
            found |= {step for *_, step in sorted(having)[-count:]}
        return found

    def lose_optimizer(self, saved: int) -> set[int]:
        count = self.policy.optimizer_for_last
        old = set() if count is None else set(self.first_to_last()[:-count]) - {saved}
        return {step for step in old if not self.steps[step].pinned}

    def retain(self, saved: int, now_s: float) -> None:
        lose, stay = self.lose_optimizer(saved), self.stay(saved, now_s)
        for step in set(self.steps) - stay:
            del self.steps[step]
        for step in lose & set(self.steps):
            self.steps[step].has_optimizer = False


# -- the root -----------------------------------------------------------------------------------------------


class Root:
    """A root with small checkpoints, its trainer, and the model of what it should hold."""

    def __init__(self, path: Path, policy: PreservationPolicy, dead_pid: int) -> None:
        self.path, self.dead_pid, self.rules = path, dead_pid, Rules(policy)
        self.position, self.branch, self.saves, self.now_s = Position(), (), 0, 0.0
        self.at = 0

    def save(self, step: int, metrics: dict[str, float], death: tuple[str, int] | None) -> None:
        """Saves a step and deletes old ones, as a trainer does. It may die at any moment."""
        before = {number: each.path for number, each in self.rules.steps.items()}
        with suppress(Crash):
            with dying("commit", death):
                self._commit(step, metrics)
            self._committed(step, metrics)
            with dying("retention", death):
                delete_old_steps(self.path, self.rules.policy, step)
            self.rules.retain(step, self.now_s)
            return
        if before.get(step) == getattr(self.rules.steps.get(step), "path", None) and self._is_in_place(step):
            self._committed(step, metrics)
        self._take_what_is_left(step)
        self.restart(self.rules.first_to_last()[-1] if self.rules.steps else None)

    def _commit(self, step: int, metrics: dict[str, float]) -> None:
        self.attempt, self.next = f"{self.saves:032x}", self.position.next()
        created = (BEGAN + datetime.timedelta(seconds=self.now_s)).isoformat(timespec="seconds")
        save_small(self.path, step, attempt=self.attempt, number=self.next, metrics=metrics, created=created)

    def _is_in_place(self, step: int) -> bool:
        found = {status.step: status for status in list_steps(self.path)}.get(step)
        return found is not None and any(head.attempt == self.attempt for head in found.heads)

    def _committed(self, step: int, metrics: dict[str, float]) -> None:
        self.position = self.position.after(self.next, self.attempt)
        self.branch = (*self.branch, self.saves)
        is_pinned = step in self.rules.steps and self.rules.steps[step].pinned
        self.rules.steps[step] = Kept(self.branch, self.now_s, dict(metrics), is_pinned)
        self.saves, self.at = self.saves + 1, step

    def _take_what_is_left(self, step: int) -> None:
        """After a death, the steps that should go may be there, and those that should lose their optimizer have it."""
        stay, lose = self.rules.stay(step, self.now_s), self.rules.lose_optimizer(step)
        there = self.on_disk()
        assert there.keys() <= self.rules.steps.keys()
        gone = self.rules.steps.keys() - there.keys()
        assert not gone & stay, f"steps {gone & stay} are gone, but should stay"
        for number in gone:
            del self.rules.steps[number]
        for number, kept in self.rules.steps.items():
            assert there[number] in (kept.has_optimizer, False)
            assert there[number] or not kept.has_optimizer or number in lose
            kept.has_optimizer = there[number]

    def restart(self, loads: int | None) -> None:
        """The next trainer of the role starts, and loads a step, or none."""
        for owner in self.path.rglob(file_names.OWNER_FILE):
            own(owner.parent, dead_owner(self.dead_pid))
        leftovers.remove_leftovers(self.path, ROLE, alone=True)
        last = max((status.commit.number for status in list_steps(self.path)), default=0)
        self.position, self.branch, self.at = Position().seen(last, last), (), 0
        self.saves += 1
        if loads is not None:
            manifest = read_manifest(file_names.step_dir(self.path, loads) / ROLE)
            self.position = self.position.at(loads, manifest.commit, manifest.attempt)
            self.branch, self.at = self.rules.steps[loads].path, loads

    def on_disk(self) -> dict[int, bool]:
        """The whole steps, each with whether it has its optimizer. Reads every file that a manifest lists."""
        found = {}
        for status in complete_steps(self.path):
            manifest = read_manifest(status.path / ROLE)
            assert all((status.path / ROLE / file.path).read_text() == manifest.attempt for file in manifest.files)
            found[status.step] = "optimizer" in manifest.contents
            listed = {file.path for file in manifest.files}
            assert listed == {name for name in FILES if found[status.step] or not name.startswith("optim")}
            assert manifest.dropped == (() if found[status.step] else ("optimizer",))
        return found

    def check(self) -> None:
        wanted = {step: each.has_optimizer for step, each in self.rules.steps.items()}
        assert self.on_disk() == wanted
        assert {status.step: dict(status.metrics) for status in list_steps(self.path) if status.committed} == {
            step: each.metrics for step, each in self.rules.steps.items()
        }
        assert {status.step for status in list_steps(self.path) if status.pinned} == {
            step for step, each in self.rules.steps.items() if each.pinned
        }
        for step, has_optimizer in wanted.items():
            assert (file_names.step_dir(self.path, step) / ROLE / "optim").exists() == has_optimizer
        assert not list(self.path.rglob(f".{file_names.MANIFEST_FILE}.*"))
        assert remains(self.path) == []


@contextmanager
def dying(phase: str, death: tuple[str, int] | None) -> Iterator[None]:
    """Ends the process, as far as the disk can tell, after so many calls of a phase that change the disk."""
    if death is None or death[0] != phase:
        yield
        return
    left = [death[1]]

    def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return call(*args, **kwargs)

        return instead

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "rmdir", "unlink", "write"):
            patch.setattr(os, name, mortal(getattr(os, name)))
        # Folders can be exchanged only by a call that Python does not have.
        patch.setattr(commit, "exchange", mortal(commit.exchange))
        yield


METRICS = st.dictionaries(st.sampled_from(["reward", "loss"]), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]))
BEST = st.sampled_from(["reward:1:max", "loss:1:min", ("reward:2:max", "loss:1:min"), ()])
NONE_OR = lambda *numbers: st.sampled_from([None, *numbers])  # noqa: E731
POLICIES = st.builds(PreservationPolicy, st.integers(1, 3), NONE_OR(5), BEST, NONE_OR(60.0), NONE_OR(1, 2))
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(1, 2), METRICS, st.just(None)),
        st.tuples(st.just("save"), st.integers(1, 2), METRICS, st.tuples(st.just("commit"), st.integers(0, 30))),
        st.tuples(st.just("save"), st.integers(1, 2), METRICS, st.tuples(st.just("retention"), st.integers(0, 30))),
        st.tuples(st.just("measure"), st.integers(0, 9), METRICS),
        st.tuples(st.sampled_from(["pin", "unpin", "rollback"]), st.integers(0, 9)),
        st.tuples(st.just("restart")),
        st.tuples(st.just("wait"), st.sampled_from([10.0, 45.0, 100.0])),
    ),
    min_size=6,
    max_size=16,
)


def play(root: Root, event: tuple[Any, ...]) -> None:
    kind, *rest = event
    root.now_s += 1.0
    if kind == "save":
        further, metrics, death = rest
        root.save(root.at + further, metrics, death)
        return
    if kind == "wait":
        root.now_s += rest[0]
        return
    if kind == "restart":
        root.restart(None)
        return
    steps = sorted(root.rules.steps)
    if not steps:
        return
    step = steps[rest[0] % len(steps)]
    kept = root.rules.steps[step]
    if kind == "measure":
        set_metrics(root.path, step, rest[1])
        kept.metrics |= rest[1]
    elif kind == "rollback":
        root.restart(step)
    else:
        {"pin": pin, "unpin": unpin}[kind](root.path, step)
        kept.pinned = kind == "pin"


def saved(*rewards: float) -> list[tuple[Any, ...]]:
    return [("save", 1, {"reward": reward}, None) for reward in rewards]


# Step 2 is the best, but given up.
@example(PreservationPolicy(1, keep_best="reward:1:max"), [*saved(1.0, 2.0), ("rollback", 0), *saved(0.5, 0.0)])  # type: ignore[arg-type]
# Step 3 is as good as step 1, and later.
@example(PreservationPolicy(1, keep_best="reward:1:max"), saved(2.0, 1.0, 2.0, 0.0))  # type: ignore[arg-type]
@example(PreservationPolicy(1, keep_best="reward:1:min"), saved(2.0, 1.0, 2.0, 3.0))  # type: ignore[arg-type]
# After the rollback, step 2 is saved last, and step 4 is given up.
@example(PreservationPolicy(2, optimizer_for_last=1), [*saved(*[0.0] * 4), ("rollback", 0), *saved(0.0)])
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(POLICIES, EVENTS)
def test_what_is_on_disk_is_what_the_rules_say(
    dead_pid: int, policy: PreservationPolicy, events: list[tuple[Any, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        root = Root(Path(folder) / "root", policy, dead_pid)
        patch.setattr(retention, "_now", lambda: BEGAN + datetime.timedelta(seconds=root.now_s))
        for event in events:
            play(root, event)
            root.check()
