"""Live tensors filled: in place or through temporary memory, with padding, and what a failing read leaves."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.errors import CheckpointCorruptError, UnsupportedError
from mcore_ckpt.io import tuning
from mcore_ckpt.load.fill import TensorFill, fill_tensors, refuse_freed
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import MODEL, ReadRange, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region

Ranges = Sequence[tuple[ReadRange, torch.Tensor]]


def stored(name: str, numel: int, dtype: str = "float32") -> StoredShard:
    return StoredShard(ShardKey(name, MODEL), Region.whole((numel,)), dtype, "file", 0, 4 * numel, None)


class Source:
    """A reader of stored values by name. It notes what each call asks for, and may fail in one of them."""

    def __init__(self, values: dict[str, torch.Tensor], fails_in: int = -1) -> None:
        self._values = values
        self._fails_in = fails_in
        self.calls: list[list[str]] = []
        self.memories: list[list[torch.Tensor]] = []

    def read(self, ranges: Ranges) -> int:
        self.calls.append([read.stored.key.name for read, _ in ranges])
        self.memories.append([memory for _, memory in ranges])
        for number, (read, memory) in enumerate(ranges):
            if len(self.calls) - 1 == self._fails_in and number == len(ranges) - 1:
                raise CheckpointCorruptError("a block has a wrong CRC")
            rows = read.rows
            assert memory.is_contiguous()
            values = self._values[read.stored.key.name][rows.start : rows.start + rows.numel]
            assert memory.dtype == values.dtype
            memory.view(-1)[rows.destination : rows.destination + rows.numel] = values
        return sum(read.rows.numel * memory.itemsize for read, memory in ranges)


def fill_of(name: str, values: torch.Tensor, target: torch.Tensor, **more: Any) -> TensorFill:
    return TensorFill((ReadRange.whole(stored(name, len(values))),), values.dtype, lambda: target, **more)


def test_a_tensor_of_the_stored_dtype_is_filled_where_it_is() -> None:
    values, target = torch.arange(6.0), torch.zeros(2, 3)
    source = Source({"a": values})
    assert fill_tensors([fill_of("a", values, target)], source.read) == values.nbytes
    assert torch.equal(target.view(-1), values)
    assert source.memories[0][0] is target
    assert [call for call in source.calls if call] == [["a"]]


@pytest.mark.parametrize(
    "target",
    [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2).t(), torch.zeros(4, 6)[::2, ::2]],
    ids=["dtype", "transposed", "strided"],
)
def test_any_other_tensor_is_filled_through_temporary_memory(target: torch.Tensor) -> None:
    values = torch.arange(6.0)
    around = target.untyped_storage().nbytes()
    source = Source({"a": values})
    fill_tensors([fill_of("a", values, target)], source.read)
    assert torch.equal(target, values.view(2, 3).to(target.dtype))
    assert target.untyped_storage().nbytes() == around
    assert all(memory is not target for memories in source.memories for memory in memories)


def test_what_is_stored_nowhere_becomes_zero() -> None:
    """In a tensor that has other values, and in temporary memory, which has any."""
    values = torch.arange(1.0, 4.0)
    for target in (torch.full((5,), 7.0), torch.full((5,), 7.0, dtype=torch.float64)):
        fill_tensors([fill_of("a", values, target, padded=True)], Source({"a": values}).read)
        assert target.tolist() == [1, 2, 3, 0, 0]
    without = torch.full((5,), 7.0)
    fill_tensors([fill_of("a", values, without)], Source({"a": values}).read)
    assert without.tolist() == [1, 2, 3, 7, 7]


def test_encode_takes_the_values_in_the_place_of_a_copy() -> None:
    values, target, taken = torch.arange(3.0), torch.full((3,), 7.0), list[torch.Tensor]()
    fill = fill_of("a", values, target, encode=lambda read: taken.append(read.clone()))
    fill_tensors([fill], Source({"a": values}).read)
    assert torch.equal(taken[0], values)
    assert target.tolist() == [7, 7, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finish_is_called_with_the_filled_tensor(dtype: torch.dtype) -> None:
    values, target, seen = torch.arange(3.0), torch.zeros(3, dtype=dtype), list[Any]()
    fill = fill_of("a", values, target, finish=lambda tensor: seen.append((tensor, tensor.tolist())))
    fill_tensors([fill], Source({"a": values}).read)
    ((tensor, filled),) = seen
    assert tensor is target
    assert filled == [0, 1, 2]


def test_a_tensor_of_several_ranges() -> None:
    values, target = torch.arange(5.0), torch.zeros(5)
    whole = stored("a", 5)
    reads = (ReadRange(whole, Rows(0, 3, 2)), ReadRange(whole, Rows(2, 0, 3)))
    nbytes = fill_tensors([TensorFill(reads, torch.float32, lambda: target)], Source({"a": values}).read)
    assert (target.tolist(), nbytes) == ([2, 3, 4, 0, 1], 20)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=8), st.integers(1, 80))
def test_temporary_memory_is_bounded(tensors: list[tuple[int, bool]], limit: int) -> None:
    """Less than CONVERT_BYTES and one tensor. Tensors that need none are read first, in one call."""
    values = {str(number): torch.arange(float(numel)) for number, (numel, _) in enumerate(tensors)}
    targets = [torch.zeros(n, dtype=torch.float32 if direct else torch.float64) for n, direct in tensors]
    source = Source(values)
    fills = [fill_of(name, of, to) for (name, of), to in zip(values.items(), targets, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "CONVERT_BYTES", limit)
        assert fill_tensors(fills, source.read) == sum(each.nbytes for each in values.values())
    assert all(torch.equal(to, of.to(to.dtype)) for to, of in zip(targets, values.values(), strict=True))
    first, *rest = source.calls
    assert first == [str(number) for number, (_, direct) in enumerate(tensors) if direct]
    assert [name for call in rest for name in call] == [str(n) for n, (_, direct) in enumerate(tensors) if not direct]
    for call in rest:
        assert sum(values[name].nbytes for name in call[:-1]) < limit
    # No call for less than the limit, but the last one.
    assert all(sum(values[name].nbytes for name in call) >= limit for call in rest[:-1])


def test_a_read_that_fails_leaves_what_was_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that failed fills none of its converted tensors, and no later one is begun."""
    monkeypatch.setattr(tuning, "CONVERT_BYTES", 1)
    values = {name: torch.arange(1.0, 4.0) for name in "abcd"}
    targets = {name: torch.zeros(3, dtype=torch.float32 if name == "a" else torch.float64) for name in "abcd"}
    finished: list[str] = []
    fills = [
        fill_of(name, values[name], targets[name], finish=lambda _, name=name: finished.append(name)) for name in "abcd"
    ]
    source = Source(values, fails_in=2)
    with pytest.raises(CheckpointCorruptError, match="wrong CRC"):
        fill_tensors(fills, source.read)
    assert source.calls == [["a"], ["b"], ["c"]]
    assert finished == ["a", "b"]
    assert [bool(targets[name].any()) for name in "abcd"] == [True, True, False, False]


def test_a_tensor_without_memory_is_refused() -> None:
    tensor = torch.zeros(3)
    refuse_freed(ShardKey("a", MODEL), tensor, "load()")
    refuse_freed(ShardKey("a", MODEL), torch.zeros(0), "load()")
    tensor.untyped_storage().resize_(0)
    words = r"^tensor a \(exp_avg\) has no memory .* to the device before load_hf\(\)$"
    with pytest.raises(UnsupportedError, match=words):
        refuse_freed(ShardKey("a", "exp_avg"), tensor, "load_hf()")
