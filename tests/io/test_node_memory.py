"""How much a folder in memory can take: of its own size, of the system's memory, of the control group's."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_ckpt.io import node_memory
from mcore_ckpt.io.node_memory import bytes_free, is_memory
from tests.support.small_disks import ext4, fill, tmpfs


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "disk")


def test_a_tmpfs_of_a_size(place: Path) -> None:
    with tmpfs(place, size="1m") as disk:
        assert is_memory(disk)
        assert is_memory(disk / "not" / "yet" / "there")
        assert bytes_free(disk) == bytes_free(disk / "not" / "yet" / "there") == 1 << 20
        fill(disk, 100 << 10)
        assert bytes_free(disk) == (1 << 20) - (100 << 10)


def test_a_disk_is_not_memory(place: Path) -> None:
    with ext4(place) as disk:
        assert not is_memory(disk)
        free = bytes_free(disk)
        space = os.statvfs(disk)
        assert free is not None
        assert free <= space.f_bfree * space.f_frsize


def test_a_tmpfs_that_promises_more_than_the_system_has(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tmpfs(place, size="1m") as disk:
        monkeypatch.setattr(node_memory, "_free_memory", lambda: [70_000, 80_000])
        assert bytes_free(disk) == 70_000
        monkeypatch.setattr(node_memory, "_free_memory", list)
        assert bytes_free(disk) == 1 << 20


def test_free_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the system's own files, of which some may not be there."""
    found = node_memory._free_memory()
    (total,) = (int(line.split()[1]) << 10 for line in Path("/proc/meminfo").read_text().splitlines()[:1])
    assert found
    assert all(nbytes >= 0 for nbytes in found)
    assert found[0] <= total


FILES = {
    "/proc/meminfo": "MemTotal:  100 kB\nMemAvailable:   60 kB\n",
    "/sys/fs/cgroup/memory.max": "50000\n",
    "/sys/fs/cgroup/memory.current": "20000\n",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [60 << 10, 30_000]),
        ({"/sys/fs/cgroup/memory.max": "max\n"}, [60 << 10]),
        ({"/sys/fs/cgroup/memory.max": None}, [60 << 10]),
        ({"/sys/fs/cgroup/memory.current": "60000\n"}, [60 << 10, 0]),
        ({"/proc/meminfo": "MemTotal:  100 kB\n"}, [30_000]),
        ({"/proc/meminfo": None, "/sys/fs/cgroup/memory.max": "nonsense"}, []),
    ],
)
def test_what_limits_memory(
    changes: dict[str, str | None], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FILES | changes

    def read_text(path: Path) -> str:
        text = files.get(str(path))
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read_text)
    assert node_memory._free_memory() == expected
