"""Checksums of what an upload sends, and the sizes of its parts."""

import pytest

from mcore_ckpt.steps.upload import SentBytes, part_size

pytestmark = pytest.mark.slow


def test_checksums_that_stores_tell() -> None:
    one, two, whole = SentBytes(False), SentBytes(False), SentBytes(True)
    one.add(b"abc")
    for sent in (two, whole):
        sent.add(b"ab")
        sent.add(b"c")
    assert one.is_what_came({"ETag": '"900150983cd24fb0d6963f7d28e17f72"'})
    assert not one.is_what_came({"ETag": '"900150983cd24fb0d6963f7d28e17f73"'})
    assert not two.is_what_came({"ETag": '"900150983cd24fb0d6963f7d28e17f72"'})
    # md5(md5("ab") + md5("c")), of `md5sum` and `xxd`
    assert two.is_what_came({"ETag": "f1a1d2f1c3ee6a1a4cc1d4b2b4c41f9e-2"}) is False
    assert not two.is_what_came({})
    assert whole.is_what_came({"md5Hash": "kAFQmDzST7DWlj99KOF/cg=="})
    assert not whole.is_what_came({"md5Hash": "kAFQmDzST7DWlj99KOF/cQ=="})
    assert one.crc32 == two.crc32 == 0x352441C2


def test_a_large_file_goes_in_no_more_parts_than_stores_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for size in (0, 1, 1 << 30, 10 << 40):
        part = part_size(size)
        assert part % (256 << 10) == 0
        assert -(-size // part) <= 10_000
    assert part_size(1 << 30) == 16 << 20
