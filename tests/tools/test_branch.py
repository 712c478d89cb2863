"""`branch`: a copy of one step begins a run of its own, and the folder that it comes from is as it was."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import set_metrics
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, encode_manifest
from mcore_ckpt.checkpoint.provenance import Commit, RunParent
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CommitError,
    InvalidArgumentError,
    LockedError,
    NoRoomError,
)
from mcore_ckpt.io import file_copies
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.keep_best import keep_best_rules
from mcore_ckpt.ranks import single_process_agreement
from mcore_ckpt.recover import recover
from mcore_ckpt.steps import RoleReader, RoleWriter, commit, commit_role, pins, read_tracker
from mcore_ckpt.steps.listing import list_steps
from mcore_ckpt.steps.read_lock import unread
from mcore_ckpt.steps.retention import PreservationPolicy, delete_step, judge
from mcore_ckpt.steps.runs import read_root_run
from mcore_ckpt.tools.examine.step_list import step_list_of
from mcore_ckpt.tools.examine.verify import verify
from mcore_ckpt.tools.maintain import branch as tool
from mcore_ckpt.tools.maintain.branch import branch
from mcore_ckpt.tools.maintain.prune import prune
from tests.doors.test_runs import Training, train
from tests.support.owners import parent
from tests.support.small_steps import save_small


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The steps 1 to 3 of a run."""
    train(tmp_path / "root", 1, 2, 3)
    return tmp_path / "root"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return tmp_path / "new"


def tree(folder: Path) -> dict[str, Any]:
    """Each file below a folder, with its bytes and when it was changed."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def manifest_of(root: Path, step: int, role: str = "actor") -> Manifest:
    return read_manifest(file_names.step_dir(root, step) / role)


def id_of(root: Path) -> str:
    known = read_root_run(root)
    assert known is not None
    return known.run.id


def two_roles(root: Path, step: int = 1) -> None:
    for role in ("actor", "critic"):
        with closing(Training(root, role, roles=("actor", "critic"))) as training:
            training.save(step)


def test_it_is_a_run_of_its_own_whose_parent_is_the_step(root: Path, new: Path) -> None:
    before = tree(root)
    report = branch(root, 2, new)
    assert tree(root) == before
    manifest, source = manifest_of(new, 2), manifest_of(root, 2)
    assert manifest.run == report.run
    assert report.run.parent == RunParent(id_of(root), 2)
    assert report.run.root == str(new)
    assert id_of(new) == report.run.id != id_of(root)
    assert manifest.commit is not None
    assert (manifest.commit.number, manifest.commit.parent) == (1, source.attempt)
    assert manifest.attempt != source.attempt
    assert manifest.files == source.files
    assert read_tracker(new) == 2
    assert verify(new).is_sound
    (step,) = step_list_of(new).steps
    assert (step.state, step.newest, step.run, step.parent) == ("complete", True, report.run.id, report.run.parent)
    assert sorted(os.listdir(new)) == [file_names.RUN_FILE, "global_steps_2", file_names.TRACKER_FILE]


def test_files_are_shared(root: Path, new: Path) -> None:
    (role,) = branch(root, 2, new).roles
    assert role.linked == role.files == len(manifest_of(root, 2).files) > 0
    for file in manifest_of(root, 2).files:
        assert (role.path / file.path).samefile(role.source / file.path)
    assert not (role.path / file_names.MANIFEST_FILE).samefile(role.source / file_names.MANIFEST_FILE)


@pytest.mark.parametrize("how", ["without links", "another file system"])
def test_where_files_cannot_be_shared_they_are_copied(
    how: str, root: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise PermissionError(1, "no links here")

    copied: list[Path] = []
    copy = tool.copy_checked

    def counted(source: Path, target: Path, *rest: Any) -> None:
        copied.append(target)
        copy(source, target, *rest)

    monkeypatch.setattr(tool, "copy_checked", counted)
    if how == "without links":
        monkeypatch.setattr(file_copies.os, "link", refuse)
    else:
        stat = Path.stat

        def elsewhere(path: Path, **named: Any) -> os.stat_result:
            found = stat(path, **named)
            return os.stat_result((*found[:2], found.st_dev + 1, *found[3:10])) if path == new else found

        monkeypatch.setattr(Path, "stat", elsewhere)
    (role,) = branch(root, 2, new).roles
    monkeypatch.undo()
    assert role.linked == 0
    assert bool(copied) == (how == "another file system")
    for file in manifest_of(root, 2).files:
        assert not (role.path / file.path).samefile(role.source / file.path)
    assert verify(new).is_sound


def test_a_training_goes_on_in_it_and_never_touches_the_old_folder(root: Path, new: Path) -> None:
    branch(root, 2, new)
    before = tree(root)
    with closing(Training(new, max_to_keep=1)) as training:
        assert recover(training.manager).step == 2
        assert training.value == 2
        training.save(3, 4)
    assert [status.step for status in list_steps(new)] == [4]
    assert tree(root) == before
    assert id_of(new) == manifest_of(new, 4).run.id  # type: ignore[union-attr]
    commit = manifest_of(new, 4).commit
    assert commit is not None
    assert (commit.number, commit.branch) == (3, ((1, 3),))


def test_the_old_step_may_go(root: Path, new: Path) -> None:
    branch(root, 2, new)
    (status,) = list_steps(root, 2)
    assert delete_step(status) is None
    prune(root, PreservationPolicy(max_to_keep=1))
    assert verify(new).is_sound
    with closing(Training(new)) as training:
        recover(training.manager)
        assert training.value == 2


def test_the_old_step_stays_meanwhile(root: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention skips a step that is being read."""
    link, looks = tool.link_file, []

    def looking(source: Path, target: Path) -> None:
        with unread([file_names.step_dir(root, 2) / "actor"]) as alone:
            looks.append(alone)
        link(source, target)

    monkeypatch.setattr(tool, "link_file", looking)
    branch(root, 2, new)
    assert looks
    assert not any(looks)


def test_a_step_that_is_saved_again_meanwhile(root: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files would be those of the new save, and its manifest that of the old one."""
    check = tool._check_files

    def late(*arguments: Any) -> None:
        check(*arguments)
        with closing(Training(root)) as training:
            training.manager.load(step=1)
            training.save(2, value=7)

    with monkeypatch.context() as patch:
        patch.setattr(tool, "_check_files", late)
        with pytest.raises(CommitError, match="was saved again"):
            branch(root, 2, new)
    assert not new.exists()
    branch(root, 2, new)
    assert verify(new).is_sound


def test_all_roles_come_along(tmp_path: Path, new: Path) -> None:
    two_roles(tmp_path / "root")
    (file_names.step_dir(tmp_path / "root", 1) / "data.pt").write_bytes(b"theirs")
    report = branch(tmp_path / "root", 1, new)
    assert [role.role for role in report.roles] == ["actor", "critic"]
    assert report.beside == ("data.pt",)
    copied = file_names.step_dir(new, 1) / "data.pt"
    assert copied.read_bytes() == b"theirs"
    assert not copied.samefile(file_names.step_dir(tmp_path / "root", 1) / "data.pt"), "its program may change it"
    (status,) = list_steps(new)
    assert status.is_complete
    assert {head.run for head in status.heads} == {report.run}


def test_metrics_that_were_set_later_come_along(tmp_path: Path, new: Path) -> None:
    """Otherwise the rules of retention would decide otherwise in the fork."""
    save_small(tmp_path / "root", 1, metrics={"reward": 0.1, "loss": 2.0})
    set_metrics(tmp_path / "root", 1, {"reward": 0.9})
    branch(tmp_path / "root", 1, new)
    for step, reward in ((2, 0.5), (3, 0.2)):
        save_small(new, step, metrics={"reward": reward}, number=Commit(step, None, ((1, step),)))
    (first, *_) = list_steps(new)
    assert first.metrics == {"reward": 0.9, "loss": 2.0}
    policy = PreservationPolicy(max_to_keep=1, keep_best=keep_best_rules("reward:1:max"))
    assert [each.status.step for each in judge(list_steps(new), policy) if each.stays] == [1, 3]
    set_metrics(new, 1, {"reward": 0.3})
    assert list_steps(tmp_path / "root")[0].metrics["reward"] == 0.9


def test_a_role_of_plain_files_comes_along(root: Path, new: Path) -> None:
    """It may list files of any name: they are not taken for files of another program."""
    role_dir = file_names.step_dir(root, 3) / "driver"

    def write(files: RoleWriter) -> None:
        files.write("data.pt", b"position")
        files.write("queue/unit.pkl", b"prompts")

    commit_role(single_process_agreement("driver", 10), role_dir, 3, ["actor"], write)
    (role_dir / "notes.txt").write_text("of another program")
    branch(root, 3, new)
    copied = RoleReader(file_names.step_dir(new, 3) / "driver")
    assert (copied.read("data.pt", 100), copied.read("queue/unit.pkl", 100)) == (b"position", b"prompts")
    assert (copied.role_dir / "notes.txt").read_text() == "of another program"
    assert verify(new).is_sound


@pytest.mark.parametrize("is_flat", [True, False])
def test_the_folders_keep_their_names(is_flat: bool, tmp_path: Path, new: Path) -> None:
    """verl looks for them by name, and keeps files of its own in them."""
    root = tmp_path / "root"
    role_dir = root / "global_step_2" / ("" if is_flat else "actor")
    with closing(Training(root)) as training:
        training.manager.save(2, path=role_dir).wait()
    (role_dir / "data_0.pt").write_bytes(b"theirs")
    pins.pin(root, 2)
    report = branch(root, 2, new)
    where = new / role_dir.relative_to(root)
    assert [role.path for role in report.roles] == [where]
    assert report.beside == ("data_0.pt" if is_flat else "actor/data_0.pt",)
    assert (where / "data_0.pt").read_bytes() == b"theirs"
    (status,) = list_steps(new)
    assert status.is_complete
    assert not status.pinned
    with closing(Training(new)) as training:
        assert recover(training.manager).step == 2


# -- what is refused ---------------------------------------------------------------------------------------


def steps_of_another_run(root: Path, new: Path) -> None:
    train(new, 1)


def old_step(root: Path, new: Path) -> None:
    shutil.copytree(file_names.step_dir(root, 2), file_names.step_dir(new, 2))


def file_of_a_run(root: Path, new: Path) -> None:
    new.mkdir()
    shutil.copy(root / file_names.RUN_FILE, new)


def damaged_file_of_a_run(root: Path, new: Path) -> None:
    new.mkdir()
    (new / file_names.RUN_FILE).write_text("{")


def tracker_of_another_program(root: Path, new: Path) -> None:
    new.mkdir()
    (new / file_names.TRACKER_FILE).write_text("10")


def theirs(root: Path, new: Path) -> None:
    (new / "global_step_2" / "actor").mkdir(parents=True)
    (new / "global_step_2" / "actor" / "model.pt").write_bytes(b"x")


def same_folder(root: Path, new: Path) -> None:
    new.symlink_to(root)


def in_the_step(root: Path, new: Path) -> None:
    new.symlink_to(file_names.step_dir(root, 2) / "inner")
    (file_names.step_dir(root, 2) / "inner").mkdir()


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (steps_of_another_run, "belongs to run"),
        (old_step, "has the step global_steps_2 already"),
        (file_of_a_run, "belongs to run"),
        (damaged_file_of_a_run, "belongs to a run"),
        (tracker_of_another_program, "has the tracker"),
        (theirs, "has the step global_step_2 already"),
        (same_folder, "is the folder that has the step"),
        (in_the_step, "is inside the step"),
    ],
)
def test_it_replaces_nothing(prepare: Any, words: str, root: Path, new: Path) -> None:
    prepare(root, new)
    before = tree(new), tree(root)
    with pytest.raises(InvalidArgumentError, match=words):
        branch(root, 2, new)
    assert (tree(new), tree(root)) == before


def test_other_files_may_be_there(root: Path, new: Path) -> None:
    new.mkdir()
    (new / "log.txt").write_text("theirs")
    branch(root, 2, new)
    assert (new / "log.txt").read_text() == "theirs"


def test_a_second_time_is_refused(root: Path, new: Path) -> None:
    branch(root, 2, new)
    before = tree(new)
    with pytest.raises(InvalidArgumentError, match="belongs to run"):
        branch(root, 2, new)
    assert tree(new) == before


def test_beside_a_trainer_that_is_alive(root: Path, new: Path) -> None:
    new.mkdir()
    lock = file_names.trainer_file(new, "actor")
    lock.write_bytes(fields.encode(asdict(parent())))
    with pytest.raises(LockedError, match="is alive"):
        branch(root, 2, new)
    assert list(new.iterdir()) == [lock]


@pytest.mark.parametrize("test", [False, True])
def test_a_damaged_step(test: bool, root: Path, new: Path) -> None:
    file = manifest_of(root, 2).files[0]
    path = file_names.step_dir(root, 2) / "actor" / file.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    if test:
        with pytest.raises(CheckpointCorruptError, match="is damaged, so nothing was written"):
            branch(root, 2, new, test=True)
        assert not new.exists()
    else:
        branch(root, 2, new)  # only sizes were asked for
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointNotFoundError, match="missing or cut"):
        branch(root, 2, new.with_name("other"), test=test)
    assert not new.with_name("other").exists()


def test_a_step_that_is_not_there_or_not_complete(root: Path, new: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint of step 7: there are the steps 3, 2, 1"):
        branch(root, 7, new)
    with pytest.raises(InvalidArgumentError, match="name the folder of steps"):
        branch(file_names.step_dir(root, 2), 2, new)
    manifest = manifest_of(root, 2)
    path = file_names.step_dir(root, 2) / "actor" / file_names.MANIFEST_FILE
    path.write_bytes(encode_manifest(replace(manifest, roles=("actor", "critic"))))
    with pytest.raises(CheckpointNotFoundError, match="not committed by critic"):
        branch(root, 2, new)
    assert not new.exists()


def test_no_room(root: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise NoRoomError("full")

    monkeypatch.setattr("mcore_ckpt.steps.new_step.check_space", refuse)
    with pytest.raises(NoRoomError):
        branch(root, 2, new)
    assert not new.exists()


# -- deaths ------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As if the process had died: nothing is cleaned up."""


def test_a_failure_in_the_middle_leaves_nothing(root: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError(5, "no more", str(target))

    monkeypatch.setattr(tool, "link_file", fail)
    with pytest.raises(CommitError, match="could not be written"):
        branch(root, 2, new)
    assert not new.exists()


@pytest.mark.parametrize("dies_at", [1, 2, 3])
def test_a_death_between_two_roles_is_mended_by_the_next_try(
    dies_at: int, tmp_path: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, no trainer takes the step for a complete one. At the third point, only `.run.json` is missing."""
    root = tmp_path / "root"
    two_roles(root)
    publish, calls = tool.NewStep.publish, 0
    publish_role = commit.publish

    def dying(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == dies_at:
            raise Killed
        publish_role(*arguments)

    def dying_after(self: Any) -> None:
        publish(self)
        raise Killed

    if dies_at == 3:
        monkeypatch.setattr(tool.NewStep, "publish", dying_after)
    monkeypatch.setattr(commit, "publish", dying)
    with pytest.raises(Killed):
        branch(root, 1, new)
    monkeypatch.undo()
    complete = [status.step for status in list_steps(new) if status.is_complete] if new.exists() else []
    assert complete == ([1] if dies_at == 3 else [])
    if dies_at == 3:
        with closing(Training(new, roles=("actor", "critic"))) as training:
            recover(training.manager)
            training.save(2)
        assert id_of(new) == manifest_of(new, 1).run.id  # type: ignore[union-attr]
        return
    there = manifest_of(new, 1).run if dies_at == 2 else None
    report = branch(root, 1, new)
    assert [role.role for role in report.roles] == (["critic"] if dies_at == 2 else ["actor", "critic"])
    assert there in (None, report.run)
    (status,) = list_steps(new)
    assert status.is_complete
    assert id_of(new) == report.run.id


def test_what_a_killed_process_leaves_is_removed(root: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by `fork`, since only an end without any cleanup shows what stays."""
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(tool.NewStep, "write_manifest", lambda self, manifest: os._exit(0))
        try:
            branch(root, 2, new)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert any(".staging-" in path.name for path in new.rglob("*"))
    with closing(Training(new)) as training:
        assert recover(training.manager).step is None
    branch(root, 2, new)
    assert not any(".staging-" in path.name for path in new.rglob("*"))
    assert verify(new).is_sound
