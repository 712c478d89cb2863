"""How much of a file is written, whatever is reserved for it."""

import os
from pathlib import Path

import pytest

from mcore_ckpt.io.written import written_bytes

MIB = 1 << 20


@pytest.mark.parametrize("written", [0, 64 << 10, MIB])
def test_what_is_reserved_is_not_written(written: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
        file.write(b"x" * written)
    assert path.stat().st_size == MIB
    assert path.stat().st_blocks * 512 >= MIB
    assert written_bytes(path) == written


def test_holes_between(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb", buffering=0) as file:
        for start in (0, MIB, 3 * MIB):
            os.pwrite(file.fileno(), b"x" * 4096, start)
    assert written_bytes(path) == 3 * 4096


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert written_bytes(tmp_path / "nothing") == 0
    (tmp_path / "empty").touch()
    assert written_bytes(tmp_path / "empty") == 0
    os.mkfifo(tmp_path / "pipe")
    assert written_bytes(tmp_path / "pipe") == 0
