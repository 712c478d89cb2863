"""Checkpoints that a save by two renames moves aside: they are found there, and no old version of them comes back."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import ROLE, dead_owner, make, own, stage

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.main import main
from mcore_ckpt.steps import commit
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.tools.find import find_checkpoint, select
from mcore_ckpt.tools.verify import verify

DEAD = dead_owner(2**22 + 1)
# The two places of a role's folder: the step's own folder, and a folder in it.
PLACES = ("global_step_4", f"global_step_4/{ROLE}")


@pytest.fixture(autouse=True)
def two_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "exchange", lambda first, second: False)


def move_aside(folder: Path) -> Path:
    """Makes the state between the two renames of a save that has died."""
    make(folder, 1)
    staging, attempt = stage(folder, 2)
    own(staging, DEAD)
    replaced = file_names.replaced_dir(folder, attempt)
    folder.rename(replaced)
    return replaced


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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("look", ["newest_complete", "list_steps", "step_status"])
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
