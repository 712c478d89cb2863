"""Weights that are made in pieces, and copied to their places one piece at a time."""

import ctypes
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.formats.native.file_plan import FilePlan, StructureCache, plan_file
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.io import tuning
from mcore_ckpt.io.host_memory import HostMemory
from mcore_ckpt.io.pages import PAGE_BYTES
from mcore_ckpt.save.capture import FileTensors, WeightCopies, _ready, arena_bytes, capture_copies
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.main_weights import Fragment

POISON = 0xA5
PIECE_BYTES = 1000


class LateCopies:
    """Copies from a GPU that are as late as they may be: nothing is copied before something must wait for it."""

    def __init__(self) -> None:
        self._queued: list[tuple[int, int, int]] = []
        self.events: list[object] = []

    def start(
        self, buffer: Any, offsets: list[int], sources: list[int], nbytes: list[int], tensors: Sequence[torch.Tensor]
    ) -> list[tuple[int, Any]]:
        ends = [at + size for at, size in zip(offsets, nbytes, strict=True)]
        assert all(end <= at for end, at in zip(ends, offsets[1:], strict=False)), "DeviceCopier would refuse it"
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
        self._queued += [(buffer.address + at, *rest) for at, *rest in zip(offsets, sources, nbytes, strict=True)]
        self.events.append(object())
        return [(len(offsets), self.events[-1])]

    def hold(self) -> None:
        for copy in self._queued:
            ctypes.memmove(*copy)
        self._queued.clear()


def pieces_of(weights: Sequence[tuple[torch.Tensor, torch.Tensor]], seed: int) -> Iterator[list[Fragment]]:
    """Cuts weights (stand-in, values) into pieces, in any order. The next piece overwrites the one before it."""
    chosen = random.Random(seed)
    parts = []
    for weight, values in weights:
        cuts = sorted({0, values.numel(), *(chosen.randrange(values.numel() + 1) for _ in range(3))})
        parts += [(weight, values.view(-1), *cut) for cut in itertools.pairwise(cuts)]
    chosen.shuffle(parts)
    memory = torch.empty(1 << 14, dtype=torch.uint8)
    while parts:
        fragments, at = [], 0
        while parts and at < PIECE_BYTES:
            weight, values, start, stop = parts.pop()
            own = memory[at : at + (stop - start) * values.itemsize].view(values.dtype)
            own.copy_(values[start:stop])
            fragments.append(Fragment(weight, start, own))
            at += -(-own.nbytes // 8) * 8
        yield fragments
        memory.fill_(0)


def plan_of(tensors: Sequence[torch.Tensor], world: int, rank: int, path: str) -> FilePlan:
    writes = tuple(
        TensorWrite((f"t{i}",), ShardKey(f"t{i}", "model"), Region.whole(tuple(t.shape)), t, tuple(t.shape))
        for i, t in enumerate(tensors)
    )
    return plan_file(WriteRequest(path, "model", writes, writers=tuple(range(world))), rank, StructureCache())


def captured(plans: Sequence[FilePlan], tensors: Sequence[FileTensors], weights: Callable[[Any], object]) -> bytes:
    """What is in the images, and between them."""
    buffer = HostMemory().take(max(1, arena_bytes(plans)))
    ctypes.memset(buffer.address, POISON, buffer.nbytes)
    weights(buffer)
    capture_copies(plans, tensors, buffer, None)
    return ctypes.string_at(buffer.address, arena_bytes(plans))


members = st.tuples(
    st.sampled_from([(0,), (7,), (40, 9), (1500,), (3, 1200)]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
)


@pytest.mark.parametrize("on_gpu", [False, True])
@settings(deadline=None, max_examples=20)
@given(layout=st.lists(st.lists(members, max_size=6), min_size=1, max_size=3), world=st.integers(1, 3), data=st.data())
def test_images_are_those_of_weights_that_are_all_in_memory(
    on_gpu: bool, layout: list[list[tuple[tuple[int, ...], torch.dtype, bool]]], world: int, data: st.DataObject
) -> None:
    share, tuning.SHARE_BYTES = tuning.SHARE_BYTES, PAGE_BYTES
    try:
        rank = data.draw(st.integers(0, world - 1))
        files = [[torch.rand(shape).to(dtype) for shape, dtype, _ in file] for file in layout]
        plans = [plan_of(tensors, world, rank, f"{number}.pt") for number, tensors in enumerate(files)]
    finally:
        tuning.SHARE_BYTES = share
    stand_ins = [
        [tensor.to("meta") if member[2] else tensor for tensor, member in zip(tensors, file, strict=True)]
        for tensors, file in zip(files, layout, strict=True)
    ]
    # A weight of another rank's file has no place here.
    weights = [(torch.empty(50, device="meta"), torch.rand(50))]
    for before, tensors in zip(stand_ins, files, strict=True):
        weights += [pair for pair in zip(before, tensors, strict=True) if pair[0].is_meta]
    captured_tensors = list(map(FileTensors.of, stand_ins))
    device: Any = LateCopies() if on_gpu else None

    def copy(buffer: Any) -> None:
        copies = WeightCopies([], plans, captured_tensors, buffer, (lambda: device) if on_gpu else None)
        for piece in pieces_of(weights, data.draw(st.integers(0, 1000))):
            copies.take(piece)
        assert copies.arrived is (device.events[-1] if on_gpu and device.events else None)

    found = captured(plans, captured_tensors, copy)
    assert found == captured(plans, list(map(FileTensors.of, files)), lambda buffer: None)


def test_weights_of_files_without_an_image_have_memory_of_their_own() -> None:
    wanted = [torch.rand(40, 30), torch.rand(2000)]
    own = [torch.zeros_like(values) for values in wanted]
    copies = WeightCopies(own, [], [], None, None)
    for piece in pieces_of(list(zip(own, wanted, strict=True)), 5):
        copies.take(piece)
    assert all(map(torch.equal, own, wanted))


def test_a_file_of_weights_alone_is_written_once_they_have_arrived() -> None:
    plan: Any = SimpleNamespace(stop=300)
    event: Any = object()
    assert _ready(plan, [], [], event) == [(300, event)]
    later: Any = object()
    # Copies that follow in the same stream are done later.
    assert _ready(plan, [(1, 0)], [(1, later)], event) == [(300, later)]
