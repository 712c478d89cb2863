"""Runs do not mix, and what was committed last wins: with managers, in roots and in stores that several runs use."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt import CheckpointConfig, CheckpointManager, pin
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, encode_manifest
from mcore_ckpt.checkpoint.provenance import Commit, RunParent
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.config import FastTier
from mcore_ckpt.errors import CheckpointNotFoundError, CommitError, InvalidArgumentError, NoRoomError
from mcore_ckpt.integrations.kit.kept import KeptManager
from mcore_ckpt.recover import recover, resumable_steps
from mcore_ckpt.steps import complete_steps, read_tracker
from mcore_ckpt.steps.listing import list_steps
from mcore_ckpt.steps.read_lock import unread
from mcore_ckpt.steps.retention import PreservationPolicy
from mcore_ckpt.steps.runs import read_root_run
from mcore_ckpt.steps.space_watch import SpaceWatch
from mcore_ckpt.steps.tracker import update_tracker
from mcore_ckpt.steps.worth import Worth
from mcore_ckpt.tools.examine.step_list import step_list_of
from mcore_ckpt.tools.maintain.collect import find_steps
from mcore_ckpt.tools.maintain.prune import prune
from tests.support.commits import came_from, is_fork_of


class Model(torch.nn.Module):
    """As much of a megatron model as saving looks at. Its only weight says which save it was."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=1)
        self.weight = torch.nn.Parameter(torch.zeros(4, 4))

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        value = self.weight
        place = {"prepend_axis_num": 0, "global_offset": (0, 0), "replica_id": (0, 0, 0)}
        shapes = {"local_shape": value.shape, "global_shape": value.shape}
        return {"weight": SimpleNamespace(data=value, key="weight", **place, **shapes)}


class Training:
    """A manager and its model."""

    def __init__(self, root: Path, role: str = "actor", **choices: Any) -> None:
        self.model = Model()
        config = CheckpointConfig(save_contents=("model",), load_contents=("model",), **choices)
        self.manager = CheckpointManager(root, self.model, role=role, config=config)
        self.close = self.manager.close

    def save(self, *steps: int, value: float | None = None) -> Training:
        for step in steps:
            with torch.no_grad():
                self.model.weight.fill_(step if value is None else value)
            saved = self.manager.save(step)
            if saved.upload is not None:
                saved.upload.wait(20)
        return self

    @property
    def value(self) -> float:
        return float(self.model.weight[0, 0])


def train(root: Path, *steps: int, load: int | str | Path | None = None, **choices: Any) -> Training:
    """A training that starts, loads if asked to, saves, and dies."""
    with closing(Training(root, **choices)) as training:
        if load is not None:
            recover(training.manager, load)
        return training.save(*steps)


def recovered(root: Path, resume: int | str | Path = "auto", **choices: Any) -> tuple[int | None, float]:
    with closing(Training(root, **choices)) as training:
        return recover(training.manager, resume).step, training.value


def there(root: Path) -> list[int]:
    return sorted(file_names.step_dirs(root))


def manifest_of(root: Path, step: int, role: str = "actor") -> Manifest:
    return read_manifest(file_names.step_dir(root, step) / role)


def forget(root: Path) -> None:
    """Makes of a root what an older version would have written."""
    for path in root.rglob(file_names.MANIFEST_FILE):
        manifest = read_manifest(path.parent)
        path.write_bytes(encode_manifest(replace_all(manifest)))
    (root / file_names.RUN_FILE).unlink(missing_ok=True)


def replace_all(manifest: Manifest) -> Manifest:
    return Manifest(**{**vars(manifest), "run": None, "commit": None})


@pytest.mark.parametrize("is_old", [False, True], ids=["numbered", "of an older version"])
def test_after_a_rollback_a_crash_brings_back_what_was_saved_last(tmp_path: Path, is_old: bool) -> None:
    train(tmp_path, 90, 100)
    if is_old:
        forget(tmp_path)
    with closing(Training(tmp_path, max_to_keep=3)) as training:
        recover(training.manager, 90)
        training.save(95)
    assert recovered(tmp_path) == (95, 95)
    with closing(Training(tmp_path)) as training:
        assert training.manager.latest_step() == 95
        assert training.manager.load().step == 95
    assert read_tracker(tmp_path) == 95
    assert [status.step for status in resumable_steps(tmp_path, ["actor"])] == [95, 90, 100]
    listed = {step.step: (step.newest, step.abandoned) for step in step_list_of(tmp_path).steps}
    assert listed == {90: (False, False), 95: (True, False), 100: (False, True)}
    saved, before = manifest_of(tmp_path, 95), manifest_of(tmp_path, 90)
    assert saved.commit is not None
    assert saved.commit.parent == before.attempt
    # The abandoned number again, on the new branch.
    train(tmp_path, 100, load="auto")
    assert recovered(tmp_path) == (100, 100)
    assert not any(step.abandoned for step in step_list_of(tmp_path).steps)


def lose_a_file(root: Path, step: int) -> None:
    next(root.glob(f"global_steps_{step}/**/*.pt")).unlink()


def test_a_lost_file_does_not_bring_back_what_was_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remote = f"file://{tmp_path}/store"
    root = tmp_path / "root"
    train(root, 90, 100, remote=remote)
    train(root, 95, load=90, remote=remote)
    (copy,) = (tmp_path / "store" / "global_steps_95" / "actor").iterdir()
    next(copy.rglob("*.pt")).unlink()
    # In a store alone, as on a new disk; then in the root, too.
    assert recovered(tmp_path / "root", remote=remote) == (95, 95)
    shutil.move(root, tmp_path / "aside")
    assert recovered(root, remote=remote) == (90, 90)
    shutil.rmtree(root, ignore_errors=True)
    shutil.move(tmp_path / "aside", root)
    lose_a_file(root, 95)
    assert recovered(root, remote=remote) == recovered(root) == (90, 90)
    assert "a newer step is not loaded: " in caplog.text
    with closing(Training(root)) as training:
        assert training.manager.latest_step() == training.manager.load().step == 90
    assert update_tracker(root) == update_tracker(root, committed=95) == 90
    assert {step.step for step in step_list_of(root).steps if step.newest} == {90}
    # The abandoned step is the last resort, and the last one that retention deletes.
    shutil.copytree(root, tmp_path / "copy")
    lose_a_file(tmp_path / "copy", 90)
    for place, kept in ((root, [90, 95]), (tmp_path / "copy", [90, 95, 100])):
        prune(place, PreservationPolicy(max_to_keep=1))
        assert there(place) == kept
    assert recovered(tmp_path / "copy") == (100, 100)


def test_a_step_of_two_branches_is_not_complete(tmp_path: Path) -> None:
    """The actor has gone back and saved a step again, and the job died before the critic did."""
    root, choices = tmp_path / "root", {"roles": ("actor", "critic"), "remote": f"file://{tmp_path}/store"}

    def job(resume: int | str, *saves: str, steps: tuple[int, ...] = (100,)) -> int | None:
        with ExitStack() as stack:
            trainings = [stack.enter_context(closing(Training(root, role, **choices))) for role in choices["roles"]]
            found = recover([training.manager for training in trainings], resume).step
            for training in trainings:
                training.save(*(steps if training.manager.role in saves else ()))
        return found

    job("off", "actor", "critic", steps=(90, 100))
    job(90, "actor")
    (mixed,) = list_steps(root, 100)
    assert (mixed.worth, mixed.missing) == (Worth.PARTIAL, {"critic"})
    assert "not committed again by critic, which is of a branch that was given up" in mixed.reason
    shutil.move(root, tmp_path / "aside")
    assert job("auto") == 90  # of the store
    shutil.rmtree(root, ignore_errors=True)
    shutil.move(tmp_path / "aside", root)
    assert job("auto", "critic") == 90
    assert job("auto") == 90  # because the actor's is of the job before
    assert job("auto", "actor", "critic") == 90
    assert job("auto") == 100
    # It goes like any other old step.
    job(90, "actor")
    job(90, "actor", "critic", steps=(110, 120))
    prune(root, PreservationPolicy(max_to_keep=2))
    assert there(root) == [110, 120]


def test_the_commit_of_one_role_gives_up_the_steps_of_both(tmp_path: Path) -> None:
    roles = ("actor", "critic")
    for steps, loads, who in (((90, 100, 110), None, roles), ((95,), 90, ("actor",))):
        with ExitStack() as stack:
            trainings = [stack.enter_context(closing(Training(tmp_path, role, roles=roles))) for role in roles]
            recover([training.manager for training in trainings], loads or "off")
            for training in trainings:
                training.save(*(steps if training.manager.role in who else ()))
    assert [status.step for status in resumable_steps(tmp_path, roles)] == [90, 110, 100]
    assert resumable_steps(tmp_path, ["critic"])[0].step == 110  # it has given up nothing


@pytest.mark.parametrize("loads", [90, None], ids=["rollback", "fresh start"])
def test_the_new_branch_keeps_as_many_steps_as_asked_for(tmp_path: Path, loads: int | None) -> None:
    train(tmp_path, 90, 100, max_to_keep=2)
    train(tmp_path, 93, 95, load=loads, max_to_keep=2)
    assert there(tmp_path) == [93, 95]
    assert recovered(tmp_path) == (95, 95)


def test_a_manager_goes_on_from_what_another_one_has_loaded(tmp_path: Path) -> None:
    """The loops of frameworks load with one manager, and save with others."""
    first, second = tmp_path / "first", tmp_path / "second"
    trainer = {"model": [Model()], "optimizer": None}

    def live(*saves: tuple[Path, int], load: Path | None = None, step: int | None = None, **choices: Any) -> None:
        kept = KeptManager()
        config = CheckpointConfig(save_contents=("model",), load_contents=("model",), **choices)
        if load is not None:
            with kept.loader(load, trainer, config) as loader:
                loader.load(step=step)
        for root, saved in saves:
            kept.get(root, trainer, config).save(saved)
        kept.close()

    def at(root: Path, step: int) -> Path:
        return file_names.step_dir(root, step) / "actor"

    train(first, 90, 100)
    live((first, 110), load=first)
    assert came_from(at(first, 110), at(first, 100))
    live((first, 95), load=first, step=90, max_to_keep=2)
    assert came_from(at(first, 95), at(first, 90))
    assert there(first) == [90, 95]
    assert recovered(first)[0] == 95
    # A run that begins with a step of another one. What it saves elsewhere in between does not take it back.
    live((second, 96), (first, 97), (second, 98), load=first)
    assert is_fork_of(at(second, 96), at(first, 95))
    assert came_from(at(first, 97), at(first, 95))
    assert came_from(at(second, 98), at(second, 96))


def test_abandoned_steps_go_when_they_are_too_old_and_pinned_ones_stay(tmp_path: Path) -> None:
    train(tmp_path, 80, 90, 100)
    (file_names.step_dir(tmp_path, 80) / file_names.PINNED_FILE).touch()
    with closing(Training(tmp_path, max_to_keep=3)) as training:
        training.save(5)
        assert there(tmp_path) == [5, 80, 90, 100]
        training.save(6)
        training.manager.wait()
        assert there(tmp_path) == [5, 6, 80, 100]
    prune(tmp_path, PreservationPolicy(max_to_keep=1))
    assert there(tmp_path) == [6, 80]
    assert recovered(tmp_path) == (6, 6)


def test_two_roles_of_a_step_are_one_commit(tmp_path: Path) -> None:
    roles = ("actor", "critic")
    for step, loads in ((10, None), (20, "auto"), (15, 10)):
        with (
            closing(Training(tmp_path, "actor", roles=roles)) as actor,
            closing(Training(tmp_path, "critic", roles=roles)) as critic,
        ):
            if loads is not None:
                recover([actor.manager, critic.manager], loads)
            actor.save(step)
            critic.save(step)
    commits = [[manifest_of(tmp_path, step, role).commit for role in roles] for step in (10, 20, 15)]
    assert [[each.number for each in both if each] for both in commits] == [[1, 1], [2, 2], [3, 3]]
    assert [status.step for status in complete_steps(tmp_path)] == [20, 10, 15]
    assert read_tracker(tmp_path) == 15


def test_the_identity_goes_on_over_restarts_and_moves(tmp_path: Path) -> None:
    train(tmp_path / "a", 1)
    train(tmp_path / "a", 2, load="auto")
    (tmp_path / "a").rename(tmp_path / "b")
    train(tmp_path / "b", 3, load="auto")
    (tmp_path / "b" / file_names.RUN_FILE).unlink()  # as `cp root/*` leaves it out
    train(tmp_path / "b", 4, load="auto")
    ids = {manifest_of(tmp_path / "b", step).run.id for step in (1, 2, 3, 4)}  # type: ignore[union-attr]
    assert len(ids) == 1
    assert recovered(tmp_path / "b") == (4, 4)


@pytest.mark.parametrize("is_whole", [True, False], ids=["the whole root", "one step"])
def test_a_copy_is_a_new_run_with_a_parent(tmp_path: Path, is_whole: bool) -> None:
    train(tmp_path / "a", 1, 2)
    if is_whole:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    else:
        shutil.copytree(tmp_path / "a" / "global_steps_2", tmp_path / "b" / "global_steps_2")
    train(tmp_path / "b", 3, load="auto", max_to_keep=2)
    old, new = manifest_of(tmp_path / "a", 2).run, manifest_of(tmp_path / "b", 3).run
    assert old is not None
    assert new is not None
    assert new.id != old.id
    assert new.parent is not None
    assert (new.parent.run, new.parent.step) == (old.id, 2)
    # What was copied belongs to the new run.
    assert there(tmp_path / "b") == [2, 3]
    train(tmp_path / "b", 4, load="auto", max_to_keep=2)
    assert there(tmp_path / "b") == [3, 4]
    assert recovered(tmp_path / "a") == (2, 2)


def test_a_fork_by_path_is_a_new_run_with_a_parent(tmp_path: Path) -> None:
    train(tmp_path / "a", 1, 2)
    train(tmp_path / "b", 3, load=tmp_path / "a" / "global_steps_1")
    old, new = manifest_of(tmp_path / "a", 1), manifest_of(tmp_path / "b", 3)
    assert old.run is not None
    assert new.run is not None
    assert new.commit is not None
    assert new.run.id != old.run.id
    assert new.run.parent is not None
    assert (new.run.parent.run, new.run.parent.step) == (old.run.id, 1)
    assert new.commit.parent == old.attempt
    train(tmp_path / "b", 4, load="auto")
    assert manifest_of(tmp_path / "b", 4).run == new.run


def test_a_step_of_another_run_in_a_root(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not loaded, not replaced and not deleted, but loads by its path."""
    train(tmp_path / "a", 1, 2, max_to_keep=1)
    train(tmp_path / "b", 7, 8)
    for step in (7, 8):
        shutil.copytree(tmp_path / "b" / f"global_steps_{step}", tmp_path / "a" / f"global_steps_{step}")
    assert recovered(tmp_path / "a") == (2, 2)
    assert f"of {tmp_path / 'b'}" in caplog.text
    assert [status.step for status in resumable_steps(tmp_path / "a", ["actor"])] == [2]
    with pytest.raises(CheckpointNotFoundError, match="belongs to another run"):
        recovered(tmp_path / "a", 8)
    with closing(Training(tmp_path / "a")) as training, pytest.raises(CheckpointNotFoundError, match="another run"):
        training.manager.load(step=8)
    train(tmp_path / "a", 3, 4, load="auto", max_to_keep=1)
    prune(tmp_path / "a", PreservationPolicy(max_to_keep=1))
    assert there(tmp_path / "a") == [4, 7, 8]
    assert read_tracker(tmp_path / "a") == 4
    with closing(Training(tmp_path / "a")) as training:
        with pytest.raises(CommitError, match=r"step 8 is there already, and belongs to another run \(run .* of .*/b"):
            training.save(8)
        assert training.manager.load(path=tmp_path / "a" / "global_steps_8" / "actor").step == 8


@pytest.mark.parametrize("saved_before", [(), (1,)], ids=["new", "used"])
def test_a_save_by_path_replaces_no_step_of_another_run(tmp_path: Path, saved_before: tuple[int, ...]) -> None:
    """Also before the root has a run. What the root has saved there, or a version without runs, is replaced."""
    step_path = tmp_path / "a" / "global_steps_20" / "actor"
    train(tmp_path / "a", 10, 20)
    with closing(Training(tmp_path / "b").save(*saved_before)) as training:
        with pytest.raises(CommitError, match="step 20 is there already, and belongs to another run"):
            training.manager.save(20, path=step_path)
        for _ in range(2):
            training.manager.save(20, path=tmp_path / "best" / "actor")
        forget(tmp_path / "best")
        training.manager.save(20, path=tmp_path / "best" / "actor")
    assert recovered(tmp_path / "a") == (20, 20)


def test_a_copy_of_a_copy_has_the_copy_as_its_parent(tmp_path: Path) -> None:
    train(tmp_path / "a", 1, 2)
    for source, copy, step in (("a", "b", 3), ("b", "c", 4)):
        shutil.copytree(tmp_path / source, tmp_path / copy)
        train(tmp_path / copy, step, load="auto")
    known, new = read_root_run(tmp_path / "b"), manifest_of(tmp_path / "c", 4).run
    assert known is not None
    assert new is not None
    assert new.parent == RunParent(known.run.id, 3)
    for name in ("a", "b"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "c" / file_names.RUN_FILE).unlink()
    train(tmp_path / "c", 5, load="auto")
    assert [status.step for status in resumable_steps(tmp_path / "c", ["actor"])] == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("where", ["in the root", "elsewhere", "in a store"])
def test_a_named_step_of_another_run_is_a_parent(tmp_path: Path, where: str) -> None:
    """Its numbers say nothing in this root, wherever it lies."""
    remote = f"file://{tmp_path}/store" if where == "in a store" else None
    train(tmp_path / "b", 7, 8, remote=remote)
    other = manifest_of(tmp_path / "b", 8)
    train(tmp_path / "a", 1, 2, 3)
    step_path = (tmp_path / ("a" if where == "in the root" else "b")) / "global_steps_8"
    if where == "in the root":
        shutil.copytree(tmp_path / "b" / "global_steps_8", step_path)
    with closing(Training(tmp_path / "a", remote=remote)) as training:
        if where == "in a store":
            training.manager.load(step=8)
        else:
            training.manager.load(path=step_path / "actor")
        assert training.value == 8
        training.manager.save(9)
    saved = manifest_of(tmp_path / "a", 9)
    assert saved.run is not None
    assert other.run is not None
    assert saved.run.parent == RunParent(other.run.id, 8)
    assert saved.commit == Commit(4, other.attempt, ((4, 4),))
    assert [step.step for step in step_list_of(tmp_path / "a").steps if step.abandoned] == [1, 2, 3]


def test_a_new_root_does_not_become_the_run_of_a_store(tmp_path: Path) -> None:
    """If it begins with one of its steps, which was asked for by its number."""
    remote = f"file://{tmp_path}/store"
    train(tmp_path / "b", 7, remote=remote)
    with closing(Training(tmp_path / "a", remote=remote)) as training:
        training.manager.load(step=7)
        training.manager.save(8)
    old, new = manifest_of(tmp_path / "b", 7).run, manifest_of(tmp_path / "a", 8).run
    assert old is not None
    assert new is not None
    assert new.id != old.id
    assert new.parent == RunParent(old.id, 7)


def test_two_runs_and_one_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remote = f"file://{tmp_path}/store"
    train(tmp_path / "a", 10, 20, 30, remote=remote, max_to_keep=2)
    with closing(Training(tmp_path / "b", remote=remote)) as other:
        with pytest.raises(CheckpointNotFoundError, match="belongs to another run"):
            other.manager.load()
        assert other.manager.latest_step() is None
    with closing(Training(tmp_path / "b", remote=remote, max_to_keep=2)) as other:
        handle = other.manager.save(10)
        other.manager.wait()
        assert handle.upload is not None
        assert "belongs to another run" in str(handle.upload.exception)
        assert str(tmp_path / "a") in str(handle.upload.exception)
        other.manager.save(40)
    assert there(tmp_path / "store") == [20, 30]
    assert recovered(tmp_path / "b", remote=remote)[0] == 40
    shutil.rmtree(tmp_path / "a")
    assert recovered(tmp_path / "a", remote=remote) == (30, 30)
    assert f"{tmp_path / 'a'}: has no run yet, so the training goes on as run " in caplog.text
    train(tmp_path / "a", 35, load=20, remote=remote, max_to_keep=2)  # a rollback on a new disk
    shutil.rmtree(tmp_path / "a")
    assert recovered(tmp_path / "a", remote=remote) == (35, 35)
    assert there(tmp_path / "store") == [20, 35]


@pytest.mark.parametrize("durable_every", [None, 1])
def test_two_runs_and_one_folder_of_a_node(
    tmp_path: Path, durable_every: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each has its identity, also if nothing is saved to the roots."""
    fast = FastTier(tmp_path / "node", replicas=0, keep=2, durable_every=durable_every)
    train(tmp_path / "a", 10, 20, fast=fast)
    with closing(Training(tmp_path / "b", fast=fast)) as other:
        assert recover(other.manager).step is None
        assert f"of {tmp_path / 'a'} on" in caplog.text
        other.save(1, 2, 3)
    assert there(tmp_path / "node") == [2, 3, 10, 20]
    assert recovered(tmp_path / "a", fast=fast) == (20, 20)
    train(tmp_path / "b", 4, load="auto", fast=fast)
    train(tmp_path / "a", 30, load="auto", fast=fast)
    assert there(tmp_path / "node") == [3, 4, 20, 30]
    signed = {step: manifest_of(tmp_path / "node", step).run for step in (3, 4, 20, 30)}
    assert signed[3] == signed[4] != signed[20] == signed[30]
    with pytest.raises(InvalidArgumentError, match="the folders have steps of several runs"):
        find_steps([tmp_path / "node"], root=tmp_path / "new")
    for name, steps in (("a", [30, 20]), ("b", [4, 3])):
        assert [found.step for found in find_steps([tmp_path / "node"], root=tmp_path / name)] == steps
    prune(tmp_path / "node", PreservationPolicy(max_to_keep=1))
    assert there(tmp_path / "node") == [4, 30]
    if durable_every is not None:
        with pytest.raises(InvalidArgumentError, match=r"belongs to run .*, but the folders have steps of run"):
            find_steps([tmp_path / "node"], 4, tmp_path / "a")


def test_a_save_keeps_what_another_run_has_staged_in_the_folder_of_a_node(tmp_path: Path) -> None:
    """Another node may have committed it before both trainings died."""
    fast = FastTier(tmp_path / "node", replicas=0)
    train(tmp_path / "a", 10, fast=fast)
    role_dir = file_names.step_dir(tmp_path / "node", 10) / "actor"
    staged = file_names.staging_dir(role_dir, read_manifest(role_dir).attempt)
    shutil.copytree(role_dir, staged)
    train(tmp_path / "b", 1, fast=fast)
    assert staged.exists()
    train(tmp_path / "a", 20, load="auto", fast=fast)
    assert not staged.exists()


def test_commits_that_a_start_does_not_see_are_older(tmp_path: Path) -> None:
    """They are in the store alone, or on nodes that are away."""
    remote = f"file://{tmp_path}/store"
    train(tmp_path / "a", 10, 20, 30, remote=remote)
    shutil.rmtree(tmp_path / "a" / "global_steps_20")
    shutil.rmtree(tmp_path / "a" / "global_steps_30")
    train(tmp_path / "a", 15, load=10, remote=remote)
    assert recovered(tmp_path / "a", remote=remote) == (15, 15)
    train(tmp_path / "a", 5, remote=remote)
    assert recovered(tmp_path / "a", remote=remote) == (5, 5)
    fast = FastTier(tmp_path / "node", replicas=0, keep=3, durable_every=2)
    train(tmp_path / "b", 10, 20, 30, fast=fast)
    train(tmp_path / "b", 21, load=20)
    assert recovered(tmp_path / "b", fast=fast) == (21, 21)
    assert manifest_of(tmp_path / "b", 20).run == manifest_of(tmp_path / "b", 21).run


def test_a_copied_root_fills_a_store_of_its_own(tmp_path: Path) -> None:
    """The copied steps in it are its own as they are in the root, also for a root on a new disk."""
    remote = f"file://{tmp_path}/store"
    train(tmp_path / "a", 1, 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    train(tmp_path / "b", 3, load="auto", remote=remote, max_to_keep=3)
    assert there(tmp_path / "store") == [1, 2, 3]
    listed = {step.step: step.places for step in step_list_of(tmp_path / "b", remote).steps}
    assert listed == dict.fromkeys((1, 2, 3), ("local", "remote"))
    shutil.rmtree(tmp_path / "b")
    train(tmp_path / "b", 4, load=2, remote=remote, max_to_keep=2)
    assert there(tmp_path / "store") == [2, 4]
    (tmp_path / "store" / file_names.RUN_FILE).unlink()
    train(tmp_path / "b", 5, load="auto", remote=remote, max_to_keep=2)
    assert there(tmp_path / "store") == [4, 5]


def test_a_copy_does_not_take_what_the_original_saves_later(tmp_path: Path) -> None:
    remote = f"file://{tmp_path}/store"
    train(tmp_path / "a", 1, 2, remote=remote)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    train(tmp_path / "b", 3, load="auto")
    train(tmp_path / "a", 4, load="auto", remote=remote)
    assert recovered(tmp_path / "b", remote=remote) == (3, 3)
    shutil.copytree(tmp_path / "a" / "global_steps_4", tmp_path / "b" / "global_steps_4")
    assert recovered(tmp_path / "b") == (3, 3)


def test_a_store_without_identity_goes_on(tmp_path: Path) -> None:
    remote = f"file://{tmp_path}/store"
    train(tmp_path / "a", 10, 20, remote=remote)
    forget(tmp_path / "store")
    shutil.rmtree(tmp_path / "a")
    assert recovered(tmp_path / "b", remote=remote) == (20, 20)
    train(tmp_path / "b", 15, load=10, remote=remote, max_to_keep=2)
    assert there(tmp_path / "store") == [10, 15]
    shutil.rmtree(tmp_path / "b")
    assert recovered(tmp_path / "b", remote=remote) == (15, 15)


def test_two_saves_of_a_step_in_a_store_are_told_apart_by_their_numbers(tmp_path: Path) -> None:
    """Also if a clock was set back in between."""
    remote = f"file://{tmp_path}/store"
    train(tmp_path / "a", 10, remote=remote)
    with closing(Training(tmp_path / "a", remote=remote)) as training:
        training.save(10, value=11)
    attempts = sorted((tmp_path / "store" / "global_steps_10" / "actor").iterdir())
    assert len(attempts) == 1  # the newer one is whole, so the older one is gone
    older = attempts[0].with_name("0" * 32)
    shutil.copytree(attempts[0], older)
    record = read_manifest(older)
    commit = Manifest(**{**vars(record), "attempt": "0" * 32, "created": "2099-01-01T00:00:00+00:00"})
    assert commit.commit is not None
    earlier = Manifest(**{**vars(commit), "commit": type(commit.commit)(1, None, ((1, 1),))})
    (older / file_names.MANIFEST_FILE).write_bytes(encode_manifest(earlier))
    shutil.rmtree(tmp_path / "a")
    with closing(Training(tmp_path / "a", remote=remote)) as training:
        training.manager.load()
        assert training.value == 11


def test_a_damaged_identity_is_made_again_from_the_manifests(tmp_path: Path) -> None:
    train(tmp_path, 1)
    before = read_root_run(tmp_path)
    (tmp_path / file_names.RUN_FILE).write_bytes(b"\0" * 40)
    train(tmp_path, 2, load="auto")
    after = read_root_run(tmp_path)
    assert before is not None
    assert after is not None
    assert after.run.id == before.run.id


def test_the_fields_are_in_the_manifest(tmp_path: Path) -> None:
    train(tmp_path, 1, 2)
    record = json.loads((tmp_path / "global_steps_2" / "actor" / file_names.MANIFEST_FILE).read_text())
    assert record["commit"] == {"branch": [[1, 2]], "number": 2, "parent": manifest_of(tmp_path, 1).attempt}
    assert len(record["run"]["id"]) == 32
    assert record["run"]["root"] == str(tmp_path)
    assert record["format_version"] == 1


def test_who_goes_back_behind_a_pinned_step_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The pin belongs to the number: no save is refused for it, because nobody may be there to help."""
    train(tmp_path, 1, 2, 3)
    pin(tmp_path, 2)
    with closing(Training(tmp_path)) as training:
        training.manager._trainer = replace(training.manager._trainer, optimizer=object())  # megatron's need a GPU
        for step, warns in ((3, False), (2, False), (1, True)):
            caplog.clear()
            role_dir = file_names.step_dir(tmp_path, step) / "actor"
            training.manager._loaded(read_manifest(role_dir), role_dir)
            assert ("step 2 is pinned" in caplog.text) == warns
        for step, warns in ((4, False), (2, True)):
            caplog.clear()
            training.save(step, value=7)
            assert ("is pinned, and is saved again" in caplog.text) == warns
    (status,) = list_steps(tmp_path, 2)
    assert status.pinned


def full(*_: object) -> None:
    raise NoRoomError("the disk is full")


def is_free(role_dir: Path) -> bool:
    with unread([role_dir]) as alone:
        return alone


def test_what_a_training_has_loaded_is_held_until_it_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could go back to nothing else. A manager without an optimizer only reads."""
    train(tmp_path, 1, 2)
    role_dir = file_names.step_dir(tmp_path, 2) / "actor"
    with closing(Training(tmp_path)) as training:
        training.manager.load()
        assert is_free(role_dir)
        training.manager._trainer = replace(training.manager._trainer, optimizer=object())  # megatron's need a GPU
        training.manager._loaded(read_manifest(role_dir), role_dir)
        assert not is_free(role_dir)
        with monkeypatch.context() as patch:
            patch.setattr(SpaceWatch, "check", full)
            with pytest.raises(NoRoomError):
                training.save(3)
        assert not is_free(role_dir), "a save that was refused is nothing to go back to"
        training.save(3)
        assert is_free(role_dir)
        training.manager.history.hold()
    assert is_free(file_names.step_dir(tmp_path, 3) / "actor")
    with closing(Training(tmp_path)) as loader, closing(Training(tmp_path)) as training:
        loader.manager.load(step=2)
        loader.manager.history.hold()
        training.manager.history.go_on_from(loader.manager.history)
        loader.close()
        # The copy of an earlier step from the nodes may arrive now, even of one that goes on from the loaded step.
        for earlier in (1, 3):
            training.manager.history.in_root(read_manifest(file_names.step_dir(tmp_path, earlier) / "actor").head)
            assert not is_free(role_dir)
        training.save(4)
        assert is_free(role_dir)
        # A trainer may save to folders that are no steps, as NeMo-RL does.
        training.manager.load(step=2)
        training.manager.history.hold()
        assert not is_free(role_dir)
        training.manager.save(5, path=tmp_path / "elsewhere" / "actor")
        assert is_free(role_dir)
    with closing(Training(tmp_path / "another")) as another:
        another.manager.load(path=role_dir)
        another.manager.history.hold()
        another.save(1)
        assert is_free(role_dir)
