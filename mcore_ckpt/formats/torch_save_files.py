"""What a file of `torch.save` holds, and where in it: nothing is loaded, nothing that it names is imported or run.

`torch.load(weights_only=True)` cannot do this for what FSDP writes: a `DTensor` brings a `DeviceMesh`, whose class asks
for process groups (torch 2.13). Here every class of a pickle is a stand-in that keeps what it is handed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint.pt_archive import ArchiveError, PtArchive, ReadAt
from mcore_ckpt.checkpoint.pt_tensors import TensorFinder, TensorPlace, is_dense
from mcore_ckpt.checkpoint.unpickling import Call, PickleError, Unpickler, as_shape, check_extent, find_plain
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io.files import open_regular, read_exact
from mcore_ckpt.sharding.regions import Shape

_MOST_INTEGER_BYTES = 64 << 20

# They were in other modules of `torch.distributed` before torch 2.5.
_DTENSOR_CLASSES = (
    "DTensor",
    "DTensorSpec",
    "DeviceMesh",
    "Partial",
    "Replicate",
    "Shard",
    "ShardOrderEntry",
    "TensorMeta",
    "_FlatLayout",
    "_MeshLayout",
    "_Partial",
    "_StridedShard",
)


@dataclass(frozen=True)
class PtTensor:
    """A tensor in a file: its first element is at byte `offset` of `path`, the others where the strides say."""

    dtype: torch.dtype
    shape: Shape
    stride: Shape
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether its bytes are one range, row-major."""
        return is_dense(self.shape, self.stride)


@dataclass(frozen=True)
class PtDTensor:
    """One rank's part of a `DTensor`.

    Attributes:
        local: what the rank has.
        shape: of the whole.
        spec: its mesh and placements, as they were pickled.
    """

    local: PtTensor
    shape: Shape
    spec: PickledObject


class PickledObject:
    """Stands in for an object of some class: what it was made from, and its fields."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.fields: dict[str, Any] = {}
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        """As a pickle gives it: the fields, or they and the slots."""
        self.state = state
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, Mapping):
                self.fields.update(part)


def read_pt(path: Path, start: int = 0, nbytes: int | None = None) -> Any:
    """The object in a file of `torch.save`, with `PtTensor` and `PtDTensor` for its tensors.

    Objects of the few classes that may be in it are `PickledObject`s.

    Args:
        path: the file.
        start, nbytes: where in it, if it holds several, one behind the other.

    Raises:
        CheckpointCorruptError: it is missing, damaged, or has a class in it that does not belong there.
    """
    try:
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            length = size - start if nbytes is None else nbytes
            if min(start, length) < 0 or start + length > size:
                raise CheckpointCorruptError(f"{path}: has {size} bytes, not the {start} + {length} asked for: cut")
            return _read(path, start, length, lambda at, count: read_exact(descriptor, count, start + at, path))
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path}: missing") from None
    except CheckpointCorruptError:
        raise
    except ArchiveError as error:
        raise CheckpointCorruptError(f"{path}: is not a file of torch.save, or was cut: {error}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointCorruptError(f"{path}: cannot be read: {type(error).__name__}: {str(error)[:400]}") from error


def _read(path: Path, start: int, nbytes: int, read_at: ReadAt) -> Any:
    def tensor(place: TensorPlace) -> PtTensor:
        if place.flags:
            raise PickleError(f"a tensor that is marked {place.flags}")
        return PtTensor(place.dtype, place.shape, place.stride, path, start + place.offset)

    archive = PtArchive(read_at, nbytes)
    finder = _Finder(archive, tensor)
    data = archive.read("data.pkl")
    value = Unpickler(data, finder.find_any, finder.stored, _build).load()
    check_extent(value, len(data), _parts)
    return value


def read_integers(tensor: PtTensor) -> list[int]:
    """The values of a small tensor of integers. Raises CheckpointCorruptError."""
    if not tensor.is_dense or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        raise CheckpointCorruptError(f"{tensor.path}: wanted a tensor of integers, found {tensor}")
    if tensor.nbytes > _MOST_INTEGER_BYTES:
        raise CheckpointCorruptError(f"{tensor.path}: wanted the ranks of a mesh, found {prod(tensor.shape)} numbers")
    data = bytearray(read_bytes(tensor))
    return [int(value) for value in torch.frombuffer(data, dtype=tensor.dtype)] if data else []


def read_bytes(tensor: PtTensor) -> bytes:
    """All bytes of a tensor that is dense. Raises CheckpointCorruptError."""
    try:
        descriptor = open_regular(tensor.path)
    except OSError as error:
        raise CheckpointCorruptError(f"{tensor.path}: cannot be opened: {error}") from error
    try:
        return read_exact(descriptor, tensor.nbytes, tensor.offset, tensor.path)
    finally:
        os.close(descriptor)


class _Finder(TensorFinder):
    """Tensors, and the stand-ins."""

    def find_any(self, module: str, name: str) -> Any:
        if (found := self.find(module, name)) is not None:
            return found
        if module.startswith("torch.distributed.") and name in _DTENSOR_CLASSES:
            return _STAND_INS[name]
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        return find_plain(module, name)


def _build(made: Any, state: Any) -> None:
    if not isinstance(made, PickledObject):
        raise PickleError(f"a state for a {type(made).__name__}")
    made.set_state(state)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, PickledObject):
        return (*value.args, value.state)
    return (value.spec,) if isinstance(value, PtDTensor) else ()


def _stand_in(name: str) -> Call:
    return Call(type(name, (PickledObject,), {}))


_STAND_INS = {name: _stand_in(name) for name in _DTENSOR_CLASSES}


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """`torch._tensor._rebuild_from_type_v2`: a tensor with attributes, or of a class of its own."""
    if not isinstance(function, Call) or not isinstance(args, tuple):
        raise PickleError("a tensor that nothing makes")
    made = function(*args)
    if kind is not _STAND_INS["DTensor"]:
        return made
    fields = PickledObject()
    fields.set_state(state)
    local, spec = fields.fields.get("_local_tensor"), fields.fields.get("_spec")
    if not isinstance(local, PtTensor) or not isinstance(spec, PickledObject) or not isinstance(made, tuple):
        raise PickleError(f"a DTensor of {local!r} and {spec!r}")
    return PtDTensor(local, made, spec)


def _wrapper_shape(kind: Any, dtype: Any, shape: Any, *_: Any) -> Shape:
    """`torch._utils._rebuild_wrapper_subclass`: of it only the shape says anything new."""
    return as_shape(shape)


def _first(value: Any, *_: Any) -> Any:
    return value


_OTHERS: dict[tuple[str, str], Any] = {
    ("torch", "Tensor"): _stand_in("Tensor"),
    ("torch", "device"): _stand_in("device"),
    ("torch.nn.parameter", "Parameter"): _stand_in("Parameter"),
    ("torch.serialization", "_get_layout"): Call(_first),
    ("torch._tensor", "_rebuild_from_type_v2"): Call(_from_type),
    ("torch._utils", "_rebuild_parameter"): Call(_first),
    ("torch._utils", "_rebuild_parameter_with_state"): Call(_first),
    ("torch._utils", "_rebuild_wrapper_subclass"): Call(_wrapper_shape),
    # transformer-engine's _extra_state, which nobody here opens.
    ("_io", "BytesIO"): _stand_in("BytesIO"),
}
