"""How much space there is, and what fits: the decision, what systems tell that cannot be true, and quotas."""

import ctypes
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.io import disk_space, quotas
from mcore_ckpt.io.disk_space import Amount, DiskSpace, Limit, Need, space_of
from mcore_ckpt.io.quotas import Usage
from tests.support.small_disks import mounted

SIZES = st.lists(st.integers(0, 1 << 40), max_size=8).map(tuple)
NEEDS = st.builds(Need, SIZES, st.frozensets(st.sampled_from("abcdef")), st.integers(0, 1 << 40))
BLOCKS = st.sampled_from([1, 512, 4096, 65536])


@given(NEEDS, BLOCKS, st.sampled_from([0, 4096]))
def test_the_exact_space_is_enough_and_one_less_is_not(need: Need, block: int, folder: int) -> None:
    amount = DiskSpace((), block, folder).taken_by(need)
    for spare in (0, 1, 1 << 50):
        limits = (Limit("nbytes", amount.nbytes + spare, "disk"), Limit("entries", amount.entries + spare, "disk"))
        assert DiskSpace(limits).shortage(amount) is None
    for kind in ("nbytes", "entries"):
        wide = Limit("nbytes" if kind == "entries" else "entries", 1 << 60, "disk")
        short = Limit(kind, getattr(amount, kind) - 1, "disk")  # type: ignore[arg-type]
        assert DiskSpace((wide, short)).shortage(amount) is short


@given(NEEDS, BLOCKS)
def test_what_is_taken_is_no_less_than_the_bytes_and_whole_blocks(need: Need, block: int) -> None:
    amount = DiskSpace((), block).taken_by(need)
    least = sum(need.sizes) + need.loose
    assert least <= amount.nbytes < least + block * len(need.sizes) + 1
    assert (amount.nbytes - need.loose) % block == 0
    assert amount.entries == len(need.sizes) + len(need.folders)


@given(st.lists(NEEDS, max_size=4), BLOCKS)
def test_a_sum_is_what_its_parts_take_with_each_folder_once(needs: list[Need], block: int) -> None:
    place = DiskSpace((), block, folder_bytes=4096)
    whole, parts = place.taken_by(Need.sum(needs)), [place.taken_by(need) for need in needs]
    again = sum(len(need.folders) for need in needs) - len(frozenset().union(*(need.folders for need in needs)))
    assert whole.nbytes == sum(part.nbytes for part in parts) - 4096 * again
    assert whole.entries == sum(part.entries for part in parts) - again


def test_no_space_is_described_with_numbers() -> None:
    amount = Amount(2_000_000, 12)
    assert Limit("nbytes", 1_500, "disk").describe(amount) == (
        "2,000,000 bytes are needed, but only 1,500 bytes are free (disk)"
    )
    assert Limit("entries", 3, "disk").describe(amount) == (
        "12 files and folders are needed, but only 3 are free (disk)"
    )


# -- what systems tell ------------------------------------------------------------------------------------------


# Of os.statvfs_result, in its order.
FIELDS = [
    "f_bsize",
    "f_frsize",
    "f_blocks",
    "f_bfree",
    "f_bavail",
    "f_files",
    "f_ffree",
    "f_favail",
    "f_flag",
    "f_namemax",
]


def told(monkeypatch: pytest.MonkeyPatch, folder: Path, **numbers: int) -> dict[str, int]:
    """The limits of a folder whose system tells these numbers."""
    there = os.statvfs(folder)
    values = [numbers.get(name, getattr(there, name)) for name in FIELDS]
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: os.statvfs_result(values))
    return {limit.kind: limit.free for limit in space_of(folder).limits}


HUGE = (1 << 64) - 5


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"f_blocks": 0, "f_bfree": 0, "f_bavail": 0}, None),
        ({"f_blocks": 100, "f_bfree": HUGE, "f_bavail": HUGE}, None),
        ({"f_blocks": 100, "f_bfree": 0, "f_bavail": 0}, 0),
        ({"f_blocks": 100, "f_bfree": 7, "f_bavail": 7}, 7 * 4096),
    ],
    ids=["unknown", "below-nothing", "full", "known"],
)
def test_bytes_that_a_system_tells(
    tmp_path: Path, numbers: dict[str, int], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_space, "_magic_of", lambda descriptor: 0x6969)  # NFS
    assert told(monkeypatch, tmp_path, f_frsize=4096, **numbers).get("nbytes") == expected


@pytest.mark.parametrize(
    ("files", "free", "expected"), [(0, 0, None), (10, HUGE, None), (10, 0, 0), (10, 3, 3)], ids=str
)
def test_files_that_a_system_tells(
    tmp_path: Path, files: int, free: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = told(monkeypatch, tmp_path, f_files=files, f_ffree=free, f_favail=free)
    assert found.get("entries") == expected


EXACT = {"ext": 0xEF53, "xfs": 0x58465342, "tmpfs": 0x01021994}
# Of linux/magic.h and the sources of the file systems. Those that are not listed anywhere are like the unknown one.
INEXACT = {
    "nfs": 0x6969,
    "lustre": 0x0BD00BD0,
    "gpfs": 0x47504653,
    "ceph": 0x00C36400,
    "beegfs": 0x19830326,
    "cifs": 0xFF534D42,
    "9p": 0x01021997,
    "overlay": 0x794C7630,
    "fuse": 0x65735546,
    "btrfs": 0x9123683E,
    "zfs": 0x2FC12FC1,
    "f2fs": 0xF2F52010,
    "bcachefs": 0xCA451A4E,
    "unknown": 0x12345678,
    "not told": 0,
}


@pytest.mark.parametrize("name", [*EXACT, *INEXACT])
def test_only_exact_file_systems_are_certain(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may compress, or count in units of their own: NFS in megabytes, of which no file takes a whole one."""
    monkeypatch.setattr(disk_space, "_magic_of", lambda descriptor: (EXACT | INEXACT)[name])
    told(monkeypatch, tmp_path, f_frsize=8192)
    found = space_of(tmp_path)
    assert (found.block, found.is_certain) == ((8192, True) if name in EXACT else (1, False))


def test_overlay_is_not_certain_though_its_upper_layer_would_be(tmp_path: Path) -> None:
    """Its upper layer is a tmpfs here, whose numbers it tells, but it hides the type."""
    with mounted(tmp_path / "upper", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as disk:
        for name in ("lower", "upper", "work"):
            (disk / name).mkdir()
        options = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
        with mounted(tmp_path / "overlay", "-t", "overlay", "-o", options, "overlay") as overlay:
            found, of_upper = space_of(overlay), space_of(disk)
            assert [limit.free for limit in found.limits] == [limit.free for limit in of_upper.limits]
            assert (found.is_certain, of_upper.is_certain) == (False, True)


def test_a_folder_that_is_not_there_yet_has_the_space_of_the_one_above(tmp_path: Path) -> None:
    assert space_of(tmp_path / "a" / "b").block == space_of(tmp_path).block


# -- quotas. tests/save/test_full_disk.py has real ones where the kernel has them ------------------------------------


def test_what_a_quota_leaves() -> None:
    later, past = int(time.time()) + 1000, 1
    assert Usage(used=10, soft=0, hard=0, ends=0).free is None
    assert Usage(used=10, soft=0, hard=15, ends=0).free == 5
    assert Usage(used=20, soft=0, hard=15, ends=0).free == 0
    assert Usage(used=10, soft=5, hard=15, ends=later).free == 5, "it may be exceeded for some time"
    assert Usage(used=10, soft=5, hard=15, ends=past).free == 0, "which is over"
    assert Usage(used=10, soft=5, hard=0, ends=0).free is None


Call = Callable[[int, int, int, int, "ctypes.Array[ctypes.c_char]"], bool]


def answering(enforced: int, limits: dict[tuple[int, int], tuple[int, ...]]) -> Call:
    """quotactl_fd(2) of a kernel with these flags, and these quotas by type and number."""

    def call(descriptor: int, command: int, type_: int, number: int, buffer: "ctypes.Array[ctypes.c_char]") -> bool:
        if command == (ord("X") << 8) + 5:
            struct.pack_into("=xxH", buffer, 0, enforced)
            return True
        found = limits.get((type_, number))
        if found is not None:
            struct.pack_into("=8QI4x", buffer, 0, *found)
        return found is not None

    return call


@pytest.mark.parametrize(("enforced", "kinds"), [(0b1111, ["user", "group"]), (0b0111, ["user"]), (0b0101, [])])
def test_only_enforced_quotas_count(
    tmp_path: Path, enforced: int, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (os.geteuid(), os.getegid())
    limits = dict.fromkeys(enumerate(own), (8, 4, 1024, 100, 0, 1, 0, 0, 0))
    monkeypatch.setattr(quotas, "_quotactl", answering(enforced, limits))
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        found = list(quotas.quotas_of(descriptor, (), without_0=False))
        assert [quota.kind for quota in found] == kinds
        assert all((quota.nbytes.free, quota.entries.free) == (7 * 1024, 99) for quota in found)
        if 0 in own:
            assert list(quotas.quotas_of(descriptor, (), without_0=True)) == []
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(("exempt", "kinds"), [(False, {"nbytes", "entries"}), (True, set())])
def test_processes_that_may_exceed_quotas(
    tmp_path: Path, exempt: bool, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {(0, os.geteuid()): (8, 0, 1024, 100, 0, 1, 0, 0, 0)}
    monkeypatch.setattr(quotas, "_quotactl", answering(0b11, limits))
    rights = disk_space._Rights(os.geteuid(), frozenset(), may_exceed_quotas=exempt)
    monkeypatch.setattr(disk_space._Rights, "of_this_thread", lambda: rights)
    assert {limit.kind for limit in space_of(tmp_path).limits if "quota of user" in limit.where} == kinds
