"""What a manager tells its listeners of saves, loads, deletions and uploads."""

import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import CheckpointConfig, delivery
from mcore_ckpt.errors import CheckpointError, CheckpointNotFoundError, CommitError, InvalidTypeError
from mcore_ckpt.events import Captured, Committed, Deleted, ErrorText, Event, Failed, Loaded, Started, Uploaded, Written
from mcore_ckpt.steps import upload_queue
from tests.doors.test_delivery import Held, held
from tests.doors.test_errors import manager_of
from tests.support.told_events import DISK_ERROR, broken_disk
from tests.support.waiting import LONG_S

__all__ = ["held"]


def kinds(events: list[Event]) -> list[type[Event]]:
    return [type(event) for event in events]


def of_step(events: list[Event], step: int | None) -> list[Event]:
    return [event for event in events if event.step == step]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_save_is_told_from_its_start_to_its_commit(tmp_path: Path, is_async: bool) -> None:
    got: list[Event] = []
    manager = manager_of(tmp_path, async_save=is_async, listeners=[got.append])
    before = time.time()
    handle = manager.save(1)
    report = handle.wait()
    manager.wait()
    started, captured, written, committed = got
    assert isinstance(started, Started)
    assert isinstance(captured, Captured)
    assert isinstance(written, Written)
    assert isinstance(committed, Committed)
    assert {(e.step, e.role, e.rank, e.path) for e in got} == {(1, "actor", 0, tmp_path / "global_steps_1" / "actor")}
    assert captured.nbytes == written.nbytes == committed.nbytes == report.nbytes
    assert (committed.seconds, committed.stall_s) == (pytest.approx(report.seconds), report.stall_s)
    moments = [event.time for event in got]
    assert moments == sorted(moments)
    # By two clocks, between whose readings the machine may do something else.
    assert before - 1 < moments[0] <= moments[-1] < time.time() + 1
    phases = {phase.name: phase for phase in committed.phases}
    assert list(phases) == ["wait", "plan", "copy", "write", "commit"]
    assert phases["wait"].start == started.time
    assert phases["write"].seconds == pytest.approx(report.write_s) == pytest.approx(written.seconds)
    assert phases["commit"].seconds == pytest.approx(report.commit_s)
    assert phases["copy"].seconds == pytest.approx(report.copy_s)
    ends = {name: phase.start + phase.seconds for name, phase in phases.items()}
    assert ends["plan"] <= phases["copy"].start + 1e-6  # seconds since the epoch have steps of 0.2 µs
    assert ends["write"] == pytest.approx(written.time) == pytest.approx(phases["commit"].start)
    assert ends["commit"] == pytest.approx(committed.time) == pytest.approx(started.time + committed.seconds)
    assert pickle.loads(pickle.dumps(got)) == got
    manager.close()


def test_a_failed_save_says_where_and_why(tmp_path: Path, is_async: bool) -> None:
    got: list[Event] = []
    manager = manager_of(tmp_path, async_save=is_async, if_failed="warn", listeners=[got.append])
    with broken_disk(), pytest.raises(CommitError):
        manager.save(1).wait()
    manager.save(2).wait()
    manager.close()
    first = of_step(got, 1)
    assert kinds(first)[0] is Started
    failed = first[-1]
    assert isinstance(failed, Failed)
    assert sum(isinstance(event, (Failed, Committed)) for event in first) == 1
    assert (failed.operation, failed.error.type) == ("save", "mcore_ckpt.errors.CommitError")
    assert DISK_ERROR in failed.error.message
    assert "in write" in failed.error.stacktrace
    assert failed.phases[-1].name == "write"
    assert failed.phases[-1].start + failed.phases[-1].seconds == pytest.approx(failed.time)
    assert failed.time == pytest.approx(failed.phases[0].start + failed.seconds)
    assert kinds(of_step(got, 2)) == [Started, Captured, Written, Committed]


def test_a_save_that_cannot_begin_is_told_as_failed_and_one_with_wrong_arguments_is_not(tmp_path: Path) -> None:
    got: list[Event] = []
    manager = manager_of(tmp_path, listeners=[got.append])
    (tmp_path / "global_steps_1").write_text("in the way")
    with pytest.raises(CheckpointError):
        manager.save(1)
    with pytest.raises(ValueError, match="step is -1"):
        manager.save(-1)
    manager.close()
    started, failed = got
    assert isinstance(started, Started)
    assert isinstance(failed, Failed)
    assert (failed.step, failed.phases[-1].name) == (1, "plan")


def test_the_next_save_after_a_background_failure_is_told_as_failed(tmp_path: Path) -> None:
    got: list[Event] = []
    manager = manager_of(tmp_path, async_save=True, listeners=[got.append])
    with broken_disk():
        manager.save(1)
        manager._background.wait_for_save()
    with pytest.raises(CommitError, match="of step 1"):
        manager.save(2)
    manager.close()
    assert kinds(of_step(got, 2)) == [Started, Failed]


def test_loads_are_told_with_their_step_and_bytes(tmp_path: Path) -> None:
    got: list[Event] = []
    manager = manager_of(tmp_path, listeners=[got.append])
    manager.save(1)
    manager.wait()
    got.clear()
    result = manager.load()
    with pytest.raises(CheckpointNotFoundError):
        manager.load(step=7)
    with pytest.raises(CheckpointNotFoundError):
        manager.load(path=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="use one"):
        manager.load(step=7, path=tmp_path)
    manager.close()
    loaded, *failures = got
    assert isinstance(loaded, Loaded)
    report = result.report
    assert (loaded.step, loaded.path, loaded.nbytes, loaded.seconds, loaded.skipped) == (
        1,
        report.path,
        report.nbytes,
        report.seconds,
        (),
    )
    assert [(e.step, e.path) for e in failures] == [(7, tmp_path), (None, tmp_path / "nowhere")]
    assert all(isinstance(event, Failed) and event.operation == "load" and not event.phases for event in failures)
    assert [(event.role, event.rank) for event in got] == 3 * [("actor", 0)]


@pytest.mark.parametrize("has_listener", [True, False])
def test_only_a_listener_makes_a_load_format_its_traceback(
    has_listener: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formatted: list[BaseException] = []
    of = ErrorText.of
    monkeypatch.setattr(ErrorText, "of", lambda error: (formatted.append(error), of(error))[1])
    got: list[Event] = []
    manager = manager_of(tmp_path, listeners=[got.append] if has_listener else [])
    with pytest.raises(CheckpointNotFoundError):
        manager.load(step=7)
    manager.close()
    assert len(formatted) == len(got) == has_listener


def test_old_steps_and_uploads_are_told_where_they_happen(tmp_path: Path) -> None:
    got: list[Event] = []
    remote = tmp_path / "remote"
    manager = manager_of(tmp_path / "local", max_to_keep=1, remote=f"file://{remote}", listeners=[got.append])
    handles = []
    for step in (1, 2):
        handles.append(manager.save(step))
        manager.wait()
    manager.close()
    deleted = {event.place: event for event in got if isinstance(event, Deleted)}
    assert {place: (event.step, str(event.path).removeprefix("file://")) for place, event in deleted.items()} == {
        "local": (1, str(tmp_path / "local" / "global_steps_1")),
        "remote": (1, str(remote / "global_steps_1")),
    }
    assert [path.name for path in sorted(remote.glob("global_steps_*"))] == ["global_steps_2"]
    uploads = [event for event in got if isinstance(event, Uploaded)]
    assert [event.step for event in uploads] == [1, 2]
    for event, handle in zip(uploads, handles, strict=True):
        assert handle.upload is not None
        assert (event.nbytes, event.seconds) == (handle.upload.nbytes, handle.upload.seconds)
    assert (Path(str(uploads[1].path).removeprefix("file://")) / "manifest.json").exists()


def test_an_upload_that_fails_is_told_without_the_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Event] = []
    manager = manager_of(tmp_path, remote=f"file://{tmp_path}/remote", listeners=[got.append])
    # What fsspec says may have the URL as the user gave it.
    monkeypatch.setattr(manager._remote.store, "_secrets", ["hunter2"])  # type: ignore[union-attr]

    def refuse(*_: Any) -> None:
        raise OSError("no answer from hunter2")

    monkeypatch.setattr(upload_queue.UploadQueue, "_upload_missing", refuse)
    manager.save(1)
    manager.close()
    (failed,) = [event for event in got if isinstance(event, Failed)]
    assert (failed.operation, failed.step) == ("upload", 1)
    assert "no answer" in failed.error.message
    assert "hunter2" not in repr(failed)


@pytest.mark.parametrize("is_slow", [True, False], ids=["blocks for ever", "raises"])
def test_a_bad_listener_touches_no_save(
    is_slow: bool, tmp_path: Path, is_async: bool, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_slow:
        monkeypatch.setattr(delivery, "DRAIN_WAIT_S", 0.01)
    got: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("broken")

    manager = manager_of(tmp_path, async_save=is_async, listeners=[held if is_slow else broken, got.append])
    for step in (1, 2):
        assert manager.save(step).wait(LONG_S).step == step
    ended = threading.Thread(target=manager.close, daemon=True)
    ended.start()
    ended.join(LONG_S)
    assert not ended.is_alive()
    assert manager_of(tmp_path).latest_step() == 2
    assert held.is_called.is_set() == is_slow
    if not is_slow:
        assert kinds(of_step(got, 2)) == [Started, Captured, Written, Committed]


def test_an_async_save_does_not_wait_for_a_listener(tmp_path: Path, held: Held) -> None:
    manager = manager_of(tmp_path, async_save=True, listeners=[held])
    handle = manager.save(1)
    assert held.is_called.wait(LONG_S)
    assert handle.wait(LONG_S).step == 1
    held.may_return.set()
    manager.close()
    assert held.steps == [1, 1, 1, 1]


# -- the choice -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listeners", "text"),
    [
        ([print, "tensorboard"], r"listeners\[1\] is 'tensorboard', which cannot be called"),
        ([None], r"listeners\[0\] is None"),
        ([Held], r"listeners\[0\] is the class Held: use an object of it"),
        (print, "use a list of listeners"),
        ("print", "use a list of listeners"),
        (3, "listeners is 3"),
    ],
)
def test_what_is_no_listener_is_named(listeners: Any, text: str) -> None:
    with pytest.raises(InvalidTypeError, match=text):
        CheckpointConfig(listeners=listeners)


def test_a_config_with_listeners_is_compared_and_hashed_as_before() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, event: Event) -> None: ...

    one = Unhashable()
    assert CheckpointConfig(listeners=[one]) == CheckpointConfig(listeners=(one,))  # type: ignore[arg-type]
    assert hash(CheckpointConfig(listeners=(one,))) == hash(CheckpointConfig())
    assert CheckpointConfig(listeners=(one,)) != CheckpointConfig()
    assert CheckpointConfig().listeners == ()
