"""A folder of a tool replaces another one, or leaves it where it is."""

import errno
import os
from pathlib import Path

import pytest

from mcore_ckpt.io import files
from mcore_ckpt.steps import commit, new_folder
from mcore_ckpt.steps.new_folder import Replaceable, publish_folder, replace_entry

ATTEMPT = "a" * 32


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("exchanges", [False, True])
def test_a_folder_that_is_replaced_stays_if_the_new_one_cannot_come(
    fails: bool, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, staging = tmp_path / "model", tmp_path / f".staging-{ATTEMPT}"
    for folder in (path, staging):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    rename = os.rename

    def exchange(first: Path, second: Path) -> bool:
        if exchanges and fails:
            raise OSError(errno.EIO, "no")
        return (
            exchanges and (rename(first, tmp_path / "x"), rename(second, first), rename(tmp_path / "x", second)) != ()
        )

    def rename_once(source: Path, target: Path) -> None:
        if fails and source == staging:
            raise OSError(errno.EIO, "no")
        rename(source, target)

    monkeypatch.setattr(commit, "exchange", exchange)
    monkeypatch.setattr(os, "rename", rename_once)
    replaceable = Replaceable(True, "a folder", lambda folder: True)
    if fails:
        with pytest.raises(OSError, match="no"):
            publish_folder(staging, path, ATTEMPT, replaceable)
        assert (path / "file").read_text() == "model"
    else:
        publish_folder(staging, path, ATTEMPT, replaceable)
        assert (path / "file").read_text() == staging.name
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_folder_in_place_whose_name_is_not_synced_is_told(
    is_replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new folder is there, so nothing may say that the target is as it was."""
    path, staging = tmp_path / "model", tmp_path / f".staging-{ATTEMPT}"
    for folder in (path, staging) if is_replaced else (staging,):
        folder.mkdir()
        (folder / "file").write_text(folder.name)

    def fail(_: Path) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(new_folder, "sync_dir", fail)
    publish_folder(staging, path, ATTEMPT, Replaceable(True, "a folder", lambda folder: True))
    assert (path / "file").read_text() == staging.name
    assert caplog.messages == [f"{path} is in place, but a power loss might undo that: [Errno 5] no"]


def written(folder: Path) -> Path:
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_text(folder.name)
    return folder


def test_an_entry_is_replaced_in_an_order_that_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, new, old = written(tmp_path / "path"), written(tmp_path / "new"), tmp_path / "old"
    calls: list[tuple[str, ...]] = []
    rename = os.rename

    def note_rename(source: Path, target: Path) -> None:
        calls.append(("rename", source.name, target.name))
        rename(source, target)

    monkeypatch.setattr(os, "rename", note_rename)
    for module in (files, new_folder):
        monkeypatch.setattr(module, "sync_dir", lambda folder: calls.append(("sync", folder.name)))
    replace_entry(path, new, old)
    assert calls == [
        ("sync", "new"),
        ("sync", "below"),
        ("rename", "path", "old"),
        ("rename", "new", "path"),
        ("sync", tmp_path.name),
    ]
    assert (path / "below" / "file").read_text() == "new"
    assert (old / "below" / "file").read_text() == "path"


@pytest.mark.parametrize("fails_at", ["path", "new"])
def test_an_entry_that_cannot_be_replaced_stays(fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, new, old = written(tmp_path / "path"), written(tmp_path / "new"), tmp_path / "old"
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if source.name == fails_at:
            raise OSError(errno.EBUSY, "busy")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="busy"):
        replace_entry(path, new, old)
    assert (path / "below" / "file").read_text() == "path"
    assert not old.exists()
