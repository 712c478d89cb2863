"""Computes which region of a global tensor a rank has, from the `DTensor` that the rank saved in FSDP training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from mcore_ckpt.errors import CheckpointCorruptError, UnsupportedError
from mcore_ckpt.formats.torch_save_files import PickledObject, PtDTensor, PtTensor, read_integers
from mcore_ckpt.sharding.regions import Piece, Region, Shape


@dataclass(frozen=True)
class DTensorPlacement:
    """The distribution of a tensor over a mesh of ranks.

    Attributes:
        mesh: the number of ranks along each axis of the mesh.
        ranks: the ranks of the mesh, row-major.
        axes: for each axis of the mesh, the axis of the tensor that the mesh axis cuts; None if the mesh axis
            replicates the tensor.
    """

    mesh: Shape
    ranks: tuple[int, ...]
    axes: tuple[int | None, ...]

    def region(self, shape: Shape, rank: int) -> Region:
        """Returns the region of a tensor of global `shape` that a rank of the mesh has.

        The result agrees with `compute_local_shape_and_global_offset` (torch 2.13). As in `torch.chunk`, the last
        chunks can be shorter or empty. If two axes of the mesh cut the same axis of the tensor, the second axis of the
        mesh cuts the chunks that the first one makes.

        Example:
            >>> DTensorPlacement((2,), (0, 1), (0,)).region((5, 3), 1).pieces[0].global_offset
            (3, 0)
        """
        position = self.ranks.index(rank)
        offset, lengths = [0] * len(shape), list(shape)
        for number, axis in enumerate(self.axes):
            at = position // prod(self.mesh[number + 1 :]) % self.mesh[number]
            if axis is None:
                continue
            chunk = -(-lengths[axis] // self.mesh[number])
            start = min(at * chunk, lengths[axis])
            offset[axis] += start
            lengths[axis] = min(chunk, lengths[axis] - start)
        local = tuple(lengths)
        return Region(shape, local, (Piece((0,) * len(shape), local, tuple(offset)),), (0, prod(local)))


def placement_of(tensor: PtDTensor, name: str) -> DTensorPlacement:
    """Returns how a saved tensor is distributed over its mesh.

    Raises:
        UnsupportedError: the tensor is not reduced yet (Partial), or is cut in strides (FSDP with tensor parallelism).
        CheckpointCorruptError: the mesh cannot be read.
    """
    fields = tensor.spec.fields
    mesh, placements = fields.get("mesh"), fields.get("placements")
    if not isinstance(mesh, PickledObject) or not isinstance(placements, (tuple, list)):
        raise CheckpointCorruptError(f"{tensor.local.path}: tensor {name}: its DTensor lacks a mesh or placements")
    axes = tuple(_axis(tensor, name, placement) for placement in placements)
    shape, ranks = _mesh(mesh, f"{tensor.local.path}: tensor {name}")
    if len(axes) != len(shape) or len(ranks) != prod(shape):
        raise CheckpointCorruptError(
            f"{tensor.local.path}: tensor {name}: has {len(axes)} placements on a mesh of shape {shape} with "
            f"{len(ranks)} ranks"
        )
    return DTensorPlacement(shape, ranks, axes)


def _axis(tensor: PtDTensor, name: str, placement: Any) -> int | None:
    kind = type(placement).__name__
    if kind == "Replicate":
        return None
    axis = getattr(placement, "fields", {}).get("dim")
    if kind != "Shard" or not isinstance(axis, int):
        raise UnsupportedError(
            f"{tensor.local.path}: tensor {name}: is placed as {kind}, but only Shard and Replicate can be read: if "
            "the training combines FSDP with tensor parallelism, save a full state dict"
        )
    axis += len(tensor.shape) if axis < 0 else 0
    if not 0 <= axis < len(tensor.shape):
        raise CheckpointCorruptError(f"{tensor.local.path}: tensor {name}: is cut along axis {axis} of {tensor.shape}")
    return axis


def _mesh(mesh: PickledObject, where: str) -> tuple[Shape, tuple[int, ...]]:
    """Returns the shape of a mesh and its ranks.

    Since torch 2.9, a mesh is a layout (lengths and strides) over a list of ranks. Before 2.9, a mesh was a tensor of
    ranks.
    """
    ranks = mesh.fields.get("mesh")
    if isinstance(ranks, PtTensor):
        return ranks.shape, tuple(read_integers(ranks))
    layout, of_layout = mesh.fields.get("_layout"), mesh.fields.get("_rank_map")
    if not isinstance(layout, PickledObject) or not isinstance(of_layout, PtTensor):
        raise CheckpointCorruptError(f"{where}: its DeviceMesh has neither a tensor of ranks nor a layout")
    numbers = read_integers(of_layout)
    try:
        layout_axes = list(_layout_axes(layout))
        # Check the number of places before the loops below run over them, because a damaged mesh can have any lengths.
        if prod(length for lengths, _ in layout_axes for length in lengths) > len(numbers):
            raise IndexError(f"more ranks than {len(numbers)}")
        axes = [list(_offsets(*axis)) for axis in layout_axes]
        ranks_of_mesh = tuple(numbers[sum(place)] for place in product(*axes))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{where}: its DeviceMesh cannot be read: {error!r}") from None
    return tuple(map(len, axes)), ranks_of_mesh


def _layout_axes(layout: PickledObject) -> Iterator[tuple[Shape, Shape]]:
    axes = layout.fields.get("axes")
    if axes is not None:
        yield from ((_flat(axis.fields["shape"]), _flat(axis.fields["stride"])) for axis in axes)
        return
    shape, stride = layout.fields["shape"], layout.fields["stride"]
    shapes, strides = (part if isinstance(part, tuple) else (part,) for part in (shape, stride))
    yield from ((_flat(lengths), _flat(axis_strides)) for lengths, axis_strides in zip(shapes, strides, strict=True))


def _flat(numbers: Any) -> Shape:
    if isinstance(numbers, int):
        return (numbers,)
    return tuple(number for part in numbers for number in _flat(part))


def _offsets(lengths: Shape, strides: Shape) -> Iterator[int]:
    """Yields the offsets of all places along an axis. An axis that was folded from several axes has several lengths."""
    for index in product(*map(range, lengths)):
        yield sum(at * stride for at, stride in zip(index, strides, strict=True))
