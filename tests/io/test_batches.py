"""Items are divided into batches of a limited size, in order."""

from __future__ import annotations

import pytest

from mcore_ckpt.io.batches import batches


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([2, 3, 1], [[2, 3], [1]]),  # a batch may be exactly full
        ([9, 1, 9], [[9], [1], [9]]),  # an item with more bytes is a batch by itself
        ([0, 0, 5, 0], [[0, 0, 5, 0]]),
    ],
)
def test_batches_have_at_most_five_bytes(sizes: list[int], expected: list[list[int]]) -> None:
    assert list(batches(sizes, lambda size: size, 5)) == expected
