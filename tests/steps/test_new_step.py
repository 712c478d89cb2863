"""What a tool may write into a root and over a folder, and that trainers and tools exclude each other."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import encode_manifest
from mcore_ckpt.checkpoint.provenance import Commit, Run
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import InvalidArgumentError, LockedError
from mcore_ckpt.formats.huggingface.kind import is_hf_folder
from mcore_ckpt.ranks.hosts import this_host
from mcore_ckpt.steps import commit, pins, runs, tracker, trainer_lock
from mcore_ckpt.steps.listing import complete_steps
from mcore_ckpt.steps.new_folder import Replaceable, check_may_replace, publish_folder
from mcore_ckpt.steps.new_step import NewStep
from mcore_ckpt.steps.owner import Owner
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.steps.trainer_lock import ToolLocks, TrainerLock
from tests.support.checkpoints import make, read_version, stage
from tests.support.owners import parent

ANOTHER = parent()


def write(root: Path, step: int = 5, version: int = 2, force: bool = False) -> Path:
    """What a tool does: a checkpoint of a version, staged elsewhere, is put in place as the step's."""
    role_dir = file_names.step_dir(root, step) / "actor"
    with NewStep(root, step, ["actor"], force) as new:
        staging = new.open("actor")
        made, _ = stage(root.with_name("elsewhere") / f"global_steps_{step}" / "actor", version)
        commit.remove_folder(staging)
        made.rename(staging)
        manifest = read_manifest(staging)
        (staging / file_names.MANIFEST_FILE).unlink()
        new.write_manifest(manifest)
        new.publish()
    return role_dir


def test_a_new_step_is_committed_and_unlocked(tmp_path: Path) -> None:
    assert read_version(write(tmp_path / "root")) == 2
    assert tracker.read_tracker(tmp_path / "root") == 5
    assert sorted(os.listdir(tmp_path / "root")) == ["global_steps_5", file_names.TRACKER_FILE]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("there", "words", "forcible"),
    [
        ("global_steps_5/actor", "with --force", True),
        ("global_steps_5/actor/model/theirs.pt", "with --force", True),  # no checkpoint, but somebody's files
        ("global_step_5/actor", "which no tool replaces", False),
        ("checkpoint-5/actor", "which no tool replaces", False),
        ("global_step_5/actor/dist_ckpt/theirs.pt", "which no tool replaces", False),
        ("global_steps_5", "which no tool replaces", False),  # flat
        ("global_steps_5/critic", "", True),
        ("global_steps_5/data.pt", "", True),
        ("global_steps_5/.actor.replaced-0123abcd", "with --force", True),
    ],
)
def test_what_is_there(there: str, words: str, forcible: bool, force: bool, tmp_path: Path) -> None:
    root = tmp_path / "root"
    if there.endswith(".pt"):
        (root / there).parent.mkdir(parents=True)
        (root / there).write_text("theirs")
    elif "replaced" in there:
        make(root / "global_steps_5" / "actor", 1)
        os.rename(root / "global_steps_5" / "actor", root / there)
    elif there == "global_steps_5":
        make(root / "made" / "global_steps_5" / "actor", 1)
        os.rename(root / "made" / "global_steps_5" / "actor", root / there)
        (root / "made" / "global_steps_5").rmdir()
    else:
        made, attempt = stage(root / "global_steps_5" / Path(there).name, 1)
        (root / there).parent.mkdir(exist_ok=True)
        commit.publish(made, root / there, attempt)
    before = sorted(root.rglob("*"))
    if words and not (force and forcible):
        with pytest.raises(InvalidArgumentError, match=words):
            write(root, force=force)
        assert sorted(root.rglob("*")) == before
    else:
        assert read_version(write(root, force=force)) == 2


def of_run(role_dir: Path, id: str, number: int) -> None:
    """Makes a checkpoint and lets its manifest say that a run has saved it."""
    make(role_dir, 1)
    manifest = replace(read_manifest(role_dir), run=Run(id), commit=Commit(number, None, ((1, number),)))
    (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))


def test_a_step_below_later_ones_is_not_the_newest(tmp_path: Path) -> None:
    for number, step in enumerate((4, 6), 1):
        of_run(file_names.step_dir(tmp_path, step) / "actor", "a", number)
    write(tmp_path, 5)
    assert tracker.read_tracker(tmp_path) == 6
    assert [status.step for status in complete_steps(tmp_path)] == [4, 5, 6]
    write(tmp_path, 6, force=True)  # the next commit of a training has the number 3
    assert [(status.step, status.commit.number) for status in complete_steps(tmp_path)] == [(4, 1), (5, 1), (6, 2)]


@pytest.mark.parametrize("force", [False, True])
def test_roles_of_two_runs_do_not_come_into_one_step(force: bool, tmp_path: Path) -> None:
    root = tmp_path / "root"
    of_run(root / "global_steps_5" / "critic", "a", 1)
    with pytest.raises(InvalidArgumentError, match=r"critic: belongs to run a, but actor to run b, and no step can"):
        NewStep(root, 5, ["actor"], force, Run("b")).__enter__()
    with NewStep(root, 5, ["actor"], force, Run("a")):
        pass
    # If the root has a run, what is of none belongs to it.
    runs.settle(root, root, [], None, None)
    with pytest.raises(InvalidArgumentError, match="belongs to run a, but actor to the run of this folder"):
        write(root, force=force)
    with NewStep(root, 5, ["critic"], force=True):
        pass
    assert os.listdir(root / "global_steps_5") == ["critic"]


@pytest.mark.parametrize("tracked", ["10", "release"])
def test_the_tracker_of_another_program_stays(tracked: str, tmp_path: Path) -> None:
    (tmp_path / "iter_0000010").mkdir()
    path = tmp_path / file_names.TRACKER_FILE
    path.write_text(tracked)
    with pytest.raises(InvalidArgumentError, match="another program's checkpoints are here"):
        write(tmp_path)
    assert path.read_text() == tracked
    write(tmp_path, force=True)
    assert path.read_text() == "5"


@pytest.mark.parametrize("below", ["", "x", "actor/x"])
def test_no_root_is_made_in_a_step(below: str, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InvalidArgumentError, match="would be deleted with it"):
        write(tmp_path / "global_steps_5" / below, step=6)


def test_a_pin_is_seen_even_if_it_comes_meanwhile(tmp_path: Path) -> None:
    role_dir = write(tmp_path, version=1)
    pins.pin(tmp_path, 5)
    with pytest.raises(InvalidArgumentError, match="is pinned, so no tool"):
        write(tmp_path, force=True)
    pins.unpin(tmp_path, 5)
    with NewStep(tmp_path, 5, ["actor"], force=True) as new:
        new.open("actor")
        pins.pin(tmp_path, 5)
        with pytest.raises(InvalidArgumentError, match="is pinned"):
            new.publish()
    assert read_version(role_dir) == 1
    assert sorted(os.listdir(role_dir.parent)) == [file_names.PINNED_FILE, "actor"]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_living_trainer_of_any_role_excludes_a_tool(role: str, tmp_path: Path) -> None:
    file_names.trainer_file(tmp_path, role).write_text(json.dumps(asdict(ANOTHER)))
    with pytest.raises(LockedError, match=r"is alive. No tool writes here meanwhile"):
        write(tmp_path)
    dead = Owner(this_host(), ANOTHER.pid, ANOTHER.start + 1)
    file_names.trainer_file(tmp_path, role).write_text(json.dumps(asdict(dead)))
    write(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if "trainer" in name]


def test_what_is_being_read_is_not_replaced(tmp_path: Path) -> None:
    role_dir = write(tmp_path, version=1)
    with reading([role_dir]):
        with pytest.raises(LockedError, match="or a training has loaded it and has not saved since"):
            write(tmp_path, force=True)
        write(tmp_path, step=6)
    with NewStep(tmp_path, 5, ["actor"], force=True) as new:
        new.open("actor")
        with reading([role_dir]), pytest.raises(LockedError, match="is being read"):
            new.publish()
    assert read_version(role_dir) == 1
    assert read_version(write(tmp_path, force=True)) == 2


def test_a_tool_excludes_a_trainer_of_its_role_and_no_tool_of_another(tmp_path: Path) -> None:
    with ToolLocks(tmp_path, ["actor"]):
        content = file_names.trainer_file(tmp_path, "actor").read_bytes()
        with ToolLocks(tmp_path, ["critic"]):
            pass
    # The same, as another process sees it.
    record = json.loads(content) | asdict(ANOTHER)
    file_names.trainer_file(tmp_path, "actor").write_text(json.dumps(record))
    with pytest.raises(LockedError, match="It is a tool that writes a step"):
        TrainerLock(tmp_path, "actor").take(0.0)
    with ToolLocks(tmp_path, ["critic"]):
        pass


def test_of_a_trainer_on_another_host_it_waits_for_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer_lock, "TRAINER_LEASE_S", 0.1)
    monkeypatch.setattr(trainer_lock, "_LOOK_S", 0.05)
    owner_file = file_names.trainer_file(tmp_path, "actor")
    owner_file.write_text(json.dumps(asdict(Owner("node7 another-boot pid:[1]", 4321, 99))))
    write(tmp_path)
    assert "for a sign of life of process 4321 on node7" in caplog.text


# -- folders ---------------------------------------------------------------------------------------------------


def hf_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def test_only_a_folder_of_the_same_kind_is_replaced(tmp_path: Path) -> None:
    asked = Replaceable(True, "a HuggingFace model", is_hf_folder)
    with pytest.raises(InvalidArgumentError, match="replace it with --force"):
        check_may_replace(hf_folder(tmp_path / "hf"), Replaceable(False, "a HuggingFace model", is_hf_folder))
    check_may_replace(tmp_path / "hf", asked)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(InvalidArgumentError, match="is not a HuggingFace model"):
        check_may_replace(tmp_path / "home", asked)
    make(tmp_path / "root" / "global_steps_5" / "actor", 1)
    with pytest.raises(InvalidArgumentError, match="is a checkpoint of this package"):
        check_may_replace(hf_folder(tmp_path / "root" / "global_steps_5" / "actor" / "huggingface"), asked)
    pins.pin(tmp_path / "root", 5)
    with pytest.raises(InvalidArgumentError, match="is pinned"):
        check_may_replace(tmp_path / "root" / "global_steps_5", asked)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_replaced_folder_goes_as_a_whole(exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchanges:
        monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    target, attempt = hf_folder(tmp_path / "hf"), commit.new_attempt()
    (target / "model-00002-of-00002.safetensors").write_text("of another division")
    staging = commit.open_staging(target, attempt)
    (staging / "config.json").write_text("new")
    publish_folder(staging, target, attempt, Replaceable(True, "a HuggingFace model", is_hf_folder))
    assert os.listdir(target) == ["config.json"]
    assert os.listdir(tmp_path) == ["hf"]
