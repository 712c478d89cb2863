import itertools
import time
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.io import _native
from tests.native.layouts import Reference, references


@settings(deadline=None)
@given(reference=references(), data=st.data())
def test_crcs_agree_with_zlib(reference: Reference, data: st.DataObject) -> None:
    layout = reference.layout()
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, reference.end), max_size=5))), reference.end]
    parts = [reference.part_crcs(start, stop) for start, stop in itertools.pairwise(cuts)]
    assert [layout.part_count(start, stop) for start, stop in itertools.pairwise(cuts)] == [len(part) for part in parts]
    blocks = layout.join(cuts, parts)
    assert blocks == reference.part_crcs(0, reference.end)
    assert layout.slot_crcs(blocks) == reference.slot_crcs
    assert layout.file_crc(reference.slot_crcs) == zlib.crc32(reference.data)
    assert layout.foreign_descriptors(cuts) == reference.foreign(cuts)


LAYOUT = {"offsets": [4], "nbytes": [10], "descriptor_crc_at": [16], "gaps": [(0, b"abcd"), (14, bytes(6))], "end": 20}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": [4, 5]}, "2 offsets, 1 sizes"),
        ({"offsets": [3]}, "do not tile it, at 3"),
        ({"nbytes": [9]}, "do not tile it, at 13"),
        ({"nbytes": [17]}, "slot 0 goes beyond the end"),
        ({"nbytes": [2**63]}, "slot 0 goes beyond the end"),
        ({"gaps": [(0, b"abcd")]}, "do not tile it, at 14"),
        ({"gaps": [(14, bytes(6)), (0, b"abcd")]}, "do not tile it, at 0"),
        ({"gaps": [(0, b"abcd"), (14, bytes(7))]}, "the gap at 14 goes beyond the end"),
        ({"end": 21}, "do not tile it, at 20"),
        ({"descriptor_crc_at": [-2]}, "the descriptor of slot 0 is not after it"),
        ({"descriptor_crc_at": [0]}, "is not after it"),
        ({"descriptor_crc_at": [17]}, "is not in a gap"),
        ({"descriptor_crc_at": [2**40]}, "is not in a gap"),
        ({"offsets": [4, 4], "nbytes": [10, 0], "descriptor_crc_at": [16, -1]}, "slot 1 begins before"),
        ({"offsets": [4, 14], "nbytes": [10, 0], "descriptor_crc_at": [16, 14]}, "descriptors overlap at 16"),
        ({"block_bytes": 0}, "block_bytes must not be 0"),
    ],
)
def test_what_is_no_file_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.FileLayout(**{"block_bytes": 4, **LAYOUT, **change})  # type: ignore[arg-type]


def test_counts_that_do_not_fit_are_refused() -> None:
    layout = _native.FileLayout(**LAYOUT, block_bytes=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 CRCs for the 3 parts from 0 to 20"):
        layout.join([0, 20], [[1, 2]])
    with pytest.raises(ValueError, match="1 lists of CRCs for 3 cuts"):
        layout.join([0, 5, 20], [[1]])
    with pytest.raises(ValueError, match="cuts do not go from 0 to 20"):
        layout.join([0, 5], [[1]])
    with pytest.raises(ValueError, match="cuts are not ascending"):
        layout.join([0, 9, 5, 20], [[], [], []])
    with pytest.raises(ValueError, match="2 CRCs for 3 blocks"):
        layout.slot_crcs([1, 2])
    with pytest.raises(ValueError, match="0 CRCs for 1 slots"):
        layout.file_crc([])


def test_ten_thousand_small_tensors_cost_little() -> None:
    reference = Reference([4000] * 10_000, [60] * 10_000, 100, 1 << 20)
    layout, parts = reference.layout(), reference.part_crcs(0, reference.end)
    start = time.process_time()
    crc = layout.file_crc(layout.slot_crcs(layout.join([0, reference.end], [parts])))
    assert time.process_time() - start < 0.1  # a few ms; an algorithm in the square of it takes seconds
    assert crc == zlib.crc32(reference.data)
