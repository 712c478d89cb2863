"""Folders that are removed: all of what is in them, nothing of what links in them lead to."""

import os
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.io.removal import remove_tree

MANY = 100  # enough that removals overlap


def make_tree(folder: Path) -> None:
    for name in ("a", "a/b", "c"):
        (folder / name).mkdir(parents=True)
        for number in range(MANY):
            (folder / name / str(number)).write_text("x")


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
