"""Which mount a folder is on, and with which options."""

from pathlib import Path

import pytest

from mcore_ckpt.io.mounts import Mount, mount_of, parse_mount
from tests.support.mounting import mounted

LINE = r"27 1 254:0 /a /my\040disk rw,noatime shared:1 master:2 - nfs4 server:/a\134b rw,vers=4.2,soft,local_lock=none"


def test_parsing() -> None:
    mount = parse_mount(LINE)
    options = {"noatime": "", "vers": "4.2", "soft": "", "local_lock": "none"}
    assert mount == Mount("nfs4", "server:/a\\b", "/my disk", options)
    assert str(mount) == "nfs4 (server:/a\\b on /my disk)"


@pytest.mark.parametrize("line", ["1 1 0:1 / / ro - ext4 /dev/a rw", "1 1 0:1 / / rw - ext4 /dev/a ro"])
def test_read_only_by_mount_or_file_system(line: str) -> None:
    assert parse_mount(line).is_read_only
    assert not parse_mount(line.replace("ro", "rw")).is_read_only


def test_of_two_mounts_at_one_place_the_upper_one_counts(tmp_path: Path) -> None:
    below = mount_of(tmp_path)
    with mounted(tmp_path / "place", "-t", "tmpfs", "first") as place, mounted(place, "-t", "tmpfs", "second"):
        (place / "folder").mkdir()
        (tmp_path / "link").symlink_to(place / "folder")
        for folder in (place, place / "folder", tmp_path / "link"):
            mount = mount_of(folder)
            assert mount is not None
            assert (mount.kind, mount.source, mount.point) == ("tmpfs", "second", str(place))
        assert mount_of(tmp_path) == below


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        mount_of(tmp_path / "missing")
