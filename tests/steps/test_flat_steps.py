"""Steps whose folder is their only role's, as verl's SFT trainer has them, and what a trainer puts there beside."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointNotFoundError, CommitError
from mcore_ckpt.load.candidates import find_candidates
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.steps import commit, leftovers, tracker
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps.owner import Owner
from mcore_ckpt.steps.pins import pin
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps
from mcore_ckpt.tools.examine.select import select
from mcore_ckpt.tools.examine.verify import verify
from mcore_ckpt.tools.maintain.prune import prune
from tests.support.checkpoints import ROLE, dead_owner, make, own, read_version, remains, stage

ELSEWHERE = Owner("node7 another-boot pid:[1]", 4321, 99)
NAMES = ("global_steps_{}", "global_step_{}", "checkpoint-{}")


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    return request.param


def flat(root: Path, step: int, name: str = "global_step_{}") -> Path:
    return root / name.format(step)


@pytest.mark.parametrize("name", NAMES)
def test_a_flat_step_is_a_step(tmp_path: Path, name: str) -> None:
    for step in (1, 2):
        make(flat(tmp_path, step, name), step)
    status = steps.complete_steps(tmp_path)[-1]
    assert (status.step, status.committed, status.role_dir(ROLE)) == (2, {ROLE}, flat(tmp_path, 2, name))
    assert tracker.update_tracker(tmp_path) == 2
    assert [status.step for status in resumable_steps(tmp_path, [ROLE])] == [2, 1]
    assert select(tmp_path).role_dirs == (flat(tmp_path, 2, name).resolve(),)
    report = verify(tmp_path, None)
    assert [verdict.path for verdict in report.roles] == [flat(tmp_path, 1, name), flat(tmp_path, 2, name)]
    assert not report.problems
    assert verify(flat(tmp_path, 2, name), 2).roles[0].path == flat(tmp_path, 2, name)
    pin(tmp_path, 1)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == []
    (flat(tmp_path, 1, name) / file_names.PINNED_FILE).unlink()
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1]
    assert read_version(flat(tmp_path, 2, name)) == 2
    assert remains(tmp_path) == []


def test_roles_and_flat_steps_beside_each_other(tmp_path: Path) -> None:
    make(flat(tmp_path, 1), 1)
    make(flat(tmp_path, 2) / ROLE, 2)
    make(flat(tmp_path, 3) / "critic", 3)
    assert [(s.step, s.committed) for s in steps.complete_steps(tmp_path)] == [
        (1, {ROLE}),
        (2, {ROLE}),
        (3, {"critic"}),
    ]
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1]


def test_a_flat_step_copied_from_another_does_not_count(tmp_path: Path) -> None:
    make(flat(tmp_path, 1), 1)
    flat(tmp_path, 1).rename(flat(tmp_path, 7))
    (status,) = steps.list_steps(tmp_path)
    assert not status.is_complete
    assert "global_step_7: its manifest is of actor at step 1" in status.reason


def test_a_flat_step_with_a_damaged_manifest(tmp_path: Path) -> None:
    make(flat(tmp_path, 1), 1)
    (flat(tmp_path, 1) / file_names.MANIFEST_FILE).write_text("{")
    (status,) = steps.list_steps(tmp_path)
    assert not status.is_complete
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == []  # what is not understood stays
    report = verify(tmp_path, None)
    assert [bool(verdict.damages) for verdict in report.roles] == [True]


def test_what_a_trainer_puts_there_stays(tmp_path: Path, way: str) -> None:
    folder = flat(tmp_path, 5)
    make(folder, 1)
    (folder / "data_0.pt").write_text("of version 1")
    pin(tmp_path, 5)
    staging, attempt = stage(folder, 2)
    (folder / "data_1.pt").write_text("while the second save is under way")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "x").write_text("x")
    (folder / "link").symlink_to("data_0.pt")
    commit.publish(staging, folder, attempt)
    assert read_version(folder) == 2
    assert (folder / "data_0.pt").read_text() == "of version 1"
    assert (folder / "data_1.pt").read_text() == "while the second save is under way"
    assert (folder / "adapter" / "x").read_text() == "x"
    assert os.readlink(folder / "link") == "data_0.pt"
    assert steps.list_steps(tmp_path)[0].pinned
    assert remains(tmp_path) == []


def test_a_file_that_is_open_is_the_same_file_after(tmp_path: Path, way: str) -> None:
    folder = flat(tmp_path, 5)
    folder.mkdir(parents=True)
    staging, attempt = stage(folder, 1)
    with open(folder / "data_0.pt", "w") as file:
        file.write("first half, ")
        commit.publish(staging, folder, attempt)
        file.write("second half")
    assert (folder / "data_0.pt").read_text() == "first half, second half"
    assert read_version(folder) == 1


def test_a_folder_its_trainer_makes_at_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = flat(tmp_path, 5)
    staging, attempt = stage(folder, 1)
    exists = Path.exists

    def made_after(path: Path, **kwargs: bool) -> bool:
        found = exists(path, **kwargs)
        if path == folder and not found:
            folder.mkdir()
            (folder / "data_0.pt").write_text("x")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", made_after)
        commit.publish(staging, folder, attempt)
    assert read_version(folder) == 1
    assert (folder / "data_0.pt").read_text() == "x"


def test_remains_of_a_flat_step_are_swept(tmp_path: Path) -> None:
    make(flat(tmp_path, 1), 1)
    dead, _ = stage(flat(tmp_path, 2), 2)
    own(dead, dead_owner(2**22 + 1))
    living, _ = stage(flat(tmp_path, 3), 3)
    assert leftovers.find_leftovers(tmp_path) == [dead]
    assert [folder.path for folder in prune(tmp_path, PreservationPolicy(), dry_run=True) if folder.step is None] == [
        dead
    ]
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert not dead.exists()
    assert living.exists()
    assert read_version(flat(tmp_path, 1)) == 1


def test_a_flat_step_that_is_being_saved_again_is_not_deleted(tmp_path: Path) -> None:
    for step in (1, 2):
        make(flat(tmp_path, step), step)
    staging, attempt = stage(flat(tmp_path, 1), 11)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == []
    commit.publish(staging, flat(tmp_path, 1), attempt)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1]


@pytest.mark.parametrize("trainer_is_back", [False, True])
def test_a_crash_between_two_renames(tmp_path: Path, trainer_is_back: bool) -> None:
    """Where folders cannot be exchanged; the trainer may have made the folder again before the sweep."""
    folder = flat(tmp_path, 4)
    make(folder, 1)
    staging, attempt = stage(folder, 2)
    own(staging, dead_owner(2**22 + 1))
    folder.rename(file_names.replaced_dir(folder, attempt))
    if trainer_is_back:
        folder.mkdir()
        (folder / "data_0.pt").write_text("x")
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert read_version(folder) == 1
    assert (folder / "data_0.pt").exists() == trainer_is_back
    assert remains(tmp_path) == []


@pytest.fixture(params=["gone", "made again"])
def moved_aside(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where step 4 is after a save elsewhere has died between two renames. Its trainer may make the folder again."""
    make(flat(tmp_path, 3), 3)
    make(flat(tmp_path, 4), 4)
    staging, attempt = stage(flat(tmp_path, 4), 5)
    own(staging, ELSEWHERE)
    replaced = file_names.replaced_dir(flat(tmp_path, 4), attempt)
    flat(tmp_path, 4).rename(replaced)
    if request.param == "made again":
        flat(tmp_path, 4).mkdir()
        (flat(tmp_path, 4) / "data_0.pt").write_text("x")
    return replaced


def test_a_step_between_two_renames_is_found_before_a_trainer_is_back(moved_aside: Path, tmp_path: Path) -> None:
    leftovers.remove_leftovers(tmp_path, ROLE, alone=False)  # as the start of a manager on another host does
    assert moved_aside.exists(), "the save may be alive"
    status = steps.list_steps(tmp_path)[-1]
    assert (status.step, status.committed, status.role_dir(ROLE)) == (4, {ROLE}, moved_aside)
    assert steps.newest_complete(tmp_path, ROLE) == status
    assert steps.step_status(flat(tmp_path, 4)) == status
    assert [status.step for status in resumable_steps(tmp_path, [ROLE])] == [4, 3]
    assert select(tmp_path).role_dirs == (moved_aside.resolve(),)
    assert tracker.update_tracker(tmp_path) == 4
    assert not verify(tmp_path, None).problems
    pin(tmp_path, 4)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [3]
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    (status,) = steps.list_steps(tmp_path)
    assert (status.step, status.pinned, status.role_dir(ROLE)) == (4, True, flat(tmp_path, 4))
    assert remains(tmp_path) == []


def test_a_step_between_two_renames_is_not_deleted(moved_aside: Path, tmp_path: Path) -> None:
    make(flat(tmp_path, 5), 5)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [3]
    reasons = {folder.step: folder.reason for folder in prune(tmp_path, PreservationPolicy(1), dry_run=True)}
    assert "the next start or save of a trainer puts it back" in reasons[4]
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [4]


def test_the_old_checkpoint_of_a_step_that_is_in_place_is_none(moved_aside: Path, tmp_path: Path) -> None:
    shutil.rmtree(flat(tmp_path, 4), ignore_errors=True)
    make(flat(tmp_path, 4), 4)
    status = steps.list_steps(tmp_path)[-1]
    assert (status.role_dir(ROLE), status.aside) == (flat(tmp_path, 4), {})
    assert find_candidate(flat(tmp_path, 4)) == flat(tmp_path, 4)


def test_a_damaged_checkpoint_between_two_renames_is_told(moved_aside: Path, tmp_path: Path) -> None:
    (moved_aside / file_names.MANIFEST_FILE).write_text("{")
    status = steps.list_steps(tmp_path)[-1]
    assert (status.step, status.is_complete) == (4, False)
    assert str(moved_aside) in status.reason


def find_candidate(path: Path) -> Path:
    (candidate,) = find_candidates(None, None, None, path)["candidates"]
    return Path(candidate["folder"])


@pytest.mark.parametrize("name", ["out", "global_step_7", "global_step_7/actor"])
def test_a_path_between_two_renames_is_loaded_where_it_is(name: str, tmp_path: Path) -> None:
    """On another host, the save may be alive, so nothing is put back."""
    path = tmp_path / name
    make(tmp_path / "global_step_7", 7)
    staging, attempt = stage(tmp_path / "global_step_7", 8)
    path.parent.mkdir(exist_ok=True)
    replaced = file_names.replaced_dir(path, attempt)
    (tmp_path / "global_step_7").rename(tmp_path / "made")
    path.parent.mkdir(exist_ok=True)
    (tmp_path / "made").rename(replaced)
    staging.rename(file_names.staging_dir(path, attempt))
    own(file_names.staging_dir(path, attempt), ELSEWHERE)
    assert find_candidate(path) == replaced
    own(file_names.staging_dir(path, attempt), dead_owner(2**22 + 1))
    assert find_candidate(path) == path
    assert path.exists()


def test_a_checkpoint_that_cannot_be_put_back_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = flat(tmp_path, 4)
    make(folder, 1)
    replaced = file_names.replaced_dir(folder, "b" * 32)
    folder.rename(replaced)
    (folder / "model").mkdir(parents=True)
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert read_version(replaced) == 1
    assert "cannot be put back" in caplog.text


class Killed(BaseException):
    """Stands for a SIGKILL at a point."""


def killed(*args: object) -> None:
    raise Killed


@pytest.mark.parametrize("point", ["exchange", "remove_replaced"])
def test_folders_of_others_survive_a_kill_around_the_exchange(
    point: str, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "global_step_5" / ROLE
    make(folder, 1)
    (folder / "dist_ckpt").mkdir()
    (folder / "dist_ckpt" / "x").write_text("x")
    staging, attempt = stage(folder, 2)
    with monkeypatch.context() as patch:
        if point == "exchange" and way == "two renames":
            patch.setattr(commit, "_rename_in_turn", killed)
        else:
            patch.setattr(commit, point, killed)
        with pytest.raises(Killed):
            commit.publish(staging, folder, attempt)
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    for work in folder.parent.iterdir():
        if file_names.parse_work_dir(work.name):
            own(work, dead_owner(2**22 + 1))
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert read_version(folder) == (1 if point == "exchange" else 2)
    assert (folder / "dist_ckpt" / "x").read_text() == "x"


def test_what_cannot_be_moved_is_not_deleted(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = flat(tmp_path, 5)
    make(folder, 1)
    (folder / "adapter").mkdir()
    rename = os.rename

    def refused(source: Path, target: Path) -> None:
        if Path(source).name == "adapter":
            raise PermissionError(errno.EPERM, "not now", str(source))
        rename(source, target)

    staging, attempt = stage(folder, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refused)
        commit.publish(staging, folder, attempt)
    assert read_version(folder) == 2
    old = staging if way == "exchange" else file_names.replaced_dir(folder, attempt)
    assert (old / "adapter").is_dir()
    assert "could not be moved there, and stays" in caplog.text
    folder.rename(tmp_path / "away")
    assert steps.complete_steps(tmp_path) == [], "not even if a user moves the step away"
    (tmp_path / "away").rename(folder)
    own(old, dead_owner(2**22 + 1))
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert (folder / "adapter").is_dir()
    assert remains(tmp_path) == []


def test_a_file_that_its_writer_has_replaced_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As verl writes its tracker: a new file under the old name."""
    folder = flat(tmp_path, 5)
    make(folder, 1)
    (folder / "data_0.pt").write_text("old")
    staging, attempt = stage(folder, 2)
    exchange = commit.exchange

    def after_the_links(first: Path, second: Path) -> bool:
        (folder / "new").write_text("new")
        os.replace(folder / "new", folder / "data_0.pt")
        return exchange(first, second)

    monkeypatch.setattr(commit, "exchange", after_the_links)
    commit.publish(staging, folder, attempt)
    assert (folder / "data_0.pt").read_text() == "new"


def test_the_old_checkpoint_of_a_killed_exchange_is_removed_without_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not below a folder of steps, so no trainer's lock says that its owner is dead."""
    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(file_names, "parse_step", lambda name: 5 if name == "out" else None)
        make(folder, 1)
        staging, attempt = stage(folder, 2)
    with monkeypatch.context() as patch:
        patch.setattr(commit, "remove_replaced", killed)
        with pytest.raises(Killed):
            commit.publish(staging, folder, attempt)
    assert (staging / file_names.OWNER_FILE).exists(), "nobody could tell whose it was"
    own(staging, dead_owner(2**22 + 1))
    leftovers.remove_sibling_leftovers(folder)
    assert read_version(folder) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_above_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that holds the root may be anybody's: the checkpoint is in place all the same."""
    folder = flat(tmp_path / "root", 5)
    sync = commit.sync_dir

    def refused(path: Path) -> None:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "no", str(path))
        sync(path)

    staging, attempt = stage(folder, 1)
    monkeypatch.setattr(commit, "sync_dir", refused)
    commit.publish(staging, folder, attempt)
    assert read_version(folder) == 1
    assert remains(tmp_path / "root") == []


def test_another_trainer_s_flat_save_is_left_alone(tmp_path: Path) -> None:
    staging, _ = stage(flat(tmp_path, 2), 2)
    own(staging, ELSEWHERE)
    file_names.trainer_file(tmp_path, "reward").write_text("{}")
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert staging.exists()
    file_names.trainer_file(tmp_path, "reward").unlink()
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert not staging.exists()


def test_a_step_has_one_name(tmp_path: Path) -> None:
    make(tmp_path / "global_steps_5" / ROLE, 1)
    steps.check_one_spelling(tmp_path, tmp_path / "global_steps_5" / "critic", 5)
    steps.check_one_spelling(tmp_path, tmp_path / "global_step_6", 6)
    for other in (flat(tmp_path, 5), flat(tmp_path, 5) / ROLE, tmp_path / "checkpoint-5" / ROLE):
        with pytest.raises(CommitError, match=r"step 5 is there already, as .*global_steps_5"):
            steps.check_one_spelling(tmp_path, other, 5)


def test_a_manifest_of_somebody_else_beside_roles(tmp_path: Path) -> None:
    make(tmp_path / "global_step_5" / ROLE, 1)
    (tmp_path / "global_step_5" / "manifest.json").write_text('{"of": "another program"}')
    assert [status.step for status in steps.complete_steps(tmp_path)] == [5]


def test_what_a_trainer_left_beside_a_first_save_that_never_ended_is_no_checkpoint(tmp_path: Path) -> None:
    flat(tmp_path, 5).mkdir()
    (flat(tmp_path, 5) / "data_0.pt").write_text("x")
    stage(flat(tmp_path, 5), 1)
    assert resumable_steps(tmp_path, [ROLE]) == []
    (flat(tmp_path, 5) / ROLE).mkdir()
    with pytest.raises(CheckpointNotFoundError):
        resumable_steps(tmp_path, [ROLE])
