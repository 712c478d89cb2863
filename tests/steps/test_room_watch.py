"""What rank 0 takes for a sign of a deletion, what it looks at while all ranks wait, and what it foresees."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import ROLE, make
from waiting import LONG_S

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import NoRoomError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.room import Limit, Need, Room
from mcore_ckpt.steps import room
from mcore_ckpt.steps.room import RoomWatch, Saving

STEP = 1
NEEDED = 1_000_000
PATIENCE_S = 100.0


class Disk:
    """A file system whose free room changes from look to look, and a clock that only sleeping moves."""

    def __init__(self, free: Iterator[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.free, self.is_certain = 0.0, free, True
        monkeypatch.setattr(room, "room_of", self.room_of)
        monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def room_of(self, folder: Path) -> Room:
        nbytes, entries = next(self.free)
        limits = (Limit("nbytes", nbytes, "disk"), Limit("entries", entries, "inodes"))
        return Room(limits, is_certain=self.is_certain)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def changing(free: Callable[[int], tuple[int, int]]) -> Iterator[tuple[int, int]]:
    look = 0
    while True:
        yield free(look)
        look += 1


def commit_step(root: Path, step: int) -> None:
    make(file_names.step_dir(root, step) / ROLE, step)


def check(root: Path) -> None:
    saving = Saving(root / "global_steps_1" / ROLE, 1, None)
    RoomWatch(root, lambda: False).check(saving, Need((NEEDED,)), PATIENCE_S)


OTHERS = {
    "others write": lambda look: (NEEDED // 2 - look, 1000),
    "others write and delete": lambda look: (NEEDED // 2 - look % 7, 1000),
    "inodes grow, of which there are enough": lambda look: (NEEDED // 2, 1000 + look),
}


@pytest.mark.parametrize("free", OTHERS.values(), ids=OTHERS)
def test_only_growth_of_what_is_short_is_a_sign_of_a_deletion(
    free: Callable[[int], tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(changing(free), monkeypatch)
    with pytest.raises(NoRoomError):
        check(tmp_path)
    assert disk.now < 2 * tuning.ROOM_SETTLES_S


def test_a_deletion_of_another_host_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It frees a little at each look, and others write meanwhile. Inodes are short, too, and come last."""
    disk = Disk(changing(lambda look: (NEEDED // 2 + 10_000 * (look - look % 3), look // 4)), monkeypatch)
    check(tmp_path)
    assert 2 * tuning.ROOM_SETTLES_S < disk.now < PATIENCE_S


def test_a_folder_that_cannot_be_looked_at_is_left_to_its_making(tmp_path: Path) -> None:
    RoomWatch(tmp_path, lambda: False).check(Saving(tmp_path / ("x" * 300) / ROLE, 1, None), Need((1,)), 0.0)


def fail(*args: Any, **more: Any) -> Any:
    raise AssertionError("all ranks wait meanwhile")


@pytest.mark.parametrize("certain", [True, False])
def test_a_save_that_may_fit_looks_at_no_step(certain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if the next one will not fit: that is found out when this one is committed."""
    commit_step(tmp_path, STEP)
    for name in ("list_steps", "taken_by", "need_of"):
        monkeypatch.setattr(room, name, fail)
    free = NEEDED * 3 // 2 if certain else NEEDED // 2
    Disk(changing(lambda look: (free, 1000)), monkeypatch).is_certain = certain
    check(tmp_path)


@pytest.mark.parametrize("slow", ["list_steps", "taken_by"])
def test_a_refusal_does_not_wait_for_thousands_of_old_steps(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(STEP, STEP + 3):
        commit_step(tmp_path, step)
    may_go_on, looks, look = threading.Event(), list[int](), getattr(room, slow)

    def slowly(*args: Any) -> Any:
        looks.append(1)
        may_go_on.wait(LONG_S)
        return look(*args)

    monkeypatch.setattr(room, slow, slowly)
    monkeypatch.setattr(tuning, "OLD_STEPS_LOOK_S", 0.05)
    with monkeypatch.context() as patch:
        Disk(changing(lambda look: (0, 0)), patch)
        with pytest.raises(NoRoomError, match=r"prune .* --max-to-keep 1 --dry-run' shows which steps could be"):
            check(tmp_path)
    may_go_on.set()
    for thread in threading.enumerate():
        if thread.name == "mcore_ckpt old steps":
            thread.join(LONG_S)
    assert len(looks) == 1, "no further step is looked at"


# -- the next save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    commit_step(tmp_path, STEP)
    return tmp_path


@pytest.mark.parametrize("certain", [True, False])
def test_the_next_save_is_foreseen_once(
    certain: bool, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = [0]
    Disk(changing(lambda look: (free[0], 1000)), monkeypatch).is_certain = certain
    watch = RoomWatch(root, lambda: False)
    counts = []
    for nbytes in (0, 10, NEEDED * 1000, 0):
        free[0] = nbytes
        watch.foresee(STEP)
        counts.append(caplog.text.count("the next one will not"))
    assert counts == [1, 1, 1, 2]
    assert ("the save is tried" in caplog.text) is not certain


def incomplete(root: Path, watch: RoomWatch) -> None:
    make(file_names.step_dir(root, STEP) / ROLE, STEP, roles=(ROLE, "critic"))


def staged(root: Path, watch: RoomWatch) -> None:
    role_dir = file_names.step_dir(root, STEP + 1) / "critic"
    file_names.staging_dir(role_dir, "0" * 16).mkdir(parents=True)


def checked_meanwhile(root: Path, watch: RoomWatch) -> None:
    look = room.room_of

    def then_begin(folder: Path) -> Room:
        watch._checks += 1
        return look(folder)

    room.room_of = then_begin  # restored with what Disk has replaced


@pytest.mark.parametrize("prepare", [incomplete, staged, checked_meanwhile])
def test_nothing_is_foreseen_while_another_save_takes_room(
    prepare: Callable[[Path, RoomWatch], None],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Disk(changing(lambda look: (0, 0)), monkeypatch)
    watch = RoomWatch(root, lambda: False)
    prepare(root, watch)
    watch.foresee(STEP)
    assert caplog.text == ""


def test_where_there_is_plenty_of_room_no_manifest_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A manifest of thousands of ranks takes rank 0 long."""
    free = [NEEDED * 1000]
    Disk(changing(lambda look: (free[0], 10**9)), monkeypatch)
    watch = RoomWatch(root, lambda: False)
    watch.check(Saving(root / "global_steps_1" / ROLE, 1, None), Need((NEEDED,)), PATIENCE_S)
    with monkeypatch.context() as patch:
        patch.setattr(room, "need_of", fail)
        watch.foresee(STEP)
    free[0] = 10
    watch.foresee(STEP)
    assert "the next one will not" in caplog.text
