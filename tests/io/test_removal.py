"""Folders that are removed: all of what is in them, nothing of what links in them lead to."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.io import removal
from mcore_ckpt.io.removal import remove_tree
from tests.support.thread_starts import limit_threads

MANY = 100  # enough that removals overlap
LISTED = 5  # the entries that a folder shows before it fails


def make_tree(folder: Path) -> None:
    for name in ("a", "a/b", "c"):
        (folder / name).mkdir(parents=True)
        for number in range(MANY):
            (folder / name / str(number)).write_text("x")


def refuse_to_read(monkeypatch: pytest.MonkeyPatch, inode: int, step: str) -> None:
    """Makes one folder fail while it is opened, before its first entry is listed, or after some are."""
    opened, scanned = os.open, os.scandir

    def open_other(name: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if step == "open" and os.stat(name, dir_fd=dir_fd).st_ino == inode:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return opened(name, flags, mode, dir_fd=dir_fd)

    @contextmanager
    def scan_other(folder: int) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scanned(folder) as entries:
            yield failing(entries) if os.fstat(folder).st_ino == inode else entries

    def failing(entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
        if step != "open":
            yield from islice(entries, LISTED if step == "read on" else 0)
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "open", open_other)
    monkeypatch.setattr(os, "scandir", scan_other)


def test_all_is_gone(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    make_tree(tmp_path / "other")
    for name, target in (("file", "other/c/1"), ("folder", "other/a"), ("nowhere", "gone")):
        (tmp_path / "tree" / "a" / name).symlink_to(tmp_path / target)
    remove_tree(tmp_path / "tree")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert sum(path.is_file() for path in (tmp_path / "other").rglob("*")) == 3 * MANY


def test_a_link_instead_of_a_folder_stays(tmp_path: Path) -> None:
    make_tree(tmp_path / "other")
    (tmp_path / "tree").symlink_to(tmp_path / "other")
    remove_tree(tmp_path / "tree")
    assert (tmp_path / "tree" / "c" / "1").exists()


def test_what_cannot_be_removed_stays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path / "tree")
    unlink = os.unlink

    def refused(name: str, **where: Any) -> None:
        if name == "7":
            raise PermissionError(name)
        unlink(name, **where)

    monkeypatch.setattr(os, "unlink", refused)
    remove_tree(tmp_path / "tree")
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["tree/a/7", "tree/a/b/7", "tree/c/7"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    remove_tree(tmp_path / "tree")


@pytest.mark.parametrize("step", ["open", "list", "read on"])
def test_what_cannot_be_read_keeps_nothing_else(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tree with one bad folder, only that folder and those that it is in stay."""
    make_tree(tmp_path / "tree")
    make_tree(tmp_path / "tree" / "z")
    bad = (tmp_path / "tree" / "a").stat().st_ino
    with monkeypatch.context() as patch:
        refuse_to_read(patch, bad, step)
        remove_tree(tmp_path / "tree")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert {"tree", "tree/a"} <= left
    assert {path for path in left if not path.startswith("tree/a/")} == {"tree", "tree/a"}
    listed_before = LISTED if step == "read on" else 0
    assert len(list((tmp_path / "tree" / "a").iterdir())) == MANY + 1 - listed_before


def test_an_empty_folder_that_cannot_be_read_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree" / "a").mkdir(parents=True)
    with monkeypatch.context() as patch:
        refuse_to_read(patch, (tmp_path / "tree" / "a").stat().st_ino, "open")
        remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_threads_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path / "tree")
    limit_threads(monkeypatch, 0)
    remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_raised_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path / "tree")

    def fails(*arguments: Any, **more: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(removal, "results_of", fails)
    remove_tree(tmp_path / "tree")
    assert (tmp_path / "tree").exists()
