"""What rank 0 takes for a sign of a deletion, what it looks at while all ranks wait, and what it foresees."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import NoRoomError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.disk_space import DiskSpace, Limit, Need
from mcore_ckpt.steps import space_watch
from mcore_ckpt.steps.space_watch import Saved, Saving, SpaceWatch
from tests.support.checkpoints import ROLE, make
from tests.support.waiting import LONG_S, join_threads

STEP = 1
NEEDED = 1_000_000
PATIENCE_S = 100.0
ONLY_NAMED = r"prune .* --max-to-keep 1 --dry-run' shows which steps could be"


class Disk:
    """A file system whose free space changes from look to look, and a clock that only sleeping moves."""

    def __init__(self, free: Iterator[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.free, self.is_certain = 0.0, free, True
        monkeypatch.setattr(space_watch, "space_of", self.space_of)
        monkeypatch.setattr(space_watch, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def space_of(self, folder: Path) -> DiskSpace:
        nbytes, entries = next(self.free)
        limits = (Limit("nbytes", nbytes, "disk"), Limit("entries", entries, "inodes"))
        return DiskSpace(limits, is_certain=self.is_certain)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def changing(free: Callable[[int], tuple[int, int]]) -> Iterator[tuple[int, int]]:
    look = 0
    while True:
        yield free(look)
        look += 1


def commit_step(root: Path, step: int) -> None:
    make(file_names.step_dir(root, step) / ROLE, step)


def saving_in(root: Path) -> Saving:
    return Saving(root / "global_steps_1" / ROLE, STEP, None)


def check(root: Path) -> None:
    SpaceWatch(root, lambda: False).check(saving_in(root), Need((NEEDED,)), PATIENCE_S)


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
    assert disk.now < 2 * tuning.SPACE_SETTLES_S


def test_a_deletion_of_another_host_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It frees a little at each look, and others write meanwhile. Inodes are short, too, and come last."""
    disk = Disk(changing(lambda look: (NEEDED // 2 + 10_000 * (look - look % 3), look // 4)), monkeypatch)
    check(tmp_path)
    assert 2 * tuning.SPACE_SETTLES_S < disk.now < PATIENCE_S


def test_a_deletion_that_ends_during_a_look_has_freed_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look came too early to see the freed space, so there is another one, even where space is not freed late."""
    monkeypatch.setattr(tuning, "SPACE_SETTLES_S", 0.0)
    deletes = [True]

    def free(look: int) -> tuple[int, int]:
        deletes[0] = False
        return (10 * NEEDED if look else 0, 1000)

    Disk(changing(free), monkeypatch)
    SpaceWatch(tmp_path, lambda: deletes[0]).check(saving_in(tmp_path), Need((NEEDED,)), PATIENCE_S)


def test_a_folder_that_cannot_be_looked_at_is_left_to_its_making(tmp_path: Path) -> None:
    SpaceWatch(tmp_path, lambda: False).check(Saving(tmp_path / ("x" * 300) / ROLE, 1, None), Need((1,)), 0.0)


def fail(*args: Any, **more: Any) -> Any:
    raise AssertionError("all ranks wait meanwhile")


@pytest.mark.parametrize("certain", [True, False])
def test_a_save_that_may_fit_looks_at_no_step(certain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if the next one will not fit: that is found out when this one is committed."""
    commit_step(tmp_path, STEP)
    for name in ("list_steps", "taken_by", "need_of"):
        monkeypatch.setattr(space_watch, name, fail)
    free = NEEDED * 3 // 2 if certain else NEEDED // 2
    Disk(changing(lambda look: (free, 1000)), monkeypatch).is_certain = certain
    check(tmp_path)


LOOKS = {"list_steps": ["list_steps"], "taken_by": ["list_steps", "taken_by"]}


class SlowLooks:
    """A root with old steps that a look takes long for. `names` has the looks that have begun."""

    def __init__(self, root: Path, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for step in range(STEP, STEP + 3):
            commit_step(root, step)
        self.may_go_on, self.names, self._slow = threading.Event(), list[str](), slow
        for name in ("list_steps", "taken_by"):
            monkeypatch.setattr(space_watch, name, self._look(name, getattr(space_watch, name)))

    def _look(self, name: str, look: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*args: Any) -> Any:
            self.names.append(name)
            if name == self._slow:
                assert self.may_go_on.wait(LONG_S)
            return look(*args)

        return slowly

    def end(self) -> None:
        self.may_go_on.set()
        join_threads("mcore_ckpt old steps")


@pytest.mark.parametrize("slow", LOOKS)
def test_a_refusal_does_not_wait_for_thousands_of_old_steps(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = SlowLooks(tmp_path, slow, monkeypatch)
    monkeypatch.setattr(tuning, "OLD_STEPS_LOOK_S", 0.05)
    with monkeypatch.context() as patch:
        Disk(changing(lambda look: (0, 0)), patch)
        with pytest.raises(NoRoomError, match=ONLY_NAMED):
            check(tmp_path)
    looks.end()
    assert looks.names == LOOKS[slow], "no further step is looked at"


def test_looks_of_refused_saves_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = SlowLooks(tmp_path, "list_steps", monkeypatch)
    monkeypatch.setattr(tuning, "OLD_STEPS_LOOK_S", 0.05)
    watch = SpaceWatch(tmp_path, lambda: False)
    with monkeypatch.context() as patch:
        Disk(changing(lambda look: (0, 0)), patch)
        for _ in range(3):
            with pytest.raises(NoRoomError, match=ONLY_NAMED):
                watch.check(saving_in(tmp_path), Need((NEEDED,)), PATIENCE_S)
    assert looks.names == ["list_steps"]
    looks.end()
    Disk(changing(lambda look: (0, 0)), monkeypatch)
    with pytest.raises(NoRoomError, match="would delete 2 steps"):
        watch.check(saving_in(tmp_path), Need((NEEDED,)), PATIENCE_S)


def test_a_refusal_takes_no_longer_than_the_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks would give up. The wait for free space has taken all but 0.1 s of it."""
    looks = SlowLooks(tmp_path, "list_steps", monkeypatch)
    monkeypatch.setattr(tuning, "OLD_STEPS_LOOK_S", LONG_S)
    with monkeypatch.context() as patch:
        disk = Disk(changing(lambda look: (0, 0)), patch)
        began = time.monotonic()
        with pytest.raises(NoRoomError, match=ONLY_NAMED):
            SpaceWatch(tmp_path, lambda: False).check(
                saving_in(tmp_path), Need((NEEDED,)), tuning.SPACE_SETTLES_S + 0.1
            )
        assert tuning.SPACE_SETTLES_S <= disk.now < tuning.SPACE_SETTLES_S + 0.1
    assert time.monotonic() - began < LONG_S / 2
    looks.end()


# -- the next save


class Saves:
    """Saves to a root on a disk with as many free bytes as a test says."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.free, self.is_deleting = root, NEEDED, False
        self.disk = Disk(changing(lambda look: (self.free, 10**6)), monkeypatch)
        self.watch = SpaceWatch(root, lambda: self.is_deleting)

    def commit(self, free: int, deletes: bool = True, need: int = NEEDED) -> Saved | None:
        """Commits a save that fits, after which so many bytes are free."""
        self.free = 10 * NEEDED
        self.watch.check(saving_in(self.root), Need((need,)), PATIENCE_S)
        self.free = free
        return self.watch.committed(saving_in(self.root).role_dir, STEP, deletes)

    def look(self, saved: Saved | None) -> None:
        """Looks as when the old steps have been deleted."""
        if saved is not None:
            self.watch.foresee(saved)
            join_threads("mcore_ckpt next save")


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saves:
    commit_step(tmp_path, STEP)
    return Saves(tmp_path, monkeypatch)


WILL_NOT = "the next one will not"


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("deletes", [True, False])
def test_the_next_save_is_foreseen_once(
    certain: bool, deletes: bool, saves: Saves, caplog: pytest.LogCaptureFixture
) -> None:
    """Where steps are deleted, when they are gone. Else at the commit, before another save can begin."""
    saves.disk.is_certain, counts = certain, []
    for free in (0, 10, NEEDED * 1000, 0):
        saved = saves.commit(free, deletes)
        told_at_once = caplog.text.count(WILL_NOT)
        saves.look(saved)
        counts.append(caplog.text.count(WILL_NOT))
        assert deletes or told_at_once == counts[-1]
        assert deletes or saved is None
    assert counts == [1, 1, 1, 2]
    assert ("the save is tried" in caplog.text) is not certain
    assert f"prune {saves.root} --max-to-keep 1 --dry-run" in caplog.text


@pytest.mark.parametrize("who", ["retention", "this process", "another host"])
def test_nothing_is_said_while_steps_are_being_deleted(
    who: str, saves: Saves, caplog: pytest.LogCaptureFixture
) -> None:
    """When they are gone, there is space."""
    saves.is_deleting = who == "this process"
    if who == "another host":
        file_names.deleted_dir(saves.root / "global_steps_0", "0" * 16).mkdir()
    saved = saves.commit(free=0, deletes=who == "retention")
    assert saved is not None
    saves.free, saves.is_deleting = 10 * NEEDED, False
    saves.look(saved)
    assert caplog.text == ""


def test_what_a_save_deletes_before_its_commit_is_needed_again(saves: Saves, caplog: pytest.LogCaptureFixture) -> None:
    """As the model's own files, where only HuggingFace's are kept. What the step keeps would fit."""
    kept = sum(path.stat().st_size for path in saves.root.rglob("*"))
    saves.look(saves.commit(free=kept + 1000, need=kept + 2000))
    assert f"but only {kept + 1000:,} bytes are free" in caplog.text


def test_what_the_step_has_is_needed_if_it_is_more(saves: Saves, caplog: pytest.LogCaptureFixture) -> None:
    """As that of other roles."""
    saves.look(saves.commit(free=1000, need=1))
    assert WILL_NOT in caplog.text


def incomplete(saves: Saves) -> None:
    make(saving_in(saves.root).role_dir, STEP, roles=(ROLE, "critic"))


def staged(saves: Saves) -> None:
    role_dir = file_names.step_dir(saves.root, STEP + 1) / "critic"
    file_names.staging_dir(role_dir, "0" * 16).mkdir(parents=True)


def committed(saves: Saves) -> None:
    """Of another role, so that its step is not complete."""
    make(file_names.step_dir(saves.root, STEP + 1) / "critic", STEP + 1, roles=(ROLE, "critic"))


def checked(saves: Saves) -> None:
    """The look begins only after that. The newer save was refused, so no folder shows it."""
    saves.watch._checks += 1


def checked_meanwhile(saves: Saves) -> None:
    look = space_watch.space_of

    def then_begin(folder: Path) -> DiskSpace:
        checked(saves)
        return look(folder)

    space_watch.space_of = then_begin  # restored with what Disk has replaced


@pytest.mark.parametrize("prepare", [incomplete, staged, committed, checked, checked_meanwhile])
def test_nothing_is_foreseen_while_another_save_takes_space(
    prepare: Callable[[Saves], None], saves: Saves, caplog: pytest.LogCaptureFixture
) -> None:
    saved = saves.commit(free=0)
    prepare(saves)
    saves.look(saved)
    assert caplog.text == ""


def test_a_look_waits_for_no_space_once_a_newer_save_is_checked(saves: Saves) -> None:
    saved = saves.commit(free=0)
    before = saves.disk.now
    checked_meanwhile(saves)
    saves.look(saved)
    assert saves.disk.now == before


def test_where_there_is_plenty_of_space_no_manifest_is_read(
    saves: Saves, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A manifest of thousands of ranks takes rank 0 long."""
    with monkeypatch.context() as patch:
        patch.setattr(space_watch, "need_of", fail)
        saves.look(saves.commit(free=NEEDED * 1000))
    saves.look(saves.commit(free=10))
    assert WILL_NOT in caplog.text
