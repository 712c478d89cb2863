"""Which part of a tensor one rank of an FSDP training has, from what it saved of a `DTensor`."""

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
    """How a tensor lies on a mesh.

    Attributes:
        mesh: how many ranks along each of its axes.
        ranks: those of the mesh, row-major.
        axes: by mesh axis, the tensor's axis that is cut along it; None: it is not.
    """

    mesh: Shape
    ranks: tuple[int, ...]
    axes: tuple[int | None, ...]

    def region(self, shape: Shape, rank: int) -> Region:
        """What a rank of the mesh has of a tensor.

        As `compute_local_shape_and_global_offset` (torch 2.13): chunks as those of `torch.chunk`, the last ones shorter
        or empty; where two axes of the mesh cut the same axis, the second cuts what the first has left.

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
    """How a saved tensor lies on its mesh.

    Raises:
        UnsupportedError: it waits for a reduction, or is cut in strides (FSDP with tensor parallelism).
        CheckpointCorruptError: its mesh cannot be read.
    """
    fields = tensor.spec.fields
    mesh, placements = fields.get("mesh"), fields.get("placements")
    if not isinstance(mesh, PickledObject) or not isinstance(placements, (tuple, list)):
        raise CheckpointCorruptError(f"{tensor.local.path}: tensor {name}: its DTensor has no mesh or no placements")
    axes = tuple(_axis(tensor, name, placement) for placement in placements)
    shape, ranks = _mesh(mesh, f"{tensor.local.path}: tensor {name}")
    if len(axes) != len(shape) or len(ranks) != prod(shape):
        raise CheckpointCorruptError(
            f"{tensor.local.path}: tensor {name}: {len(axes)} placements on a mesh of shape {shape}, {len(ranks)} ranks"
        )
    return DTensorPlacement(shape, ranks, axes)


def _axis(tensor: PtDTensor, name: str, placement: Any) -> int | None:
    kind = type(placement).__name__
    if kind == "Replicate":
        return None
    axis = getattr(placement, "fields", {}).get("dim")
    if kind != "Shard" or not isinstance(axis, int):
        raise UnsupportedError(
            f"{tensor.local.path}: tensor {name}: is placed as {kind}; Shard and Replicate can be read. Of FSDP with "
            "tensor parallelism save a full state dict"
        )
    axis += len(tensor.shape) if axis < 0 else 0
    if not 0 <= axis < len(tensor.shape):
        raise CheckpointCorruptError(f"{tensor.local.path}: tensor {name}: is cut along axis {axis} of {tensor.shape}")
    return axis


def _mesh(mesh: PickledObject, where: str) -> tuple[Shape, tuple[int, ...]]:
    """Its shape and its ranks. Since torch 2.9 a mesh is a layout (lengths and strides) of a list of ranks."""
    ranks = mesh.fields.get("mesh")
    if isinstance(ranks, PtTensor):
        return ranks.shape, tuple(read_integers(ranks))
    layout, of_layout = mesh.fields.get("_layout"), mesh.fields.get("_rank_map")
    if not isinstance(layout, PickledObject) or not isinstance(of_layout, PtTensor):
        raise CheckpointCorruptError(f"{where}: its DeviceMesh has neither ranks nor a layout of them")
    numbers = read_integers(of_layout)
    try:
        layout_axes = list(_layout_axes(layout))
        # Before anything is multiplied out: a damaged mesh may have any lengths.
        if prod(length for lengths, _ in layout_axes for length in lengths) > len(numbers):
            raise IndexError(f"more ranks than {len(numbers)}")
        axes = [list(_steps(*axis)) for axis in layout_axes]
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
    yield from ((_flat(lengths), _flat(steps)) for lengths, steps in zip(shapes, strides, strict=True))


def _flat(numbers: Any) -> Shape:
    if isinstance(numbers, int):
        return (numbers,)
    return tuple(number for part in numbers for number in _flat(part))


def _steps(lengths: Shape, strides: Shape) -> Iterator[int]:
    """The places that an axis goes through; it may be several folded into one."""
    for index in product(*map(range, lengths)):
        yield sum(at * stride for at, stride in zip(index, strides, strict=True))
