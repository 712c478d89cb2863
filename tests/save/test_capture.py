"""Getting bytes out of the training state: the arena, and the tensors' places in it."""

import ctypes
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.errors import CommitError, UnsupportedError
from mcore_ckpt.formats.native.file_plan import FilePlan, StructureCache, plan_file
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.io import tuning
from mcore_ckpt.io.host_memory import HostMemory
from mcore_ckpt.io.pages import PAGE_BYTES, page_ceil
from mcore_ckpt.save.capture import FileTensors, _ready, arena_bytes, capture_copies, capture_in_place
from mcore_ckpt.save.device_copies import DeviceCopies
from mcore_ckpt.save.host_images import HostImages
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region

POISON = 0xA5
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int16, torch.int64, torch.complex64)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]

sizes = st.one_of(st.integers(0, 7), st.integers(700, 1500))
pieces = st.tuples(
    st.lists(sizes, max_size=2).map(tuple),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "transposed", "strided", "parameter"]),
)


@pytest.fixture(autouse=True)
def small_shares_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all ranks have a share of a file, and a tensor is copied in several parts."""
    monkeypatch.setattr(tuning, "SHARE_BYTES", PAGE_BYTES)
    monkeypatch.setattr(tuning, "COPY_GROUP_BYTES", 16 * PAGE_BYTES)


def make(shape: tuple[int, ...], dtype: torch.dtype, form: str, seed: int = 0) -> torch.Tensor:
    """Random bits in a tensor of `shape`, contiguous or not."""
    wide = (*shape[:-1], shape[-1] * 2) if form == "strided" and shape else shape
    order = wide[::-1] if form == "transposed" else wide
    high = 2 if dtype == torch.bool else 256
    nbytes = math.prod(order) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).view(order)
    if form == "transposed":
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    if form == "strided" and shape:
        tensor = tensor[..., ::2]
    return torch.nn.Parameter(tensor) if form == "parameter" and dtype.is_floating_point else tensor


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in a row, found without the package under test."""
    rows = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach().cpu())
    return rows.view(-1).view(torch.uint8).numpy().tobytes()


def memory(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes) if nbytes else b""


def plan_of(tensors: list[torch.Tensor], world: int, rank: int, path: str = "a.pt") -> FilePlan:
    writes = tuple(
        TensorWrite((f"t{i}",), ShardKey(f"t{i}", "model"), Region.whole(tuple(t.shape)), t, tuple(t.shape))
        for i, t in enumerate(tensors)
    )
    return plan_file(WriteRequest(path, "model", writes, writers=tuple(range(world))), rank, StructureCache())


layouts = st.lists(st.lists(pieces, max_size=8), min_size=1, max_size=3)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=50)
@given(layout=layouts, world=st.integers(1, 3), data=st.data())
def test_every_tensor_is_row_major_at_its_offset_and_nothing_else_is_touched(
    device: str, layout: list[list[tuple[tuple[int, ...], torch.dtype, str]]], world: int, data: st.DataObject
) -> None:
    seeds = itertools.count()
    files = [[make(*piece, next(seeds)).to(device) for piece in file] for file in layout]
    rank = data.draw(st.integers(0, world - 1))
    plans = [plan_of(tensors, world, rank, f"{number}.pt") for number, tensors in enumerate(files)]
    arena = HostMemory()
    reserved = arena_bytes(plans) + PAGE_BYTES
    buffer = arena.take(reserved, torch.cuda.current_device() if device == "cuda" else None)
    ctypes.memset(buffer.address, POISON, reserved)

    copies = DeviceCopies(torch.cuda.current_device(), 60.0) if device == "cuda" else None
    capture = capture_copies(plans, list(map(FileTensors.of, files)), buffer, copies)
    if copies is not None:
        copies.wait()

    expected = b""
    for plan, tensors, write in zip(plans, files, capture.writes, strict=True):
        assert (write.plan, write.sources) == (plan, None)
        lead = page_ceil(plan.head)
        assert (write.buffer, write.offset) == (buffer, len(expected) + lead)
        image = bytearray([POISON]) * plan.pt.records_end
        for slot, tensor in zip(plan.pt.slots, tensors, strict=True):
            image[slot.offset : slot.offset + slot.nbytes] = bits(tensor)
        head = bytes(image[plan.start - plan.head : plan.start])
        assert write.head() == head
        expected += bytes([POISON]) * (lead - plan.head) + head + bytes(image[plan.start : plan.stop])
        expected += bytes([POISON]) * (page_ceil(plan.nbytes) - plan.nbytes)
        assert device == "cuda" or write.ready == []
    assert memory(buffer.address, reserved) == expected + bytes([POISON]) * PAGE_BYTES


@settings(deadline=None, max_examples=20)
@given(layout=layouts)
def test_in_place_the_sources_are_the_elements_in_a_row_as_long_as_the_capture_lives(
    layout: list[list[tuple[tuple[int, ...], torch.dtype, str]]],
) -> None:
    seeds = itertools.count()
    files = [[make(*piece, next(seeds)) for piece in file] for file in layout]
    plans = [plan_of(tensors, 1, 0, f"{number}.pt") for number, tensors in enumerate(files)]
    capture = capture_in_place(plans, list(map(FileTensors.of, files)))
    for write, tensors in zip(capture.writes, files, strict=True):
        assert (write.buffer, write.ready) == (None, ())
        assert write.sources is not None
        for address, tensor in zip(write.sources, tensors, strict=True):
            assert memory(address, tensor.nbytes) == bits(tensor)
            # Whatever is in a row already is not copied: a state in host memory may be most of it.
            assert address == tensor.data_ptr() or not tensor.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lazy", [None, ()])
def test_what_is_queued_before_the_capture_is_in_it_and_what_follows_is_not(device: str, lazy: Any) -> None:
    tensor = torch.zeros(1 << 20, device=device)
    plans, staging = [plan_of([tensor], 1, 0)], HostImages(60.0, 0 if device == "cuda" else None)
    buffer = staging.reserve(plans) if device == "cuda" else staging.reserve_ready(plans).buffer
    assert buffer is not None
    for _ in range(50):
        tensor += 1
    staging.capture(plans, [FileTensors.of([tensor])], buffer, lazy)
    staging.hold()
    tensor += 1
    if device == "cuda":
        torch.cuda.synchronize()
    copied = memory(buffer.address + plans[0].pt.slots[0].offset, tensor.nbytes)
    found = torch.frombuffer(bytearray(copied), dtype=torch.float32)
    assert (found == 50).all()
    staging.close()


# -- the arena ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 3 * PAGE_BYTES), min_size=1, max_size=8))
def test_the_arena_is_on_a_page_writable_and_grows_only_when_it_must(wanted: list[int]) -> None:
    arena = HostMemory()
    largest, before = 0, None
    for size in wanted:
        buffer = arena.take(size)
        assert buffer.address % PAGE_BYTES == 0
        # Not by the address: memory that is given back is what the system gives next.
        assert (arena._buffer is before) == (size <= largest), "memory that was there is not used again, or too small"
        largest, before = max(largest, size), arena._buffer
        ctypes.memset(buffer.address, 1, size)


def test_a_released_arena_starts_anew() -> None:
    arena = HostMemory()
    ctypes.memset(arena.take(100).address, 7, 100)
    arena.release()
    ctypes.memset(arena.take(5).address, 7, 5)


def test_more_than_the_limit_is_refused_by_name_and_the_limit_is_not() -> None:
    arena = HostMemory(limit=2 * PAGE_BYTES)
    kept = arena.take(2 * PAGE_BYTES)
    for refused in (2 * PAGE_BYTES + 1, 1 << 60):
        with pytest.raises(UnsupportedError, match=rf"{refused} bytes of host memory, but max_host_bytes is 8192"):
            arena.take(refused)
    assert arena.take(PAGE_BYTES) is kept


def test_more_than_there_is_is_a_memory_error_and_the_arena_goes_on() -> None:
    arena = HostMemory()
    arena.take(10)
    with pytest.raises(MemoryError):
        arena.take(1 << 60)
    ctypes.memset(arena.take(10).address, 7, 10)


def test_staging_takes_one_page_aligned_range_for_each_file() -> None:
    plans = [plan_of([torch.zeros(n, dtype=torch.uint8)], 1, 0) for n in (1, 5000, 30_000)]
    assert (
        arena_bytes(plans)
        == sum(page_ceil(plan.head) + page_ceil(plan.nbytes) for plan in plans)
        <= 6 * PAGE_BYTES + 30_000 + 3 * 2000
    )
    staging = HostImages(60.0, None, limit=arena_bytes(plans))
    reserved = staging.reserve_ready(plans).buffer
    assert reserved is not None
    assert reserved.address % PAGE_BYTES == 0
    with pytest.raises(UnsupportedError, match="max_host_bytes"):
        staging.reserve_ready([*plans, plans[0]])
    staging.close()


# -- which event vouches for which bytes --------------------------------------------------------------------


@st.composite
def copied_files(draw: st.DrawFn) -> tuple[list[list[tuple[int, int]]], list[tuple[int, int]], list[int]]:
    """Copies of several files as (how many are done with it, offset); events as (how many are done, event); ends."""
    files, done, ends = [], 0, []
    for _ in range(draw(st.integers(1, 3))):
        copies, at = [], draw(st.integers(0, 50))
        for _ in range(draw(st.integers(0, 5))):
            done += 1
            copies.append((done, at))
            at += draw(st.integers(1, 100))
        files.append(copies)
        ends.append(at)
    stops = draw(st.sets(st.integers(1, done))) | {done} if done else set()
    return files, [(count, 1000 + count) for count in sorted(stops)], ends


@given(copied_files())
def test_an_event_vouches_for_all_that_lies_before_its_offset(
    made: tuple[list[list[tuple[int, int]]], list[tuple[int, int]], list[int]],
) -> None:
    files, events, ends = made
    for copies, end in zip(files, ends, strict=True):
        plan: Any = SimpleNamespace(stop=end)
        ready = _ready(plan, copies, events)
        assert [offset for offset, _ in ready] == sorted(offset for offset, _ in ready)
        for offset, event in ready:
            (done,) = [count for count, of in events if of == event]
            assert all(number <= done for number, at in copies if at < offset)
        if not copies:
            assert ready == []
            continue
        assert ready[-1][0] == end
        # And no later than it must: what the first event has copied can be written then.
        first = events[0][0]
        assert (ready[0][1] == events[0][1]) == (copies[0][0] <= first)


def test_memory_that_cannot_be_pinned_is_an_error_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(memory: HostMemory, nbytes: int, device: int | None) -> None:
        raise RuntimeError("pinning memory: out of memory")

    monkeypatch.setattr(HostMemory, "take", refuse)
    with pytest.raises(CommitError, match="rank 0: GPU 3: pinning memory: out of memory; this save needs 4096"):
        HostImages(60.0, 3).reserve([plan_of([torch.zeros(1)], 1, 0)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_only_memory_for_a_gpu_is_pinned() -> None:
    arena = HostMemory()
    assert arena.take(100).pinned_bytes == 0
    assert arena.take(100, torch.cuda.current_device()).pinned_bytes >= 100
