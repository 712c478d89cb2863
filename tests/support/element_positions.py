"""Finds where each element of a region is in its global tensor, by cutting a tensor of positions."""

import math
from functools import cache

import torch

from mcore_ckpt.sharding.regions import Region


@cache
def positions(region: Region) -> torch.Tensor:
    """Where in the flattened global tensor each element of a region is: shape [numel], dtype int64."""
    everywhere = torch.arange(math.prod(region.global_shape)).view(region.global_shape)
    local = torch.full(region.local_shape, -1)
    for piece in region.pieces:
        here = tuple(slice(at, at + size) for at, size in zip(piece.local_offset, piece.shape, strict=True))
        there = tuple(slice(at, at + size) for at, size in zip(piece.global_offset, piece.shape, strict=True))
        local[here] = everywhere[there]
    assert (local >= 0).all()
    return local.view(-1)[slice(*region.flat)]
