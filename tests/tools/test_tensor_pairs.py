"""Pairs of tensors compared: in batches, on several threads, and as if each pair were compared at once."""

import math
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.tools.examine import tensor_pairs
from mcore_ckpt.tools.examine.differences import EXACT, Differences, Tolerance
from mcore_ckpt.tools.examine.tensor_pairs import Pair, Side, compare_pairs

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def side(tensor: torch.Tensor, lengths: list[int] | None = None) -> Side:
    def read(start: int, memory: torch.Tensor) -> None:
        if lengths is not None:
            lengths.append(len(memory))
        memory.copy_(tensor.view(-1)[start : start + len(memory)])

    return Side(TensorInfo(tensor.dtype, tuple(tensor.shape)), read)


def compared(groups: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]], tolerance: Tolerance) -> list[Differences]:
    pairs = [[Pair(side(left), side(right)) for left, right in group] for group in groups]
    return compare_pairs(pairs, tolerance, lambda done, total: None, "compare")


def numbers(found: Differences) -> tuple[int, float, float]:
    return found.count, found.max_abs, found.max_rel


@settings(max_examples=60)
@given(st.data())
def test_batches_change_nothing(data: st.DataObject) -> None:
    """Whatever the size of a batch, and whichever pairs are in a group."""
    values = st.sampled_from([0.0, -0.0, 1.0, 1.5, math.inf, math.nan])
    groups, wanted = [], []
    tolerance = data.draw(st.sampled_from([EXACT, Tolerance(atol=0.6), Tolerance(any_dtype=True)]))
    for _ in range(data.draw(st.integers(0, 3))):
        group, found = [], Differences()
        for _ in range(data.draw(st.integers(0, 3))):
            numel = data.draw(st.integers(0, 40))
            left, right = (
                torch.tensor(data.draw(st.lists(values, min_size=numel, max_size=numel)), dtype=torch.float32).to(
                    data.draw(st.sampled_from(DTYPES))
                )
                for _ in range(2)
            )
            group.append((left, right))
            found.add(left, right, tolerance)
        groups.append(group)
        wanted.append(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_pairs, "_BATCH_BYTES", data.draw(st.integers(1, 100)))
        assert list(map(numbers, compared(groups, tolerance))) == list(map(numbers, wanted))


@pytest.mark.parametrize(("left", "right"), [(torch.bfloat16, torch.float64), (torch.float64, torch.bfloat16)])
def test_a_batch_is_bounded_by_the_wider_dtype(
    left: torch.dtype, right: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_pairs, "_BATCH_BYTES", 64)
    lengths: list[int] = []
    pair = Pair(side(torch.zeros(3, 7, dtype=left), lengths), side(torch.zeros(3, 7, dtype=right), lengths))
    told: list[tuple[int, int]] = []
    (found,) = compare_pairs([[pair]], EXACT, lambda *amounts: told.append(amounts), "compare")
    assert numbers(found) == (0, 0.0, 0.0)
    assert lengths == [8, 8, 8, 8, 5, 5]
    size = left.itemsize
    assert told == [(8 * size, 21 * size), (16 * size, 21 * size), (21 * size, 21 * size)]


def test_the_threads_have_the_given_name() -> None:
    names: list[str] = []

    def read(start: int, memory: torch.Tensor) -> None:
        names.append(threading.current_thread().name)

    one = Side(TensorInfo(torch.float32, (1,)), read)
    compare_pairs([[Pair(one, one)]], EXACT, lambda done, total: None, "some name")
    assert all(name.startswith("some name") for name in names)
    assert len(names) == 2


def test_an_error_ends_the_other_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread does not go on with a tensor that may have 10 GB."""
    monkeypatch.setattr(tensor_pairs, "_BATCH_BYTES", 4)
    monkeypatch.setattr(tensor_pairs.tuning, "HOST_THREADS", 2)
    running, reads = threading.Event(), list[int]()

    def go_on(start: int, memory: torch.Tensor) -> None:
        reads.append(start)
        running.set()
        memory.zero_()

    def fail(start: int, memory: torch.Tensor) -> None:
        assert running.wait(10)
        raise CheckpointCorruptError("torn")

    info = TensorInfo(torch.float32, (300_000,))
    long, torn = Pair(Side(info, go_on), Side(info, go_on)), Pair(Side(info, fail), Side(info, fail))
    with pytest.raises(CheckpointCorruptError, match="torn"):
        compare_pairs([[torn], [long], [long]], EXACT, lambda done, total: None, "compare")
    assert len(reads) < 2 * 300_000
