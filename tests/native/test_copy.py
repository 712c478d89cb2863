import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.io import _native

MEBIBYTE = 1 << 20
POISON = 0xA5


class Scattered:
    """Pieces of one random source buffer to go into one poisoned destination buffer, in a random order."""

    def __init__(self, sizes: list[int], seed: int) -> None:
        order = random.Random(seed)
        self.sizes = sizes
        self.source_starts, source_bytes = self.place(sizes, order)
        self.starts, nbytes = self.place(sizes, order)
        generator = torch.Generator().manual_seed(seed)
        self.source = torch.randint(0, 256, (source_bytes,), dtype=torch.uint8, generator=generator)
        self.destination = torch.full((nbytes,), POISON, dtype=torch.uint8)

    @staticmethod
    def place(sizes: list[int], order: random.Random) -> tuple[list[int], int]:
        """Returns a start for each piece, at any alignment and never touching a neighbour, and the size of all."""
        starts, end = [0] * len(sizes), order.randint(1, 80)
        for i in order.sample(range(len(sizes)), len(sizes)):
            starts[i] = end
            end += sizes[i] + order.randint(1, 80)
        return starts, end

    def expected(self) -> torch.Tensor:
        expected = torch.full_like(self.destination, POISON)
        for start, source_start, size in zip(self.starts, self.source_starts, self.sizes, strict=True):
            expected[start : start + size] = self.source[source_start : source_start + size]
        return expected

    def addresses(self, destination: torch.Tensor, source: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
        to, origin = destination.data_ptr(), source.data_ptr()
        return [to + start for start in self.starts], [origin + start for start in self.source_starts], self.sizes


def check_host(sizes: list[int], seed: int, threads: int) -> None:
    pieces = Scattered(sizes, seed)
    _native.copy_host(*pieces.addresses(pieces.destination, pieces.source), threads)
    assert torch.equal(pieces.destination, pieces.expected())


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300) | st.integers(16_000, 17_000) | st.integers(0, 200_000), max_size=20),
    seed=st.integers(0, 2**31),
    threads=st.integers(1, 4),
)
def test_only_the_destinations_change(sizes: list[int], seed: int, threads: int) -> None:
    check_host(sizes, seed, threads)


# CI runs one thread, and as many as it takes for uneven shares.
@pytest.mark.parametrize(
    "threads", [1, pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "sizes",
    [
        [40 * MEBIBYTE + 13],
        [MEBIBYTE] * 5,
        [7] * 5000 + [9 * MEBIBYTE + 1] + [0, 64, 4096] * 300 + [MEBIBYTE - 1, MEBIBYTE, MEBIBYTE + 1],
        [0, 0, 3 * MEBIBYTE, 0],
    ],
    ids=["one huge", "exact shares", "many small, few huge", "empty ones"],
)
def test_large(sizes: list[int], threads: int) -> None:
    check_host(sizes, 1, threads)


def test_nothing_to_copy() -> None:
    _native.copy_host([], [], [], 4)
    _native.copy_host([0], [0], [0], 1)


def test_neighbours_without_a_gap() -> None:
    source = torch.arange(100_000, dtype=torch.int32)
    destination = torch.zeros_like(source)
    cuts = [0, 3, 70_000, 70_001, 250_001, 400_000]
    starts, sizes = cuts[:-1], [after - before for before, after in itertools.pairwise(cuts)]
    to, origin = ([tensor.data_ptr() + start for start in starts] for tensor in (destination, source))
    _native.copy_host(to, origin, sizes, 3)
    assert torch.equal(destination, source)


@pytest.mark.parametrize(
    ("destinations", "sources", "nbytes", "threads", "message"),
    [
        ([1], [1, 2], [1], 1, "different lengths: 1 destinations, 2 sources, 1 sizes"),
        ([1, 2], [1, 2], [1], 1, "different lengths"),
        ([0], [1], [1], 1, "null address for copy 0 of 1 bytes"),
        ([8, 1], [16, 0], [1, 9], 1, "null address for copy 1 of 9 bytes"),
        ([8], [16], [1], 0, "threads must be at least 1"),
        ([8], [16], [1], -1, "threads must be at least 1"),
        ([4096, 4096], [8192, 4099], [16, 4], 1, "source and destination of copy 1 overlap"),
        ([4099], [4096], [4], 1, "source and destination of copy 0 overlap"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    destinations: list[int], sources: list[int], nbytes: list[int], threads: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _native.copy_host(destinations, sources, nbytes, threads)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(TypeError):
        _native.copy_host([8], [16], [-1], 1)
