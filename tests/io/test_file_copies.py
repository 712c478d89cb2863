"""Copies of files: the bytes that they should have, or an error that names the file."""

import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.file_copies import copy_checked
from tests.support.small_disks import fill, tmpfs

DATA = bytes(range(251)) * 40


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "READ_BYTES", 1000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, len(DATA)])
def test_a_copy(tmp_path: Path, size: int) -> None:
    source, target, seen = tmp_path / "source", tmp_path / "target", []
    source.write_bytes(DATA[:size])
    copy_checked(source, target, size, zlib.crc32(DATA[:size]), seen.append)
    assert target.read_bytes() == DATA[:size]
    assert sum(seen) == size
    assert max(seen, default=0) <= 1000


@pytest.mark.parametrize("at", [0, 1000, len(DATA) - 1])
def test_a_flipped_bit(source: Path, tmp_path: Path, at: int) -> None:
    source.write_bytes(DATA[:at] + bytes([DATA[at] ^ 16]) + DATA[at + 1 :])
    with pytest.raises(CheckpointCorruptError, match=rf"{source}: has {len(DATA)} bytes with CRC .*: it is damaged"):
        copy_checked(source, tmp_path / "target", len(DATA), zlib.crc32(DATA))


@pytest.mark.parametrize("data", [b"", DATA[:-1], DATA + b"x", DATA * 2], ids=["empty", "cut", "longer", "double"])
def test_another_size(source: Path, tmp_path: Path, data: bytes) -> None:
    source.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match=rf"{source}: has \d+ bytes .*not {len(DATA)} with"):
        copy_checked(source, tmp_path / "target", len(DATA), zlib.crc32(DATA))


def test_a_file_that_is_much_too_large_does_not_fill_the_disk(source: Path, tmp_path: Path) -> None:
    """It was replaced by something else, perhaps with holes."""
    os.truncate(source, 1 << 40)
    with pytest.raises(CheckpointCorruptError, match=f"not {len(DATA)} with"):
        copy_checked(source, tmp_path / "target", len(DATA), zlib.crc32(DATA))
    assert (tmp_path / "target").stat().st_size <= len(DATA) + 1000


def test_no_source_and_what_is_no_file(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        copy_checked(tmp_path / "nothing", tmp_path / "target", 5, 0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"where a file should be.*pipe"):
        copy_checked(tmp_path / "pipe", tmp_path / "target", 5, 0)
    assert not (tmp_path / "target").exists()


def test_a_target_that_exists_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"other")
    with pytest.raises(FileExistsError, match="target"):
        copy_checked(source, tmp_path / "target", len(DATA), zlib.crc32(DATA))
    assert (tmp_path / "target").read_bytes() == b"other"


def test_whoever_watches_can_end_it(source: Path, tmp_path: Path) -> None:
    def stop(nbytes: int) -> None:
        raise InterruptedError("the manager was closed")

    with pytest.raises(InterruptedError):
        copy_checked(source, tmp_path / "target", len(DATA), zlib.crc32(DATA), stop)
    assert (tmp_path / "target").stat().st_size == 1000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, tmpfs(Path(folder, "disk"), size="64k") as disk:
        yield disk


def test_a_full_disk(source: Path, disk: Path) -> None:
    """The message names the file that cannot be written, since both paths are at hand."""
    ballast = fill(disk, 56 << 10)
    with pytest.raises(OSError, match=rf"No space left on device: '{disk / 'target'}'"):
        copy_checked(source, disk / "target", len(DATA), zlib.crc32(DATA))
    (disk / "target").unlink()
    ballast.unlink()
    copy_checked(source, disk / "target", len(DATA), zlib.crc32(DATA))
    assert (disk / "target").read_bytes() == DATA
