"""Which part of a tensor a rank has: as torch itself cuts it."""

from math import prod

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard

from mcore_ckpt.formats.fsdp.dtensors import DTensorPlacement


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, 0, 1, 2])), min_size=1, max_size=3),
)
def test_as_torch_cuts(shape: list[int], cuts: list[tuple[int, int | None]]) -> None:
    mesh, axes = tuple(size for size, _ in cuts), tuple(axis for _, axis in cuts)
    assume(all(axis is None or axis < len(shape) for axis in axes))
    ranks = tuple(10 + rank for rank in range(prod(mesh)))
    seen = torch.zeros(shape, dtype=torch.int64)
    for position, rank in enumerate(ranks):
        region = DTensorPlacement(mesh, ranks, axes).region(tuple(shape), rank)
        region.check()
        coordinate = [int(at) for at in torch.unravel_index(torch.tensor(position), mesh)]
        local, offset = _compute_local_shape_and_global_offset(
            tuple(shape), mesh, coordinate, [Replicate() if axis is None else Shard(axis) for axis in axes]
        )
        assert region.local_shape == tuple(local)
        (piece,) = region.pieces
        if region.numel:
            assert piece.global_offset == tuple(offset)
        seen[tuple(slice(at, at + size) for at, size in zip(piece.global_offset, piece.shape, strict=True))] += 1
    copies = prod(size for size, axis in cuts if axis is None)
    assert (seen == copies).all()
