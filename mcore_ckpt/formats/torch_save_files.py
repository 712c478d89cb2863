"""Finds the tensors in a file of `torch.save`, and where their bytes are in the file.

`read_pt` reads no tensor's bytes, and neither imports nor executes anything that the file names.

`torch.load(weights_only=True)` cannot load the files that FSDP training saves, because a `DTensor` contains a
`DeviceMesh`, which needs process groups (torch 2.13). This module replaces each object of these classes by a
`PickledObject`, which keeps the object's constructor arguments and fields.
"""

from __future__ import annotations

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
from mcore_ckpt.io.files import opened, read_exact
from mcore_ckpt.sharding.regions import Shape

_MOST_INTEGER_BYTES = 64 << 20

# Only the names of these classes are compared, because the classes were in other modules before torch 2.5.
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
    """A tensor in a file. Its first element is at byte `offset` of `path`, and `stride` locates the other elements."""

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
        """True if the elements are one contiguous range of bytes, in row-major order."""
        return is_dense(self.shape, self.stride)


@dataclass(frozen=True)
class PtDTensor:
    """One rank's part of a `DTensor`.

    Attributes:
        local: the tensor that the rank stored.
        shape: the shape of the global tensor.
        spec: the `PickledObject` that replaces the `DTensorSpec`; its fields have the mesh and the placements.
    """

    local: PtTensor
    shape: Shape
    spec: PickledObject


class PickledObject:
    """Replaces a pickled object, and keeps the object's constructor arguments and its fields."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.fields: dict[str, Any] = {}
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        """Stores the state that a pickle sets: a dict of fields, or a tuple of two dicts (fields and slots)."""
        self.state = state
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, Mapping):
                self.fields.update(part)


def read_pt(path: Path, start: int = 0, nbytes: int | None = None) -> Any:
    """Reads the object in a file of `torch.save`, with a `PtTensor` or `PtDTensor` in place of each tensor.

    The pickle may name a few other classes, too: a `PickledObject` replaces each object of these classes.

    Args:
        start, nbytes: the first byte and the number of bytes of one archive, for a file that has several archives one
            after the other.

    Raises CheckpointCorruptError: the file is missing or damaged, or names a class that is not allowed.
    """
    try:
        with opened(path) as (descriptor, size):
            length = size - start if nbytes is None else nbytes
            if min(start, length) < 0 or start + length > size:
                raise CheckpointCorruptError(
                    f"{path}: has {size} bytes, but needs {length} bytes from byte {start} on: the file was cut"
                )
            return _read(path, start, length, lambda at, count: read_exact(descriptor, count, start + at, path))
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path}: missing") from None
    except CheckpointCorruptError:
        raise
    except ArchiveError as error:
        raise CheckpointCorruptError(f"{path}: was not written by torch.save, or was cut: {error}") from error
    except Exception as error:  # a damaged pickle can raise any type of error
        raise CheckpointCorruptError(f"{path}: cannot be read: {type(error).__name__}: {str(error)[:400]}") from error


def as_state_dict(saved: Any, where: str) -> Mapping[str, Any]:
    """Returns the object of a file if it is a mapping. Raises CheckpointCorruptError, which begins with `where`."""
    if not isinstance(saved, Mapping):
        raise CheckpointCorruptError(f"{where}: wanted a state dict, found a {type(saved).__name__}")
    return saved


def as_tensor(value: Any, where: str) -> PtTensor:
    """Returns a value if it is a tensor. Raises CheckpointCorruptError, which begins with `where`."""
    if not isinstance(value, PtTensor):
        raise CheckpointCorruptError(f"{where}: wanted a tensor, found a {type(value).__name__}")
    return value


def _read(path: Path, start: int, nbytes: int, read_at: ReadAt) -> Any:
    def tensor(place: TensorPlace) -> PtTensor:
        if place.flags:
            raise PickleError(f"the pickle has a tensor with the flags {place.flags}")
        return PtTensor(place.dtype, place.shape, place.stride, path, start + place.offset)

    archive = PtArchive(read_at, nbytes)
    finder = _Finder(archive, tensor)
    data = archive.read("data.pkl")
    value = Unpickler(data, finder.find_any, finder.stored, _build).load()
    check_extent(value, len(data), _parts)
    return value


def read_integers(tensor: PtTensor) -> list[int]:
    """Reads a small tensor of integers. Raises CheckpointCorruptError if the tensor is too large or not of integers."""
    if not tensor.is_dense or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        raise CheckpointCorruptError(f"{tensor.path}: expected a tensor of integers, found {tensor}")
    if tensor.nbytes > _MOST_INTEGER_BYTES:
        raise CheckpointCorruptError(f"{tensor.path}: expected the ranks of a mesh, found {prod(tensor.shape)} numbers")
    data = bytearray(read_bytes(tensor))
    return [int(value) for value in torch.frombuffer(data, dtype=tensor.dtype)] if data else []


def read_bytes(tensor: PtTensor) -> bytes:
    """Reads all bytes of a dense tensor. Raises CheckpointCorruptError if the file is missing or truncated."""
    try:
        with opened(tensor.path) as (descriptor, _):
            return read_exact(descriptor, tensor.nbytes, tensor.offset, tensor.path)
    except OSError as error:
        raise CheckpointCorruptError(f"{tensor.path}: cannot be opened: {error}") from error


class _Finder(TensorFinder):
    """Finds the replacement of each class and function that a pickle names."""

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
        raise PickleError(f"the pickle sets the state of a {type(made).__name__}")
    made.set_state(state)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, PickledObject):
        return (*value.args, value.state)
    return (value.spec,) if isinstance(value, PtDTensor) else ()


def _stand_in(name: str) -> Call:
    return Call(type(name, (PickledObject,), {}))


_STAND_INS = {name: _stand_in(name) for name in _DTENSOR_CLASSES}


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Replaces `torch._tensor._rebuild_from_type_v2`, which makes a tensor that has attributes or is of a subclass."""
    if not isinstance(function, Call) or not isinstance(args, tuple):
        raise PickleError("the pickle has a tensor, but no function that builds the tensor")
    made = function(*args)
    if kind is not _STAND_INS["DTensor"]:
        return made
    fields = PickledObject()
    fields.set_state(state)
    local, spec = fields.fields.get("_local_tensor"), fields.fields.get("_spec")
    if not isinstance(local, PtTensor) or not isinstance(spec, PickledObject) or not isinstance(made, tuple):
        raise PickleError(f"the pickle has a DTensor with the local tensor {local!r} and the spec {spec!r}")
    return PtDTensor(local, made, spec)


def _wrapper_shape(kind: Any, dtype: Any, shape: Any, *_: Any) -> Shape:
    """Replaces `torch._utils._rebuild_wrapper_subclass`.

    Returns the shape, because no other argument is needed here.
    """
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
    # transformer-engine's `_extra_state` is a BytesIO, whose bytes this module never opens.
    ("_io", "BytesIO"): _stand_in("BytesIO"),
}
