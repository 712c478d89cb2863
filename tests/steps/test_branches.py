"""The order of steps: what was committed last wins, under any sequence of saves, rollbacks, restarts and deletions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt import set_metrics
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import ManifestSummary, encode_manifest
from mcore_ckpt.checkpoint.provenance import MOST_RANGES, Commit
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.branches import Position
from mcore_ckpt.steps.choice import abandoned, by_step, choose, newest, oldest_first
from mcore_ckpt.steps.history import RunHistory
from mcore_ckpt.steps.listing import list_steps
from mcore_ckpt.steps.retention import PreservationPolicy, judge
from mcore_ckpt.steps.worth import Lack, Weighed
from tests.support.checkpoints import stage

ROLES = ("actor", "critic")


@dataclass(frozen=True)
class Saved(Weighed):
    """A step as `choice` and `judge` see it."""

    step: int
    commits: tuple[Commit | None, ...]
    lacks: tuple[Lack, ...] = ()
    pinned: bool = False
    declared: frozenset[str] = frozenset({"actor"})
    problems: tuple[str, ...] = ()
    reason: str = ""

    @property
    def committed(self) -> frozenset[str]:
        return frozenset(head.role for head in self.heads)

    @property
    def heads(self) -> list[ManifestSummary]:
        roles = sorted(self.declared)
        return [
            ManifestSummary(self.step, role, (role,), "", "", commit=own)
            for role, own in zip(roles, self.commits, strict=True)
        ]


@dataclass
class Root:
    """A model of a root, of one role, and of the trainings that use it."""

    steps: dict[int, Saved] = field(default_factory=dict)
    history: dict[int, list[int]] = field(default_factory=dict)  # by step: the steps that led to it, itself included
    at: int | None = None
    position: Position = field(default_factory=Position)

    @property
    def last(self) -> int | None:
        """The step of the last commit of all, unless it was deleted."""
        last = max(self.steps.values(), key=lambda saved: (saved.commit.number, saved.step), default=None)
        return None if last is None else last.step

    @property
    def whole(self) -> list[int]:
        return sorted(saved.step for saved in self.steps.values() if saved.is_complete)

    @property
    def loaded(self) -> int | None:
        """The step that a load takes."""
        return next((saved.step for saved in choose(list(self.steps.values()), ["actor"]).steps), None)

    def restart(self, loads: int | None) -> None:
        last = max((saved.commit.number for saved in self.steps.values()), default=0)
        self.position, self.at = Position().seen(last, last), loads
        if loads is not None:
            (commit,) = self.steps[loads].commits
            self.position = self.position.at(loads, commit, str(loads))

    def save(self, step: int, numbered: bool = True) -> None:
        commit = self.position.next() if numbered else None
        before = [] if self.at is None else self.history[self.at]
        self.history[step] = [*(one for one in before if one != step), step]
        self.steps[step] = Saved(step, (commit,))
        self.at = step
        if commit is not None:
            self.position = self.position.after(commit, str(step))


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(0, 3), st.sampled_from([1, 2, 3, None]))
def test_the_last_thing_that_was_committed_wins(data: st.DataObject, old: int, keep: int | None) -> None:
    """Above steps without numbers, whatever retention has deleted meanwhile, and whatever steps have lost files."""
    root = Root()
    for number in range(old):
        root.save(10 * number, numbered=False)
    root.restart(data.draw(st.sampled_from([None, *sorted(root.steps)])))
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["save", "save", "restart and save", "damage"]))
        if what == "restart and save":
            root.restart(data.draw(st.sampled_from([None, *root.whole])))
        if what == "damage" and root.whole:
            damaged = root.steps[data.draw(st.sampled_from([*root.whole, root.last or 0]))]
            root.steps[damaged.step] = replace(damaged, lacks=(Lack("", "a file is gone"),))
        elif what != "damage":
            root.save(data.draw(st.integers(1, 4)) + (-1 if root.at is None else root.at))
            assert root.loaded == root.at
        if root.last is None:
            continue
        branch = root.history[root.last]
        # Of the branch, the last one that is whole. Only if none is, of what was given up.
        assert root.loaded == next((step for step in reversed(branch) if step in root.whole), root.loaded)
        assert root.loaded in {None, *root.whole}
        assert (root.loaded is None) == (not root.whole)
        steps = sorted(root.steps.values(), key=lambda saved: saved.step)
        given_up = abandoned(steps)
        assert root.last not in given_up
        kept = [decision.status for decision in judge(steps, PreservationPolicy(keep)) if decision.stays]
        if keep is not None:
            # Those of the branch count first, and as many as there are. What lacks files does not count.
            on_branch = [step for step in branch if step in root.whole and step not in given_up]
            assert len([saved for saved in kept if saved.is_complete]) == min(keep, len(root.whole))
            assert {saved.step for saved in kept} >= set(on_branch[-keep:])
        loaded = root.loaded
        root.steps = {saved.step: saved for saved in kept}
        assert root.loaded == loaded


def test_a_rollback_abandons_what_came_after() -> None:
    root = Root()
    root.restart(None)
    for step in (80, 90, 100):
        root.save(step)
    root.restart(90)
    root.save(95)
    steps = list(root.steps.values())
    assert [each.step for each in oldest_first(steps)] == [100, 80, 90, 95]
    assert abandoned(steps) == {100}
    assert root.steps[95].commits == (Commit(4, "90", ((1, 2), (4, 4))),)
    root.save(100)
    assert not abandoned(list(root.steps.values()))


def test_what_retention_has_deleted_breaks_no_branch() -> None:
    """A milestone far back is not abandoned, although the commits between it and the newest one are gone."""
    root = Root()
    root.restart(None)
    for step in range(100, 400, 10):
        root.save(step)
    root.steps = {step: root.steps[step] for step in (100, 390)}
    assert abandoned(list(root.steps.values())) == frozenset()


def test_a_fresh_start_abandons_all() -> None:
    root = Root()
    root.restart(None)
    root.save(100)
    root.restart(None)
    root.save(5)
    assert [each.step for each in oldest_first(list(root.steps.values()))] == [100, 5]
    assert root.steps[5].commits == (Commit(2, None, ((2, 2),)),)


@pytest.mark.parametrize("shared", [False, True])
def test_a_commit_of_one_role_gives_up_nothing_of_another(tmp_path: Path, shared: bool) -> None:
    """The roles save at different steps, or one of them has warmed up alone before their first step together."""
    histories = {role: RunHistory(tmp_path, role, tmp_path) for role in ROLES}
    for step in (10, 20):
        commit_role(tmp_path / f"global_step_{step}", step, "critic", histories["critic"], ("critic",))
    commit_role(tmp_path / "global_step_30", 30, "actor", histories["actor"], ROLES if shared else ("actor",))
    assert not abandoned(list_steps(tmp_path))
    best = PreservationPolicy(1, keep_best=("reward", 1, "max"))
    set_metrics(tmp_path, 10, {"reward": 9.0})
    assert [each.stays for each in judge(list_steps(tmp_path), best, 30)] == [True, True, True]
    # The critic goes back. Only this gives up its step 20, although the actor has committed since.
    (status,) = list_steps(tmp_path, 10)
    histories["critic"].loaded(status.says["critic"], status.role_dir("critic"))
    commit_role(tmp_path / "global_step_15", 15, "critic", histories["critic"], ("critic",))
    assert abandoned(list_steps(tmp_path)) == {20}


def test_a_role_of_plain_files_goes_with_its_step() -> None:
    steps = [
        Saved(10, (Commit(1, None, ((1, 1),)), None), declared=frozenset(ROLES)),
        Saved(20, (Commit(2, None, ((1, 2),)), None), declared=frozenset(ROLES)),
        Saved(15, (Commit(3, None, ((1, 1), (3, 3))), None), declared=frozenset(ROLES)),
    ]
    assert abandoned(steps) == {20}


def test_without_numbers_the_step_decides() -> None:
    steps = [Saved(step, (None,)) for step in (3, 20, 100)]
    assert [each.step for each in oldest_first(steps[::-1])] == [3, 20, 100]
    assert not abandoned(steps)


def test_an_older_version_that_saves_above_goes_on() -> None:
    """Somebody has gone back to an older version, which knows no numbers, and then on with this one."""
    root = Root()
    root.restart(None)
    for step in (100, 110):
        root.save(step)
    root.save(120, numbered=False)
    assert newest(list(root.steps.values())).step == 120  # type: ignore[union-attr]
    root.restart(120)
    root.save(130)
    assert newest(list(root.steps.values())).step == 130  # type: ignore[union-attr]


def test_roles_of_a_step_share_its_number() -> None:
    actor, critic = Position(), Position()
    first = actor.next()
    assert critic.next(of_step=first.number).number == first.number
    # A save of the same step again gets a new number, also if the other role has not saved it again yet.
    actor, critic = actor.after(first, "a"), critic.after(first, "b")
    again = actor.next(of_step=first.number)
    assert again.number == 2
    assert critic.next(of_step=again.number).number == 2


def test_two_roles_that_commit_at_once_are_ordered_by_their_steps() -> None:
    tied = [Saved(step, (Commit(7, None, ((7, 7),)),)) for step in (30, 20)]
    assert [each.step for each in oldest_first(tied)] == [20, 30]
    assert not abandoned(tied)


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("step", [5, 10, 15, 30, 40])
def test_a_step_of_a_tool_goes_by_its_number(step: int, numbered: bool) -> None:
    root = Root()
    root.restart(None)
    for saved in (10, 20, 30):
        root.save(saved, numbered)
    root.steps[step] = Saved(step, (by_step(step, list(root.steps.values())),))
    assert [each.step for each in oldest_first(list(root.steps.values()))] == sorted(root.steps)
    assert not abandoned(list(root.steps.values()))
    root.restart(30)
    root.save(50)
    assert root.steps[50].commit.number == (4 if numbered else 31)
    assert not abandoned(list(root.steps.values()))


def test_a_step_of_a_tool_is_not_on_a_branch_that_was_given_up() -> None:
    root = Root()
    root.restart(None)
    for step in (10, 20, 30):
        root.save(step)
    root.restart(10)
    root.save(40)
    root.steps[25] = Saved(25, (by_step(25, list(root.steps.values())),))
    assert [each.step for each in oldest_first(list(root.steps.values()))] == [20, 30, 10, 25, 40]
    assert by_step(1, []) is None


def test_a_branch_stays_short() -> None:
    position = Position()
    for number in range(2 * MOST_RANGES):
        commit = position.next()
        position = position.after(commit, str(number)).at(0, Commit(commit.number, None, commit.branch), "x")
        position = position.seen(0, commit.number + 1)  # something else of the role, which was given up
    assert len(position.next().branch) == MOST_RANGES


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_roles_that_look_like_one_step_were_saved_by_one_training(data: st.DataObject) -> None:
    """Two roles commit in any order, and the training dies at any commit and goes back to any complete step."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        saved: dict[tuple[int, str], int] = {}  # which training has saved a role of a step
        for training in range(3):
            histories = {role: RunHistory(root, role, root) for role in ROLES}
            step = load_any(root, histories, data) if training else 0
            if data.draw(st.booleans()):  # one manager has loaded, and another one saves
                loaded, histories = histories, {role: RunHistory(root, role, root) for role in ROLES}
                for role in ROLES:
                    histories[role].go_on_from(loaded[role])
            for _ in range(data.draw(st.integers(0 if training else 1, 3))):
                step += 1
                for role in data.draw(st.sampled_from([ROLES, ROLES[::-1], (*ROLES, "actor")])):
                    commit_role(root / f"global_step_{step}", step, role, histories[role])
                    saved[step, role] = training
                    for each in (each for each in list_steps(root) if each.is_complete):
                        assert len({saved[each.step, role] for role in ROLES}) == 1
                assert newest(list_steps(root)).step == step  # type: ignore[union-attr]
            # The training dies between the roles of its last step.
            role = data.draw(st.sampled_from(ROLES))
            commit_role(root / f"global_step_{step + 1}", step + 1, role, histories[role])
            saved[step + 1, role] = training
            assert newest(list_steps(root)).step == step  # type: ignore[union-attr]


def load_any(root: Path, histories: dict[str, RunHistory], data: st.DataObject) -> int:
    """Goes back to a complete step, most likely to the newest, and returns its number."""
    whole = sorted((each for each in list_steps(root) if each.is_complete), key=lambda each: -each.step)
    at = data.draw(st.sampled_from(whole))
    for head in at.heads:
        histories[head.role].loaded(head, at.role_dir(head.role))
    return at.step


def commit_role(step_path: Path, step: int, role: str, history: RunHistory, roles: tuple[str, ...] = ROLES) -> None:
    staging, attempt = stage(step_path / role, step, roles)
    manifest = history.stamp(read_manifest(staging), step_path / role)
    (staging / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    commit.publish(staging, step_path / role, attempt)
    history.committed(manifest)
