"""No secret of a URL or of options leaves by any exit: errors, logs, reprs, events, reports, JSON, files."""

import json
import logging
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier, pin
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointError, RemoteError, from_record, to_record
from mcore_ckpt.events import ErrorText, Event, Failed, Uploaded
from mcore_ckpt.io import retries
from mcore_ckpt.io.mounts import parse_mount
from mcore_ckpt.io.store import Store
from mcore_ckpt.save import rank_files
from mcore_ckpt.steps.remote_steps import RemoteSteps
from tests.doors.test_errors import manager_of
from tests.support.remote_store import Outage, failing
from tests.support.told_events import GOOD

WORD = "S3CRET"
URL = "simplecache::s3://key:S3CRET@bucket/run?sig=S3CRET"
# A store that exists, under a URL with all kinds of secrets.
REMOTE = "memory://user:S3CRET-own@store/run?token=S3CRET-too"
# What a library says of it.
SAID = "403 for url: https://user:S3CRET@host/run?sig=S3CRET, with {'key': 'S3CRET', 'secret': 'S3CRET'}"


@pytest.fixture(autouse=True)
def _empty_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    MemoryFileSystem.store.clear()
    monkeypatch.setattr(retries, "REMOTE_PAUSE_S", 0.0)
    yield
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize(
    ("call", "readable"),
    [
        (lambda root: CheckpointConfig(remote=URL), "bucket/run"),
        (lambda root: CheckpointConfig(remote={"url": URL, "secret": WORD}), "bucket/run"),
        (lambda root: CheckpointConfig(remote=URL.encode()), "bucket/run"),
        (lambda root: CheckpointConfig(remote=Path(URL)), "bucket/run"),
        (lambda root: CheckpointConfig(remote=f"key:{WORD}/{WORD}@bucket/run"), "bucket/run"),
        (lambda root: CheckpointConfig(roles=URL), "bucket/run"),
        (lambda root: CheckpointConfig(max_to_keep=URL), "bucket/run"),
        (lambda root: CheckpointConfig(listeners=(URL,)), "bucket/run"),
        (lambda root: CheckpointConfig.from_dict({"fast": {"folder": URL}}), "bucket/run"),
        (lambda root: CheckpointConfig.from_dict([{"token": WORD, "remote": URL}]), "bucket/run"),
        (lambda root: CheckpointManager(URL, None), "bucket/run"),
        (lambda root: manager_of(root, remote=f"nosuch://key:{WORD}@bucket/run?a={WORD}"), "bucket/run"),
        (lambda root: manager_of(root).save(1, path=URL), "bucket/run"),
        (lambda root: manager_of(root).load(path=URL), "bucket/run"),
        (lambda root: pin(URL, 1), "bucket/run"),
    ],
)
def test_an_error(call: Callable[[Path], object], readable: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        call(tmp_path)
    assert readable in str(caught.value)
    told = ErrorText.of(caught.value)
    assert WORD not in repr((caught.value, pickle.dumps(caught.value), to_record(caught.value, 3), told))


def test_an_error_of_a_library_on_another_rank() -> None:
    record = to_record(OSError(SAID), 3)
    assert WORD not in repr(record)
    assert "https://***@host/run" in str(from_record(record, CheckpointError))


def test_a_store_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    remote = RemoteSteps(Store(REMOTE))
    monkeypatch.setattr(retries, "REMOTE_TRIES", 2)
    with (
        caplog.at_level(logging.INFO),
        failing(remote, before=lambda *_: (_ for _ in ()).throw(Outage(SAID))),
        pytest.raises(RemoteError, match=r"memory://store/run: .*https://\*\*\*@host/run") as caught,
    ):
        remote.steps()
    assert "trying again" in caplog.text
    assert WORD not in caplog.text + str(caught.value)


def test_a_file_that_a_store_does_not_have() -> None:
    def work() -> None:
        raise FileNotFoundError("https://user:S3CRET@host/run/manifest.json?sig=S3CRET")

    with pytest.raises(FileNotFoundError, match=r"https://\*\*\*@host/run/manifest.json") as caught:
        Store(REMOTE).persist("reading", work)
    assert WORD not in str(caught.value)


def test_a_listener_that_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Event) -> None:
        try:
            raise OSError(SAID)
        except OSError as error:
            raise RuntimeError("no answer from http://user:S3CRET@collector:4318/v1") from error

    manager = manager_of(tmp_path, listeners=[broken])
    manager.save(1)
    manager.close()
    assert "Traceback" in caplog.text
    assert "http://***@collector:4318/v1" in caplog.text
    assert WORD not in caplog.text
    assert not any(record.exc_info for record in caplog.records)


def test_a_save_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(SAID)

    got: list[Event] = []
    monkeypatch.setattr(rank_files, "sync_names", fail)
    manager = manager_of(tmp_path, listeners=[got.append])
    with pytest.raises(CheckpointError) as caught:
        manager.save(1)
    manager.close()
    (failed,) = [event for event in got if isinstance(event, Failed)]
    assert "https://***@host/run" in failed.error.message
    assert failed.error.stacktrace
    assert WORD not in repr((failed, caught.value))


def test_a_repr() -> None:
    config = CheckpointConfig(remote=REMOTE, listeners=[partial(print, "https://user:S3CRET@hook/run?key=S3CRET")])
    assert "https://***@hook/run" in repr(config)
    assert WORD not in f"{config} {config!r} {[config]} {FastTier('/dev/shm/run')}"


def test_what_is_uploaded_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """In events, in reports, in logs, in `--json`, and in the files that are written."""
    caplog.set_level(logging.DEBUG, "mcore_ckpt")
    got: list[Event] = []
    manager = manager_of(tmp_path, remote=REMOTE, listeners=[got.append])
    handle = manager.save(GOOD)
    manager.close()
    (uploaded,) = [event for event in got if isinstance(event, Uploaded)]
    assert str(uploaded.path).startswith(f"memory://store/run/global_steps_{GOOD}/")
    assert main(["inspect", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    shutil.rmtree(tmp_path / f"global_steps_{GOOD}")
    restarted = manager_of(tmp_path, remote=REMOTE, listeners=[got.append])
    loaded = restarted.load()
    restarted.close()
    assert str(loaded.report.path).startswith("memory://store/run/")
    assert WORD not in repr((got, handle, handle.report, loaded.report))
    assert WORD not in caplog.text
    capsys.readouterr()
    for arguments in ([], ["--json"]):
        assert main(["list", str(tmp_path), "--remote", REMOTE, *arguments]) == 0
        captured = capsys.readouterr()
        assert WORD not in captured.out + captured.err
    assert json.loads(captured.out)["steps"][0]["path"] == f"memory://store/run/global_steps_{GOOD}"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and WORD.encode() in path.read_bytes()]
    assert MemoryFileSystem.store
    assert not [name for name, file in MemoryFileSystem.store.items() if WORD.encode() in file.getvalue()]


def test_what_is_wrong_in_a_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["list", ".", f"--remoet={URL}"], ["list", URL], ["watch", ".", "--until", URL], [URL]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        said = capsys.readouterr().err
        assert "bucket/run" in said
        assert WORD not in said
    assert main(["list", str(tmp_path), "--remote", URL]) == 2
    assert WORD not in capsys.readouterr().err


def test_what_is_mounted() -> None:
    mount = parse_mount("27 1 0:60 / /mnt rw - cifs //user:S3CRET@server/share rw,username=me,password=S3CRET")
    assert str(mount) == "cifs (//***@server/share on /mnt)"
    assert mount.options == {"username": "me", "password": "***"}
