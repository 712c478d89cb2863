"""Pickles of other programs, opened without running anything that is in them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import io
import os
import re
import types
from collections.abc import Callable, Iterable
from enum import Enum
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mcore_ckpt.checkpoint.pt_tensors import StoredBytes
from mcore_ckpt.checkpoint.pt_values import Storage, copied_from, load_pt, reader_of
from mcore_ckpt.checkpoint.unpickling import (
    Call,
    PickleError,
    Unpickler,
    as_shape,
    check_extent,
    check_key,
    find_plain,
)
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import open_regular, read_exact, read_small

if TYPE_CHECKING:
    import numpy

# What torch 2.13 and megatron 0.16.1 put into the `.metadata` of a checkpoint, and mcore 0.15 did. All are plain data.
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
}
_ENUMS = {"megatron.core.enums": ("ModelType",), "megatron.core.transformer.enums": ("AttnBackend",)}
_NUMPY_ARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
# Numbers: of anything else a pickled dtype says itself how large it is and where what is.
_NUMPY_NUMBER = re.compile(r"[biufc](?:1|2|4|8|16)")
_NUMPY_DTYPE_STATES = tuple((3, order, None, None, None, -1, -1, 0) for order in ("<", "|"))


def load_safely(source: Path | bytes, name: str, mmap: bool = False) -> Any:
    """What `torch.save` wrote: plain values, tensors, and a short list of classes that only hold data.

    Args:
        source: a file, or its bytes.
        name: what it is, for messages.
        mmap: leave tensors on disk until they are asked for; for files.

    Raises:
        CheckpointCorruptError: it is missing, damaged, or has anything else in it.
    """
    try:
        if isinstance(source, bytes):
            return load_pt(reader_of(source), len(source), copied_from(source), _find_data, _build_data)
        return _load_file(source, mmap)
    except CheckpointCorruptError:
        raise
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{name}: missing") from None
    except Exception as error:  # torch and NumPy raise many types for what is no tensor and no array
        raise CheckpointCorruptError(f"{name}: holds more than data, or is damaged: {_short(error)}") from error


def _load_file(path: Path, mmap: bool) -> Any:
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if not mmap and size > limits.PLAIN_BYTES:
            raise CheckpointCorruptError(f"{path}: has {size} bytes, more than {limits.PLAIN_BYTES} for a small file")

        def read_at(offset: int, nbytes: int) -> bytes:
            return read_exact(descriptor, nbytes, offset, path)

        def storage(stored: StoredBytes) -> torch.Tensor:
            data = read_at(stored.offset, stored.nbytes)
            return copied_from(data)(dataclasses.replace(stored, offset=0))

        return load_pt(read_at, size, _mapped(path, size) if mmap else storage, _find_data, _build_data)
    finally:
        os.close(descriptor)


def _mapped(path: Path, size: int) -> Storage:
    whole = torch.from_file(str(path), False, size, dtype=torch.uint8)

    def storage(stored: StoredBytes) -> torch.Tensor:
        return whole[stored.offset : stored.offset + stored.nbytes]

    return storage


def load_metadata(path: Path) -> Any:
    """The `.metadata` of a torch_dist checkpoint.

    torch's own reader (2.13, `FileSystemReader.read_metadata`) runs whatever is in this pickle.

    Raises:
        CheckpointCorruptError: it is missing, damaged, or has a class in it that does not belong there.
    """
    try:
        data = read_small(path, limits.PICKLE_BYTES)
        value = Unpickler(data, _find_metadata, build=_build_metadata).load()
        check_extent(value, len(data), _fields)
        return value
    except CheckpointCorruptError:
        raise
    except Exception as error:  # torch's classes check some of what they are given
        raise CheckpointCorruptError(f"{path}: cannot be read: {_short(error)}") from error


# -- .metadata ---------------------------------------------------------------------------------------------


def _find_metadata(module: str, name: str) -> Any:
    if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
        return vars(torch)[name]
    if name in _METADATA_CLASSES.get(module, ()):
        return _maker(getattr(importlib.import_module(module), name))
    found = _METADATA_OTHERS.get((module, name))
    return find_plain(module, name) if found is None else found


def _maker(cls: type) -> Call:
    if issubclass(cls, Enum):
        return Call(lambda value: _member(cls, value))

    def make(*args: Any) -> Any:
        if args:
            raise PickleError(f"a {cls.__name__} that is made of something")
        return cls.__new__(cls)

    return Call(make)


def _member(cls: Callable[[Any], Any], value: Any) -> Any:
    check_key(value)
    return cls(value)


def _size(*args: Any) -> torch.Size:
    return torch.Size(as_shape(*args))


def _path(*parts: Any) -> Path:
    if any(type(part) is not str for part in parts):
        raise PickleError("a path of no names")
    return Path(*parts)


def _device(*args: Any) -> torch.device:
    if any(type(arg) not in (str, int) for arg in args):
        raise PickleError("a device without a name")
    return torch.device(*args)


def _layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise PickleError("a layout of memory other than strides")
    return torch.strided


_METADATA_OTHERS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): Call(_size),
    ("torch", "device"): Call(_device),
    ("torch.serialization", "_get_layout"): Call(_layout),
    # The folder that torch's own writer was told (`StorageMeta.checkpoint_id`).
    ("pathlib", "PosixPath"): Call(_path),
}


def _build_metadata(made: Any, state: Any) -> None:
    cls = type(made)
    if cls.__name__ not in _METADATA_CLASSES.get(cls.__module__, ()):
        raise PickleError(f"a state for a {cls.__name__}")
    if hasattr(cls, "__setstate__") and isinstance(state, tuple):
        made.__setstate__(state)  # TensorProperties, of five fields
        return
    # What these classes do not know, of another version of them, is kept: nobody looks at it.
    if not isinstance(state, dict) or any(type(name) is not str or name.startswith("__") for name in state):
        raise PickleError(f"a state for a {cls.__name__} that is none")
    vars(made).update(state)
    if cls.__name__ == "MetadataIndex":
        # It is a key: hashed with what is in it.
        check_key((made.fqn, made.offset, made.index))


def _fields(value: Any) -> Iterable[Any]:
    return vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, Enum) else ()


# -- what torch.save wrote ---------------------------------------------------------------------------------


def _find_data(module: str, name: str) -> Any:
    if name in _ENUMS.get(module, ()):
        return _maker(getattr(importlib.import_module(module), name))
    if module in _NUMPY_ARRAY and name == "_reconstruct":
        return Call(_empty_array)
    found = _DATA.get((module, name))
    return find_plain(module, name) if found is None else found


def _nothing_of(cls: Callable[[], Any]) -> Call:
    def make(*args: Any) -> Any:
        if args:
            raise PickleError(f"a {cls} that is made of something")
        return cls()

    return Call(make)


def _empty_array(kind: Any, shape: Any, code: Any) -> numpy.ndarray[Any, Any]:
    import numpy

    if kind != "numpy.ndarray" or shape != (0,) or code not in (b"b", "b"):
        raise PickleError("an array that is none of NumPy's")
    return numpy.empty(0, dtype="b")


def _number_type(code: Any, *flags: Any) -> numpy.dtype[Any]:
    import numpy

    if type(code) is not str or not _NUMPY_NUMBER.fullmatch(code):
        raise PickleError(f"an array of {str(code)[:80]!r}, not of numbers")
    return numpy.dtype(code)


_DATA: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): _nothing_of(argparse.Namespace),
    ("types", "SimpleNamespace"): _nothing_of(types.SimpleNamespace),
    ("_io", "BytesIO"): _nothing_of(io.BytesIO),
    ("pathlib", "PosixPath"): Call(_path),
    ("torch", "device"): Call(_device),
    ("numpy", "ndarray"): "numpy.ndarray",
    ("numpy", "dtype"): Call(_number_type),
}


def _build_data(made: Any, state: Any) -> None:
    import numpy

    if isinstance(made, numpy.ndarray):
        _fill_array(made, state)
    elif isinstance(made, numpy.dtype):
        if state not in _NUMPY_DTYPE_STATES:
            raise PickleError("an array of numbers that NumPy does not have")
    elif isinstance(made, io.BytesIO) and isinstance(state, tuple) and state and type(state[0]) is bytes:
        made.write(state[0])
        made.seek(0)
    elif isinstance(made, (argparse.Namespace, types.SimpleNamespace)) and isinstance(state, dict):
        if any(type(name) is not str or name.startswith("__") for name in state):
            raise PickleError("fields without names")
        vars(made).update(state)
    else:
        raise PickleError(f"a state for a {type(made).__name__}")


def _fill_array(made: numpy.ndarray[Any, Any], state: Any) -> None:
    import numpy

    _, shape, dtype, by_column, data = state
    lengths = as_shape(shape)
    if not isinstance(dtype, numpy.dtype) or type(data) is not bytes or type(by_column) is not bool:
        raise PickleError("an array of no numbers")
    if min(lengths, default=0) < 0 or prod(lengths) * dtype.itemsize != len(data):
        raise PickleError(f"an array of shape {str(lengths)[:200]} of {len(data)} bytes")
    numpy.ndarray.__setstate__(made, (1, lengths, dtype, by_column, data))  # type: ignore[arg-type]


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"
