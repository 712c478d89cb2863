"""Checkpoints that a save by two renames moves aside: they are found there, and no old version of them comes back."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.main import main
from mcore_ckpt.steps import commit, hidden_step, leftovers, retention
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps, delete_step, discard_step
from mcore_ckpt.steps.role_files import uncommit_role
from mcore_ckpt.tools.examine.find import find_checkpoint
from mcore_ckpt.tools.examine.select import select
from mcore_ckpt.tools.examine.verify import verify
from mcore_ckpt.tools.maintain.prune import prune
from tests.support.checkpoints import ROLE, Crash, crash, dead_owner, make, own, read_version, remains, stage

DEAD = dead_owner(2**22 + 1)
# The two places of a role's folder: the step's own folder, and a folder in it.
PLACES = ("global_step_4", f"global_step_4/{ROLE}")


@pytest.fixture(autouse=True)
def two_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "exchange", lambda first, second: False)


def save_twice(folder: Path) -> Path:
    """Saves versions 1 and 2. Returns what is left of the first, as after a crash right behind the second rename."""
    make(folder, 1)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "x").write_text("x")
    staging, attempt = stage(folder, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "remove_replaced", crash)
        with pytest.raises(Crash):
            commit.publish(staging, folder, attempt)
    replaced = file_names.replaced_dir(folder, attempt)
    own(replaced, DEAD)
    return replaced


def move_aside(folder: Path) -> Path:
    """Makes the state between the two renames of a save that has died."""
    make(folder, 1)
    staging, attempt = stage(folder, 2)
    own(staging, DEAD)
    replaced = file_names.replaced_dir(folder, attempt)
    folder.rename(replaced)
    return replaced


# -- what is deleted stays deleted ---------------------------------------------------------------------------------


DELETIONS: dict[str, Callable[[Path], object]] = {
    "retention": lambda root: delete_old_steps(root, PreservationPolicy(1)),
    "prune": lambda root: prune(root, PreservationPolicy(1)),
    "discard": lambda root: discard_step(root / "global_step_4"),
}


@pytest.mark.parametrize("deletion", DELETIONS)
def test_a_deleted_step_does_not_come_back_as_what_it_replaced(deletion: str, tmp_path: Path) -> None:
    save_twice(tmp_path / "global_step_4")
    make(tmp_path / "global_step_5", 5)
    DELETIONS[deletion](tmp_path)
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert [status.step for status in steps.list_steps(tmp_path)] == [5]
    assert os.listdir(tmp_path) == ["global_step_5"]


def test_a_crash_anywhere_in_a_deletion_brings_no_old_version_back(tmp_path: Path) -> None:
    for point in itertools.count():
        root = tmp_path / str(point)
        save_twice(root / "global_step_4")
        make(root / "global_step_5", 5)
        if not _crashes(point, lambda root=root: delete_old_steps(root, PreservationPolicy(1))):  # type: ignore[misc]
            break
        for deleted in root.glob(".deleted-*"):
            own(deleted, DEAD)
        assert _versions(root) in ({4: 2, 5: 5}, {5: 5})
        leftovers.remove_leftovers(root, ROLE, alone=True)
        assert _versions(root) in ({4: 2, 5: 5}, {5: 5})
        delete_old_steps(root, PreservationPolicy(1))
        assert _versions(root) == {5: 5}
        assert remains(root) == []
    assert point >= 6, "two renames, two syncs, two removals"


def _crashes(point: int, work: Callable[[], object]) -> bool:
    """True if the work was ended at a point: before its n-th rename, sync or removal."""
    points = itertools.count()

    def until(function: Callable[..., object]) -> Callable[..., object]:
        def called(*args: object) -> object:
            if next(points) == point:
                raise Crash
            return function(*args)

        return called

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", until(os.rename))
        for module in (hidden_step, retention):
            patch.setattr(module, "sync_dir", until(module.sync_dir))
        patch.setattr(hidden_step, "remove_folder", until(hidden_step.remove_folder))
        try:
            work()
        except Crash:
            return True
    return False


def _versions(root: Path) -> dict[int, int]:
    return {status.step: read_version(status.role_dir(ROLE)) for status in steps.complete_steps(root)}


def test_lost_power_in_a_deletion_brings_no_old_version_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the disk the rename of the step must not come before that of what it has replaced."""
    replaced = save_twice(tmp_path / "global_step_4")
    make(tmp_path / "global_step_5", 5)
    done: list[str] = []
    rename, sync = os.rename, hidden_step.sync_dir

    def noting_rename(source: Path, target: Path) -> None:
        rename(source, target)
        done.append(Path(source).name)

    def noting_sync(folder: Path) -> None:
        sync(folder)
        done.append(f"sync {folder.name}")

    monkeypatch.setattr(os, "rename", noting_rename)
    for module in (hidden_step, retention):
        monkeypatch.setattr(module, "sync_dir", noting_sync)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [4]
    assert done == [replaced.name, f"sync {tmp_path.name}", "global_step_4", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("moment", ["before it looks", "after it has looked"])
def test_a_step_that_is_moved_aside_while_it_is_to_be_deleted_stays(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "global_step_4"
    make(folder, 1)
    (status,) = steps.list_steps(tmp_path)
    find = hidden_step.replaced_checkpoints

    def move_and_find(step_path: Path) -> list[Path]:
        replaced = file_names.replaced_dir(folder, "a" * 32)
        if folder.exists():
            folder.rename(replaced)
        return find(step_path)

    if moment == "before it looks":
        move_and_find(folder)
    else:
        monkeypatch.setattr(hidden_step, "replaced_checkpoints", move_and_find)
    assert delete_step(status) is not None
    assert _versions(tmp_path) == {4: 1}


@pytest.mark.parametrize("place", PLACES)
def test_a_role_that_is_uncommitted_has_no_old_version_either(place: str, tmp_path: Path) -> None:
    replaced = save_twice(tmp_path / place)
    uncommit_role(tmp_path / place)
    assert steps.complete_steps(tmp_path) == []
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert steps.complete_steps(tmp_path) == []
    assert not replaced.exists()
    assert (tmp_path / place / "adapter" / "x").read_text() == "x"


def test_a_role_is_uncommitted_where_it_was_moved(tmp_path: Path) -> None:
    move_aside(tmp_path / PLACES[1])
    assert steps.complete_steps(tmp_path) != []
    uncommit_role(tmp_path / PLACES[1])
    assert steps.complete_steps(tmp_path) == []


def test_prune_keeps_what_others_have_put_into_an_old_version(tmp_path: Path) -> None:
    replaced = save_twice(tmp_path / "global_step_4")
    (pruned,) = [each for each in prune(tmp_path, PreservationPolicy()) if each.step is None]
    assert (pruned.path, pruned.stays) == (replaced, False)
    assert (tmp_path / "global_step_4" / "adapter" / "x").read_text() == "x"


# -- what was moved aside is found ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "path"), [(PLACES[0], PLACES[0]), (PLACES[1], PLACES[0]), (PLACES[1], PLACES[1])])
def test_it_is_found_by_its_path(place: str, path: str, tmp_path: Path) -> None:
    replaced = move_aside(tmp_path / place)
    assert select(tmp_path / path).role_dirs == (replaced.resolve(),)
    assert select(tmp_path / path, 4).step == 4
    assert find_checkpoint(tmp_path / path).path == replaced.resolve()
    report = verify(tmp_path / path)
    assert report.is_sound
    assert [verdict.path for verdict in report.roles] == [replaced]
    assert main(["verify", str(tmp_path / path)]) == 0


@pytest.mark.parametrize("place", PLACES)
def test_a_step_of_which_all_is_aside_holds_something(place: str, tmp_path: Path) -> None:
    move_aside(tmp_path / place)
    (status,) = steps.list_steps(tmp_path)
    assert steps.holds_something(status)


# -- while it is being moved ---------------------------------------------------------------------------------------


def _finds(root: Path) -> dict[str, Callable[[], steps.StepStatus | None]]:
    return {
        "newest_complete": lambda: steps.newest_complete(root),
        "list_steps": lambda: steps.list_steps(root, only=4)[-1],
        "step_status": lambda: steps.step_status(root / "global_step_4"),
    }


@pytest.mark.parametrize(
    ("look", "place"),
    [
        # CI takes the places in turn.
        pytest.param(look, place, marks=() if (number + PLACES.index(place)) % 2 else pytest.mark.full)
        for number, look in enumerate(["newest_complete", "list_steps", "step_status"])
        for place in PLACES
    ],
)
def test_it_is_found_while_it_is_moved(look: str, place: str, tmp_path: Path) -> None:
    """Whatever call of a look the first rename precedes, and whatever call the second one and the removal."""
    first, calls = 0, 1
    while first < calls:
        for second in itertools.count(first):
            root = tmp_path / f"{first} {second}"
            make(root / "global_step_3", 3)
            make(root / place, 1)
            calls, status = _look_during(root / place, first, second, _finds(root)[look])
            assert status is not None, (first, second)
            assert (status.step, status.is_complete) == (4, True), (first, second)
            shutil.rmtree(root)
            if second >= calls:
                break
        first += 1
    assert calls > 2


def _look_during(
    folder: Path, first: int, second: int, look: Callable[[], steps.StepStatus | None]
) -> tuple[int, steps.StepStatus | None]:
    """Looks at a step while a save replaces it. Returns how many calls that took, and what it found."""
    staging, attempt = stage(folder, 2)
    replaced = file_names.replaced_dir(folder, attempt)
    count = 0

    def before(function: Callable[..., object]) -> Callable[..., object]:
        def called(*args: object, **kwargs: object) -> object:
            nonlocal count
            now, count = count, count + 1
            if now == first:
                os.rename(folder, replaced)
            if now == second:
                os.rename(staging, folder)
                commit.remove_folder(replaced)
            return function(*args, **kwargs)

        return called

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "_entries", before(steps._entries))
        patch.setattr(steps, "_read_head", before(steps._read_head))
        patch.setattr(steps, "read_manifest_summary", before(steps.read_manifest_summary))
        found = look()
    return count, found


def test_a_root_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "global_step_4", 4)
    listed: list[str] = []
    scandir = os.scandir

    def noting(path: str | Path) -> object:
        listed.append(str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", noting)
    steps.list_steps(tmp_path)
    steps.newest_complete(tmp_path)
    assert listed.count(str(tmp_path)) == 2
