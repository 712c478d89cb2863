"""Saves that end beside the training: how the trainer hears of them, and that none is lost or waited for for ever."""

import logging
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CommitError
from mcore_ckpt.fast.drains import DrainHandle
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.save.background import BackgroundSaves, SaveHandle
from mcore_ckpt.save.destination import Following
from mcore_ckpt.save.save_times import SaveReport
from tests.support.endings import Ended, run_to_the_end

LONG_S = 30.0
REPORT = SaveReport(7, Path("steps/7"), 1000, 2.0, 0.5, 0.25, 0.25, 1.0, 0.0, 0.5)


class FakeSave:
    """A save that ends when it is told to, as it is told to."""

    step = 7

    def __init__(self, error: Exception | None = None, held: bool = False, deletes: bool = True) -> None:
        self.error, self.deletes = error, deletes
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.deleting, self.may_delete = threading.Event(), threading.Event()
        self.may_delete.set()
        self.stall_s: float | None = -1.0
        self.done = 0
        self.thread: threading.Thread | None = None
        if not held:
            self.may_end.set()

    def finish(self, stall_s: float | None = None) -> tuple[SaveReport, Following]:
        self.stall_s = stall_s
        self.thread = threading.current_thread()
        self.done = 400
        self.begun.set()
        assert self.may_end.wait(LONG_S)
        if self.error is not None:
            raise self.error
        self.done = 1000
        return REPORT, Following(delete=self.delete, deletes=frozenset({1} if self.deletes else ()))

    def delete(self) -> None:
        self.deleting.set()
        assert self.may_delete.wait(LONG_S)

    def progress(self) -> tuple[int, int]:
        return self.done, 1000

    def limit_device_wait(self, seconds: float) -> None:
        """It uses no GPU."""


def handle_of(save: FakeSave) -> SaveHandle:
    return SaveHandle(save.step, save, save.finish)


def saves(warns: bool = False, is_async: bool = True) -> BackgroundSaves:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return BackgroundSaves(Agreement(store, 2, 3, "test", LONG_S), warns, is_async)


def launched(background: BackgroundSaves, save: FakeSave) -> SaveHandle:
    handle = handle_of(save)
    background.launch(handle, 0.125)
    return handle


# -- the handle -------------------------------------------------------------------------------------------------


def test_a_handle_of_a_save_under_way_and_of_one_that_is_committed() -> None:
    background, save = saves(), FakeSave(held=True)
    handle = launched(background, save)
    assert save.begun.wait(LONG_S)
    assert background.busy
    assert (handle.done, handle.committed, handle.report, handle.exception) == (False, False, None, None)
    assert handle.progress == (400, 1000)
    with pytest.raises(TimeoutError, match="after 0 s"):
        handle.wait(0)
    assert not handle.done
    save.may_end.set()
    assert handle.wait(LONG_S) is handle.wait() is handle.report is REPORT
    assert (handle.done, handle.committed, handle.exception) == (True, True, None)
    assert handle.progress == (1000, 1000)
    assert save.stall_s == 0.125
    assert save.thread not in (None, threading.current_thread())
    background.wait_until_idle()
    assert not background.busy
    assert background.failure() is None
    background.raise_failure()


def test_a_synchronous_save_ends_on_the_caller_s_thread() -> None:
    save = FakeSave()
    handle = handle_of(save)
    background = saves(is_async=False)
    assert background.finish(handle, 0.0) is handle
    assert (handle.wait(), save.thread, save.stall_s) == (REPORT, threading.current_thread(), None)
    background.wait_until_idle()
    assert save.deleting.is_set()


def test_a_synchronous_save_waits_for_a_copy_only_until_the_machine_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes during the wait."""
    monkeypatch.setattr(deadlines, "SHORTEST_WAIT_S", 0.0)
    background = saves(is_async=False)

    class HeldDrain(DrainHandle):
        waits = 0

        def wait(self, timeout: float | None = None) -> Path:
            assert timeout is not None, "nothing would end this wait"
            self.waits += 1
            if self.waits == 1:
                background._commits.limit_waits(0.5, even_later=False)
            return super().wait(timeout)

    drain = HeldDrain(7, Path("steps/7"))
    handle = SaveHandle(7, FakeSave(), lambda _: (REPORT, Following(drain=drain)))
    assert background.finish(handle, 0.0).committed
    assert drain.waits > 1
    assert not drain.done


@pytest.mark.parametrize("deletes", [True, False])
def test_only_a_save_with_old_steps_counts_as_a_deletion(deletes: bool) -> None:
    """It counts from its commit on. The thread may come late to one without old steps, and then nothing is deleted."""
    save, background = FakeSave(deletes=deletes), saves(is_async=False)
    save.may_delete.clear()
    assert not background.is_deleting
    background.finish(handle_of(save), 0.0)
    assert background.is_deleting is deletes
    save.may_delete.set()
    background.wait_until_idle()
    assert not background.is_deleting


def test_deleting_old_steps_does_not_hold_up_the_trainer_and_the_next_save_waits_for_it() -> None:
    save = FakeSave()
    save.may_delete.clear()
    background = saves(is_async=False)
    background.finish(handle_of(save), 0.0)
    assert save.deleting.wait(LONG_S), "the trainer is here while the old steps are still being deleted"
    assert not background.busy
    settling = threading.Thread(target=background.wait_until_idle, daemon=True)
    settling.start()
    assert settling.is_alive()
    save.may_delete.set()
    settling.join(LONG_S)
    assert not settling.is_alive()


def test_a_failed_save_deletes_nothing() -> None:
    save = FakeSave(CommitError("rank 1: full"))
    background = saves(is_async=False)
    with pytest.raises(CommitError, match="rank 1: full"):
        background.finish(handle_of(save), 0.0)
    background.wait_until_idle()
    assert not save.deleting.is_set()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (CheckpointCorruptError("rank 1: bad"), CheckpointCorruptError, "rank 1: bad"),
        (CommitError("rank 1: full"), CommitError, "rank 1: full"),
        (KeyError("written"), CommitError, "KeyError: 'written'"),
        (MemoryError(), CommitError, "MemoryError"),
    ],
)
def test_a_handle_of_a_save_that_failed(error: Exception, kind: type[CheckpointError], text: str) -> None:
    """Whatever the error is: the thread must not die of it with nobody told."""
    save = FakeSave(error)
    handle = handle_of(save)
    handle.run(1.0)
    assert (handle.done, handle.committed, handle.report) == (True, False, None)
    assert type(handle.exception) is kind
    assert not save.deleting.is_set(), "old checkpoints may go only if a new one is there"
    assert not handle._failure_seen
    for _ in range(2):
        with pytest.raises(kind, match=text):
            handle.wait()
        assert handle._failure_seen


def test_the_progress_of_a_save_that_failed_is_not_that_of_a_whole_one() -> None:
    handle = handle_of(FakeSave(CommitError("full")))
    handle.run(1.0)
    assert handle.progress == (400, 1000)


def test_an_ended_save_frees_what_it_held() -> None:
    """It has the copies of the state, or the tensors themselves: a trainer that keeps handles must not keep those."""
    save = FakeSave()
    handle = handle_of(save)
    handle.run(None)
    assert save not in vars(handle).values()


def test_committed_is_known_before_old_checkpoints_are_gone() -> None:
    """Deleting may take long, and nobody needs to wait for it: not even for leave to save again."""
    background, save = saves(), FakeSave()
    save.may_delete.clear()
    handle = launched(background, save)
    assert save.deleting.wait(LONG_S)
    assert handle.wait(LONG_S) is REPORT
    assert not background.busy, "a save that is committed is not under way: if_busy would refuse the next one"
    save.may_delete.set()
    background.wait_until_idle()


def test_where_no_thread_is_granted_the_save_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    background, save = saves(), FakeSave()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        handle = launched(background, save)
    assert handle.committed
    assert save.thread is threading.current_thread()
    background.wait_until_idle()


# -- one after the other, and failures ----------------------------------------------------------------------------


def test_settle_waits_for_the_save_and_for_what_follows_it() -> None:
    background, save = saves(), FakeSave(held=True)
    handle = launched(background, save)
    assert save.begun.wait(LONG_S)
    settled = threading.Event()

    def wait() -> None:
        background.wait_until_idle()
        settled.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert not settled.is_set()
    save.may_end.set()
    assert settled.wait(LONG_S)
    assert handle.committed
    assert save.deleting.is_set()
    background.wait_until_idle()
    background.launch(handle_of(FakeSave()), 0.0)
    background.wait_until_idle()


def failed(warns: bool = False) -> tuple[BackgroundSaves, SaveHandle]:
    background = saves(warns)
    handle = launched(background, FakeSave(CheckpointCorruptError("x.pt: is bad")))
    background.wait_until_idle()
    return background, handle


def test_a_failure_is_told_once() -> None:
    background, _ = failed()
    record = background.failure()
    wanted = "an earlier save, of step 7, has failed: rank 2: x.pt: is bad"
    assert record == {"type": "CheckpointCorruptError", "message": wanted, "may_pass": False}
    # Whether it was told, who made the record knows: another rank may have stopped the round.
    assert background.failure() == record
    with pytest.raises(CheckpointCorruptError, match=wanted):
        background.raise_failure()
    assert background.failure() is None
    background.raise_failure()


@pytest.mark.parametrize("how", ["wait", "mark_failure_seen"])
def test_a_failure_that_the_trainer_has_seen_is_not_told_again(how: str) -> None:
    background, handle = failed()
    if how == "wait":
        with pytest.raises(CheckpointCorruptError):
            handle.wait()
    else:
        background.mark_failure_seen()
    assert background.failure() is None
    background.raise_failure()


def test_a_rank_is_named_once() -> None:
    error = CommitError("rank 1: full")
    error.names_rank = True
    background = saves()
    launched(background, FakeSave(error))
    background.wait_until_idle()
    record = background.failure()
    assert record is not None
    assert record["message"] == "an earlier save, of step 7, has failed: rank 1: full"


def test_with_warn_a_failure_is_logged_once_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        background, handle = failed(warns=True)
        assert background.failure() is None
        background.raise_failure()
        assert background.failure() is None
    text = "the save of step 7 has failed; training continues without this checkpoint: x.pt: is bad"
    assert [r.message for r in caplog.records] == [text]
    # Whoever asks is told all the same.
    with pytest.raises(CheckpointCorruptError):
        handle.wait()


def test_a_later_save_that_succeeds_does_not_bring_back_an_old_failure() -> None:
    background, _ = failed()
    background.mark_failure_seen()
    launched(background, FakeSave())
    background.wait_until_idle()
    assert background.failure() is None


# -- the end of the interpreter -----------------------------------------------------------------------------------

IMPORTS = """
import atexit, sys, threading
from pathlib import Path
import torch.distributed as dist
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.save.background import BackgroundSaves, SaveHandle
from mcore_ckpt.save.destination import Following
from mcore_ckpt.errors import CommitError
from mcore_ckpt.save.save_times import SaveReport
from mcore_ckpt.ranks.rounds import Agreement, decide
from mcore_ckpt.delivery import Delivery
from mcore_ckpt.events import Started
"""

PRELUDE = """
class Save:
    def __init__(self, commits, name="saved"):
        self.commits, self.name = commits, name
    def progress(self):
        return 0, 1
    def limit_device_wait(self, seconds):
        assert seconds <= 60
    def finish(self, stall_s):
        ending.wait()
        try:
            decide(self.commits, "saving", dict, lambda records: {}, CommitError)
        except CommitError as error:
            marker.with_name(self.name).write_text(str(error))
            raise
        marker.with_name(self.name).write_text("committed")
        return SaveReport(7, marker, 0, *[0.0] * 7), Following(delete=self.delete, deletes=frozenset({1}))
    def handle(self):
        return SaveHandle(7, self, self.finish)
    def delete(self):
        marker.with_name(self.name + "-deleted").touch()

def commits(world, timeout_s=3600.0):
    return Agreement(dist.HashStore(), 0, world, "test", timeout_s)

ending = threading.Event()
atexit.register(ending.set)  # the last one registered is the first one called
"""


ENDS = {
    "kept": "background = BackgroundSaves(seat := commits(1), False)\nbackground.launch(Save(seat).handle(), 0.0)",
    "dropped": (
        "def train():\n"
        "    seat = commits(1)\n"
        "    BackgroundSaves(seat, False).launch(Save(seat).handle(), 0.0)\n"
        "train()\n"
        "import gc; gc.collect()"
    ),
    "sys.exit": (
        "background = BackgroundSaves(seat := commits(1), False)\n"
        "background.launch(Save(seat).handle(), 0.0)\n"
        "sys.exit(3)"
    ),
    "exception": (
        "background = BackgroundSaves(seat := commits(1), False)\n"
        "background.launch(Save(seat).handle(), 0.0)\n"
        "raise ValueError('the training has failed')"
    ),
    "listeners": (
        "delivery = Delivery([lambda event: marker.with_name('told').write_text('told')])\n"
        "class Told(Save):\n"
        "    def finish(self, stall_s):\n"
        "        report = super().finish(stall_s)\n"
        "        delivery.post(Started(step=7, role='actor', rank=0, path=marker, time=0.0))\n"
        "        return report\n"
        "delivery.post(Started(step=6, role='actor', rank=0, path=marker, time=0.0))\n"
        "delivery.drain()\n"
        "marker.with_name('told').unlink()\n"
        "background = BackgroundSaves(seat := commits(1), False)\n"
        "background.launch(Told(seat).handle(), 0.0)"
    ),
}


EXIT_WAIT_S = 2.0
DEAD_RANKS = f"""
deadlines.EXIT_WAIT_S = {EXIT_WAIT_S}
kept = []
import time
for name in ("actor", "critic", "ref", "reward"):
    seat = commits(2)
    kept.append(BackgroundSaves(seat, False))
    kept[-1].launch(Save(seat, name).handle(), 0.0)
import mcore_ckpt.save.background
ends = mcore_ckpt.save.background._finish_all
atexit.unregister(ends)
def timed():
    began = time.monotonic()
    ending.set()
    ends()
    marker.with_name("took").write_text(str(time.monotonic() - began))
atexit.register(timed)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Ended]]:
    """What has become of each program, and the folder of what it wrote."""
    programs = {**ENDS, "dead ranks": DEAD_RANKS}
    folders = {name: tmp_path_factory.mktemp("program") for name in programs}
    begins = {name: f"marker = Path({str(folders[name] / 'marker')!r})\n" for name in programs}
    texts = {name: begins[name] + PRELUDE + program for name, program in programs.items()}
    found = run_to_the_end(IMPORTS, texts, tmp_path_factory.mktemp("output"))
    return {name: (folders[name], found[name]) for name in programs}


@pytest.mark.parametrize("name", ENDS)
def test_a_save_under_way_at_the_end_of_the_interpreter_is_completed(
    name: str, ended: dict[str, tuple[Path, Ended]]
) -> None:
    folder, program = ended[name]
    assert program.status == {"sys.exit": 3, "exception": 1}.get(name, 0), program.output
    assert (folder / "saved").exists(), program.output
    assert (folder / "saved").read_text() == "committed", program.output
    assert (folder / "saved-deleted").exists()
    assert (folder / "told").exists() == (name == "listeners")


def test_dead_ranks_do_not_hold_up_the_end_of_the_interpreter(ended: dict[str, tuple[Path, Ended]]) -> None:
    """Of several managers, no longer than of one. Their own deadline is an hour."""
    folder, program = ended["dead ranks"]
    assert program.status == 0, program.output
    for name in ("actor", "critic", "ref", "reward"):
        assert "no word from rank 1" in (folder / name).read_text()
    took = float((folder / "took").read_text())
    assert EXIT_WAIT_S / 2 < took < 2 * EXIT_WAIT_S
