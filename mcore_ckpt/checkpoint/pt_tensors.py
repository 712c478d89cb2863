"""Finds and checks the place of each tensor in a pickle of `torch.save`, before bytes are read or allocated."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from mcore_ckpt.checkpoint.pt_archive import PtArchive
from mcore_ckpt.checkpoint.shapes import MOST_ELEMENTS, is_possible_shape
from mcore_ckpt.checkpoint.unpickling import Call, PickleError, as_shape
from mcore_ckpt.sharding.regions import Shape

# From `torch.storage._dtype_to_storage_type_map` (2.13). Tensors of newer dtypes have an UntypedStorage, and the pickle
# names their dtype separately.
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
}

# The pattern leaves out quantized dtypes, which need scales, and dtypes of less than one byte, with which torch (2.13)
# cannot compute.
_DTYPE = re.compile(r"b?float\d\w*|u?int(?:8|16|32|64)|bool|complex\d+|double|float|half|short|int|long")

_FLAGS = ("conj", "neg")


@dataclass(frozen=True)
class StoredBytes:
    """The bytes of a storage: `nbytes` bytes at byte `offset` of the archive. Several tensors can share a storage.

    `key` is the storage's name in the archive. `dtype` is the dtype that the pickle gives the storage.
    """

    key: str
    dtype: torch.dtype
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in a storage.

    `start` is the position of the tensor's first element in the storage. `start` and `stride` are in elements. `flags`
    contains "conj" if the tensor is the conjugate of the stored numbers, and "neg" if the tensor is their negative.
    """

    stored: StoredBytes
    dtype: torch.dtype
    start: int
    shape: Shape
    stride: Shape
    flags: tuple[str, ...] = ()

    @property
    def offset(self) -> int:
        """The offset of the first element in the archive, in bytes."""
        return self.stored.offset + self.start * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """True if the tensor's bytes are one contiguous range in row-major order."""
        return is_dense(self.shape, self.stride)


def is_known(dtype: torch.dtype) -> bool:
    """Returns True if readers accept tensors of a dtype."""
    return _DTYPE.fullmatch(str(dtype).removeprefix("torch.")) is not None


def is_dense(shape: Shape, stride: Shape) -> bool:
    """Returns True if the bytes of a tensor with these strides (in elements) are one contiguous, row-major range."""
    expected = 1
    for length, step in reversed(list(zip(shape, stride, strict=True))):
        if length != 1 and step != expected:
            return prod(shape) == 0
        expected *= length
    return True


class TensorFinder:
    """Resolves a pickle's references to dtypes, storages and tensors. `make` makes a tensor from its place."""

    def __init__(self, archive: PtArchive, make: Callable[[TensorPlace], Any]) -> None:
        self._archive, self._make = archive, make
        self._stored: dict[str, StoredBytes] = {}
        self._known: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): Call(self._tensor_v2),
            ("torch._utils", "_rebuild_tensor_v3"): Call(self._tensor_v3),
        }

    def find(self, module: str, name: str) -> Any:
        """Returns the dtype or function that a global name refers to; for a storage class, the dtype of its elements.

        Returns None if the name is unknown.
        """
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        # `getattr` would let a file make torch import more of its modules. `vars` imports nothing.
        if module == "torch" and _DTYPE.fullmatch(name) and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        return self._known.get((module, name))

    def stored(self, reference: Any) -> StoredBytes:
        """Returns the stored bytes that a reference in the pickle names."""
        if not isinstance(reference, tuple) or len(reference) != 5:
            raise PickleError("a reference in the pickle does not name a storage")
        kind, dtype, key, _, length = reference
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(length) is not int or type(key) is not str:
            raise PickleError("a reference in the pickle does not name a storage")
        if key not in self._stored:
            self._stored[key] = StoredBytes(key, dtype, *self._archive.place(f"data/{key}"))
        found = self._stored[key]
        if found.dtype != dtype or found.nbytes != length * dtype.itemsize:
            raise PickleError(f"record data/{key} has {found.nbytes} bytes, not {length} elements of {dtype}")
        return found

    def _tensor_v2(self, stored: Any, start: Any, shape: Any, stride: Any, *more: Any) -> Any:
        dtype = stored.dtype if isinstance(stored, StoredBytes) else None
        return self._tensor(stored, dtype, start, shape, stride, more[2:3])

    def _tensor_v3(self, stored: Any, start: Any, shape: Any, stride: Any, *more: Any) -> Any:
        return self._tensor(stored, more[2] if len(more) > 2 else None, start, shape, stride, more[3:4])

    def _tensor(self, stored: Any, dtype: Any, start: Any, shape: Any, stride: Any, flags: tuple[Any, ...]) -> Any:
        if not isinstance(stored, StoredBytes) or not isinstance(dtype, torch.dtype) or type(start) is not int:
            raise PickleError("a tensor in the pickle has no storage, dtype or start")
        lengths, steps = as_shape(shape), as_shape(stride)
        tensor = f"a tensor in the pickle, of shape {str(lengths)[:200]},"
        if len(lengths) != len(steps) or min((start, *lengths, *steps)) < 0:
            raise PickleError(f"{tensor} cannot have start {start} and strides {str(steps)[:200]}")
        if not is_possible_shape(lengths) or max(steps, default=0) > MOST_ELEMENTS:
            raise PickleError(f"{tensor} has more axes or elements than a tensor can have")
        count = prod(lengths)
        last = start + sum((length - 1) * step for length, step in zip(lengths, steps, strict=True))
        if start * dtype.itemsize > stored.nbytes or (count and (last + 1) * dtype.itemsize > stored.nbytes):
            raise PickleError(f"{tensor} reaches past the end of its storage of {stored.nbytes} bytes")
        return self._make(TensorPlace(stored, dtype, start, lengths, steps, _flags(flags)))


def _flags(given: tuple[Any, ...]) -> tuple[str, ...]:
    flags = given[0] if given else None
    if flags is None:
        return ()
    if not isinstance(flags, dict) or any(name not in _FLAGS or type(flags[name]) is not bool for name in flags):
        raise PickleError(f"a tensor in the pickle has unknown flags: {str(flags)[:80]}")
    return tuple(name for name in _FLAGS if flags.get(name))


def parameter(tensor: Any, *_: Any) -> Any:
    """Replaces `torch._utils._rebuild_parameter`. Returns the tensor, and ignores the other arguments."""
    return tensor


def with_attributes(function: Any, kind: Any, args: Any, *_: Any) -> Any:
    """Replaces `torch._tensor._rebuild_from_type_v2`. Returns only the tensor, which is `function(*args)`."""
    if not isinstance(function, Call) or not isinstance(args, tuple):
        raise PickleError("a tensor in the pickle is made by something that is not a known function")
    return function(*args)


PARAMETERS: dict[tuple[str, str], Any] = {
    # Pickles pass these two classes as arguments to `_rebuild_from_type_v2`. The classes are never called.
    ("torch", "Tensor"): "torch.Tensor",
    ("torch.nn.parameter", "Parameter"): "torch.nn.Parameter",
    ("torch._tensor", "_rebuild_from_type_v2"): Call(with_attributes),
    ("torch._utils", "_rebuild_parameter"): Call(parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Call(parameter),
}
