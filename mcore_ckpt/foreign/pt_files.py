"""What a file of `torch.save` holds, and where in it: nothing is loaded, nothing that it names is imported or run.

`torch.load(weights_only=True)` cannot do this for what FSDP writes: a `DTensor` brings a `DeviceMesh`, whose class asks
for process groups (torch 2.13). Here every class of a pickle is a stand-in that keeps what it is handed.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.sharding.regions import Shape
from mcore_ckpt.storage.files import read_exact

_LOCAL_HEADER = struct.Struct("<26xHH")

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
        expected = 1
        for length, stride in reversed(list(zip(self.shape, self.stride, strict=True))):
            if length != 1 and stride != expected:
                return prod(self.shape) == 0
            expected *= length
        return True


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
    spec: Record


class Record:
    """Stands in for an object of some class: what it was made from, and its fields."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.fields: dict[str, Any] = {}
        self.state: Any = None

    def __new__(cls, *args: Any) -> Record:
        # A pickle makes objects without __init__, too.
        made = super().__new__(cls)
        Record.__init__(made, *args)
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, Mapping):
                self.fields.update(part)


class _Storage(NamedTuple):
    dtype: torch.dtype
    offset: int
    nbytes: int


def read_pt(path: Path, start: int = 0, nbytes: int | None = None) -> Any:
    """The object in a file of `torch.save`, with `PtTensor` and `PtDTensor` for its tensors.

    Objects of the few classes that may be in it are `Record`s.

    Args:
        path: the file.
        start, nbytes: where in it, if it holds several, one behind the other.

    Raises:
        CheckpointCorruptError: it is missing, damaged, or has a class in it that does not belong there.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            window = _Window(file.fileno(), start, size - start if nbytes is None else nbytes, path)
            if start < 0 or window.size < 0 or start + window.size > size:
                raise CheckpointCorruptError(f"{path}: has {size} bytes, not the {start} + {nbytes} asked for: cut")
            with zipfile.ZipFile(io.BufferedReader(window)) as archive:
                return _Archive(path, window, archive).load()
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path}: missing") from None
    except CheckpointCorruptError:
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointCorruptError(
            f"{path}: is not a file of torch.save, was cut, or was written by torch before 1.6: {error}"
        ) from error
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointCorruptError(f"{path}: cannot be read: {type(error).__name__}: {str(error)[:400]}") from error


def read_integers(tensor: PtTensor) -> list[int]:
    """The values of a small tensor of integers. Raises CheckpointCorruptError."""
    if not tensor.is_dense or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        raise CheckpointCorruptError(f"{tensor.path}: wanted a tensor of integers, found {tensor}")
    with tensor.path.open("rb") as file:
        data = bytearray(read_exact(file.fileno(), tensor.nbytes, tensor.offset, tensor.path))
    return [int(value) for value in torch.frombuffer(data, dtype=tensor.dtype)] if data else []


class _Window(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, descriptor: int, start: int, size: int, path: Path) -> None:
        self._descriptor, self.start, self.size, self._path = descriptor, start, size, path
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if self._at < 0:
            raise OSError(f"{self._path}: no byte {self._at}")
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer)[: max(0, self.size - self._at)]
        count = os.preadv(self._descriptor, [target], self.start + self._at) if target else 0
        self._at += count
        return count

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return read_exact(self._descriptor, nbytes, self.start + offset, self._path)


class _Archive:
    """The zip file that `torch.save` writes."""

    def __init__(self, path: Path, window: _Window, archive: zipfile.ZipFile) -> None:
        self._path, self._window, self._archive = path, window, archive
        pickles = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointCorruptError(f"{path}: is not a file of torch.save: it has {len(pickles)} data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")
        self._records = {info.filename: info for info in archive.infolist()}
        self._storages: dict[str, _Storage] = {}

    def load(self) -> Any:
        order = self._root + "byteorder"
        if order in self._records and self._archive.read(order) != b"little":
            raise CheckpointCorruptError(f"{self._path}: was written by a big-endian machine")
        return _Unpickler(self._archive.read(self._root + "data.pkl"), self._path, self._storage).load()

    def _storage(self, reference: Any) -> _Storage:
        kind, dtype, key, _, length = reference
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(length, int):
            raise pickle.UnpicklingError(f"no storage: {reference!r}")
        if key not in self._storages:
            info = self._records[f"{self._root}data/{key}"]
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != length * dtype.itemsize:
                raise pickle.UnpicklingError(f"data/{key} has {info.file_size} bytes, not {length} of {dtype}")
            name, extra = _LOCAL_HEADER.unpack(self._window.read_at(info.header_offset, _LOCAL_HEADER.size))
            offset = info.header_offset + _LOCAL_HEADER.size + name + extra
            if offset + info.file_size > self._window.size:
                raise pickle.UnpicklingError(f"data/{key} lies beyond the end: the file was cut")
            self._storages[key] = _Storage(dtype, self._window.start + offset, info.file_size)
        return self._storages[key]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: Path, storage: Callable[[Any], _Storage]) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        self._storage = storage

    def persistent_load(self, reference: Any) -> _Storage:
        return self._storage(reference)

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        # Not getattr: torch imports some of its modules when they are asked for.
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return self._tensor_v2 if name.endswith("2") else self._tensor_v3
        if module.startswith("torch.distributed.") and name in _DTENSOR_CLASSES:
            return _STAND_INS[name]
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into it: written by whom? Nothing was run")

    def _tensor_v2(self, storage: _Storage, start: int, shape: Any, stride: Any, *more: Any) -> PtTensor:
        return self._tensor(storage, storage.dtype, start, shape, stride, more[2] if len(more) > 2 else None)

    def _tensor_v3(self, storage: _Storage, start: int, shape: Any, stride: Any, *more: Any) -> PtTensor:
        return self._tensor(storage, more[2], start, shape, stride, more[3] if len(more) > 3 else None)

    def _tensor(
        self, storage: _Storage, dtype: torch.dtype, start: int, shape: Any, stride: Any, flags: Any
    ) -> PtTensor:
        lengths, steps = tuple(map(int, shape)), tuple(map(int, stride))
        if flags:
            raise pickle.UnpicklingError(f"a tensor that is marked {flags}")
        if len(lengths) != len(steps) or min((start, *lengths, *steps)) < 0:
            raise pickle.UnpicklingError(f"a tensor of shape {lengths}, strides {steps} from {start} on")
        last = start + sum((length - 1) * step for length, step in zip(lengths, steps, strict=True))
        if prod(lengths) and (last + 1) * dtype.itemsize > storage.nbytes:
            raise pickle.UnpicklingError(f"a tensor of shape {lengths} leaves its storage of {storage.nbytes} bytes")
        return PtTensor(dtype, lengths, steps, self._path, storage.offset + start * dtype.itemsize)


def _stand_in(name: str) -> type[Record]:
    return type(name, (Record,), {})


_STAND_INS = {name: _stand_in(name) for name in _DTENSOR_CLASSES}


def _from_type(function: Callable[..., Any], kind: Any, args: Any, state: Any) -> Any:
    """`torch._tensor._rebuild_from_type_v2`: a tensor with attributes, or of a class of its own."""
    made = function(*args)
    if kind is not _STAND_INS["DTensor"]:
        return made
    fields = Record()
    fields.__setstate__(state)
    local, spec = fields.fields.get("_local_tensor"), fields.fields.get("_spec")
    if not isinstance(local, PtTensor) or not isinstance(spec, Record) or not isinstance(made, tuple):
        raise pickle.UnpicklingError(f"a DTensor of {local!r} and {spec!r}")
    return PtDTensor(local, made, spec)


def _wrapper_shape(kind: Any, dtype: Any, shape: Sequence[int], *_: Any) -> Shape:
    """`torch._utils._rebuild_wrapper_subclass`: of it only the shape says anything new."""
    return tuple(map(int, shape))


def _first(value: Any, *_: Any) -> Any:
    return value


def _shape(lengths: Sequence[int] = ()) -> Shape:
    return tuple(map(int, lengths))


_OTHERS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): _shape,
    ("torch", "Tensor"): _stand_in("Tensor"),
    ("torch", "device"): _stand_in("device"),
    ("torch.nn.parameter", "Parameter"): _stand_in("Parameter"),
    ("torch.serialization", "_get_layout"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._utils", "_rebuild_wrapper_subclass"): _wrapper_shape,
    # transformer-engine's _extra_state, which nobody here opens.
    ("_io", "BytesIO"): _stand_in("BytesIO"),
    ("_codecs", "encode"): _first,
}
