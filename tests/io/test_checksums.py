"""Checksums of whole files: the reads behind them may be short."""

import errno
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.io import checksums


@pytest.mark.parametrize("refuses", [True, False], ids=["refuses", "goes on"])
def test_a_direct_read_that_ends_inside_a_page_is_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    data = os.urandom(100_003)
    path = tmp_path / "file"
    path.write_bytes(data)
    real, calls = os.preadv, []

    def preadv(descriptor: int, targets: Sequence[Any], offset: int) -> int:
        calls.append(offset)
        if offset % 4096 and refuses and len(calls) == 2:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, [targets[0][:512]] if len(calls) == 1 else targets, offset)

    monkeypatch.setattr(checksums.os, "preadv", preadv)
    assert checksums.file_crcs([(path, len(data))]) == [zlib.crc32(data)]
    assert calls[:2] == [0, 512]


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    (error,) = checksums.file_crcs([(tmp_path / "file", 5001)])
    assert isinstance(error, OSError)
    assert "ends at byte 5000" in str(error)
