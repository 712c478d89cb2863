"""Tensors in a pickle of `torch.save`: which bytes they are, checked before anybody reads or allocates them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from mcore_ckpt.checkpoint.pt_archive import PtArchive
from mcore_ckpt.checkpoint.unpickling import Call, PickleError, as_shape
from mcore_ckpt.sharding.regions import Shape

# `torch.storage._dtype_to_storage_type_map` (2.13). Newer dtypes come with an UntypedStorage and say theirs.
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

# Not the quantized ones, which have scales, nor those below a byte, with which torch (2.13) can do nothing.
_DTYPE = re.compile(r"b?float\d\w*|u?int(?:8|16|32|64)|bool|complex\d+|double|float|half|short|int|long")

# As many as torch has.
_MOST_AXES = 64
_MOST_ELEMENTS = 2**62
_FLAGS = ("conj", "neg")


@dataclass(frozen=True)
class StoredBytes:
    """What several tensors may share: `nbytes` from byte `offset` of the archive on. `dtype`: of the pickle's word."""

    key: str
    dtype: torch.dtype
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of bytes that are there: its first element is element `start`, the others where the strides say.

    `flags`: "conj" and "neg", of complex numbers that are kept as those they are made from.
    """

    stored: StoredBytes
    dtype: torch.dtype
    start: int
    shape: Shape
    stride: Shape
    flags: tuple[str, ...] = ()

    @property
    def offset(self) -> int:
        """In bytes of the archive."""
        return self.stored.offset + self.start * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        return is_dense(self.shape, self.stride)


def is_dense(shape: Shape, stride: Shape) -> bool:
    """Whether the bytes of such a tensor are one range, row-major."""
    expected = 1
    for length, step in reversed(list(zip(shape, stride, strict=True))):
        if length != 1 and step != expected:
            return prod(shape) == 0
        expected *= length
    return True


class TensorFinder:
    """What the names of tensors in a pickle stand for.

    Args:
        archive: has their bytes.
        make: what takes a tensor's place in the result.
    """

    def __init__(self, archive: PtArchive, make: Callable[[TensorPlace], Any]) -> None:
        self._archive, self._make = archive, make
        self._stored: dict[str, StoredBytes] = {}
        self._known: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): Call(self._tensor_v2),
            ("torch._utils", "_rebuild_tensor_v3"): Call(self._tensor_v3),
        }

    def find(self, module: str, name: str) -> Any:
        """The dtype, storage or function of that name, or None."""
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        # Not getattr: torch imports some of its modules when they are asked for.
        if module == "torch" and _DTYPE.fullmatch(name) and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        return self._known.get((module, name))

    def stored(self, reference: Any) -> StoredBytes:
        """What a pickle's reference to a storage stands for."""
        if not isinstance(reference, tuple) or len(reference) != 5:
            raise PickleError("no reference to a storage")
        kind, dtype, key, _, length = reference
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(length) is not int or type(key) is not str:
            raise PickleError("no reference to a storage")
        if key not in self._stored:
            self._stored[key] = StoredBytes(key, dtype, *self._archive.place(f"data/{key}"))
        found = self._stored[key]
        if found.dtype != dtype or found.nbytes != length * dtype.itemsize:
            raise PickleError(f"data/{key} has {found.nbytes} bytes, not {length} of {dtype}")
        return found

    def _tensor_v2(self, stored: Any, start: Any, shape: Any, stride: Any, *more: Any) -> Any:
        dtype = stored.dtype if isinstance(stored, StoredBytes) else None
        return self._tensor(stored, dtype, start, shape, stride, more[2:3])

    def _tensor_v3(self, stored: Any, start: Any, shape: Any, stride: Any, *more: Any) -> Any:
        return self._tensor(stored, more[2] if len(more) > 2 else None, start, shape, stride, more[3:4])

    def _tensor(self, stored: Any, dtype: Any, start: Any, shape: Any, stride: Any, flags: tuple[Any, ...]) -> Any:
        if not isinstance(stored, StoredBytes) or not isinstance(dtype, torch.dtype) or type(start) is not int:
            raise PickleError("a tensor of no storage")
        lengths, steps = as_shape(shape), as_shape(stride)
        words = f"a tensor of {len(lengths)} axes, {str(lengths)[:200]}"
        if len(lengths) != len(steps) or len(lengths) > _MOST_AXES or min((start, *lengths, *steps)) < 0:
            raise PickleError(f"{words}, strides {str(steps)[:200]}")
        # The product without empty axes: torch multiplies all of them.
        if prod([length or 1 for length in lengths]) > _MOST_ELEMENTS or max(steps, default=0) > _MOST_ELEMENTS:
            raise PickleError(f"{words}: more elements than there are numbers for")
        count = prod(lengths)
        last = start + sum((length - 1) * step for length, step in zip(lengths, steps, strict=True))
        if start * dtype.itemsize > stored.nbytes or (count and (last + 1) * dtype.itemsize > stored.nbytes):
            raise PickleError(f"{words} leaves its storage of {stored.nbytes} bytes")
        return self._make(TensorPlace(stored, dtype, start, lengths, steps, _flags(flags)))


def _flags(said: tuple[Any, ...]) -> tuple[str, ...]:
    flags = said[0] if said else None
    if flags is None:
        return ()
    if not isinstance(flags, dict) or any(name not in _FLAGS or type(flags[name]) is not bool for name in flags):
        raise PickleError(f"a tensor that is marked {str(flags)[:80]}")
    return tuple(name for name in _FLAGS if flags.get(name))


def parameter(tensor: Any, *_: Any) -> Any:
    """`torch._utils._rebuild_parameter`: of it only the tensor says anything new."""
    return tensor


def with_attributes(function: Any, kind: Any, args: Any, *_: Any) -> Any:
    """`torch._tensor._rebuild_from_type_v2`: of it only the tensor says anything new."""
    if not isinstance(function, Call) or not isinstance(args, tuple):
        raise PickleError("a tensor that nothing makes")
    return function(*args)


PARAMETERS: dict[tuple[str, str], Any] = {
    # Not to be called: they stand beside the function that makes the tensor.
    ("torch", "Tensor"): "torch.Tensor",
    ("torch.nn.parameter", "Parameter"): "torch.nn.Parameter",
    ("torch._tensor", "_rebuild_from_type_v2"): Call(with_attributes),
    ("torch._utils", "_rebuild_parameter"): Call(parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Call(parameter),
}
