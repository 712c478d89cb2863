"""Loads pickles of other programs. A pickle may name only classes and functions that hold or rebuild data.

`load_safely` loads a file of `torch.save`; `load_metadata` loads the `.metadata` of a torch_dist checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import io
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
from mcore_ckpt.checkpoint.unpickling import Call, PickleError, Unpickler, as_shape, check_extent, check_key, find_plain
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import opened, read_exact, read_small

if TYPE_CHECKING:
    import numpy

# The classes in the `.metadata` that torch 2.13 writes with megatron-core 0.16.1 or 0.15. All of them only hold data.
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
# Only dtypes of numbers are allowed. Other pickled dtypes define their own size and fields, which nothing would check.
_NUMPY_NUMBER = re.compile(r"[biufc](?:1|2|4|8|16)")
_NUMPY_DTYPE_STATES = tuple((3, order, None, None, None, -1, -1, 0) for order in ("<", "|"))


def load_safely(source: Path | bytes, name: str, mmap: bool = False) -> Any:
    """Loads what `torch.save` wrote: plain values, tensors, and objects of a few classes that only hold data.

    Args:
        source: the path of the file, or the bytes of the file.
        name: the name of the source in error messages.
        mmap: whether to map the tensors of a file into memory instead of reading them. Files larger than PLAIN_BYTES
            can only be mapped.

    Raises:
        CheckpointCorruptError: the file is missing, damaged or too large, or contains other objects.
    """
    try:
        if isinstance(source, bytes):
            return load_pt(reader_of(source), len(source), copied_from(source), _find_data, _build_data)
        return _load_file(source, mmap)
    except CheckpointCorruptError:
        raise
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{name}: missing") from None
    except Exception as error:  # torch and NumPy raise many types of errors for malformed tensors and arrays
        raise CheckpointCorruptError(f"{name}: holds more than data, or is damaged: {_short(error)}") from error


def _load_file(path: Path, mmap: bool) -> Any:
    with opened(path) as (descriptor, size):
        if not mmap and size > limits.PLAIN_BYTES:
            raise CheckpointCorruptError(f"{path}: has {size} bytes, but only {limits.PLAIN_BYTES} can be read at once")

        def read_at(offset: int, nbytes: int) -> bytes:
            return read_exact(descriptor, nbytes, offset, path)

        def storage(stored: StoredBytes) -> torch.Tensor:
            data = read_at(stored.offset, stored.nbytes)
            return copied_from(data)(dataclasses.replace(stored, offset=0))

        return load_pt(read_at, size, _mapped(path, size) if mmap else storage, _find_data, _build_data)


def _mapped(path: Path, size: int) -> Storage:
    whole = torch.from_file(str(path), False, size, dtype=torch.uint8)

    def storage(stored: StoredBytes) -> torch.Tensor:
        return whole[stored.offset : stored.offset + stored.nbytes]

    return storage


def load_metadata(path: Path) -> Any:
    """Loads the `.metadata` of a torch_dist checkpoint.

    torch's own reader (`FileSystemReader.read_metadata`, 2.13) unpickles this file, and so executes any code in the
    file.

    Raises CheckpointCorruptError: the file is missing or damaged, or names a class that is not allowed.
    """
    try:
        data = read_small(path, limits.PICKLE_BYTES)
        value = Unpickler(data, _find_metadata, build=_build_metadata).load()
        check_extent(value, len(data), _fields)
        return value
    except CheckpointCorruptError:
        raise
    except Exception as error:  # torch's classes check some of their fields and raise many types of errors
        raise CheckpointCorruptError(f"{path}: cannot be read: {_short(error)}") from error


# -- the classes in .metadata -----------------------------------------------------------------------------


def _find_metadata(module: str, name: str) -> Any:
    if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
        return vars(torch)[name]
    if name in _METADATA_CLASSES.get(module, ()):
        return _maker(getattr(importlib.import_module(module), name))
    found = _METADATA_OTHERS.get((module, name))
    return find_plain(module, name) if found is None else found


def _maker(cls: type) -> Call:
    if issubclass(cls, Enum):
        return _EnumCall(cls)
    return _without_arguments(cls.__name__, lambda: cls.__new__(cls))


def _without_arguments(name: str, make: Callable[[], Any]) -> Call:
    def made(*args: Any) -> Any:
        if args:
            raise PickleError(f"the pickle makes a {name} with constructor arguments")
        return make()

    return Call(made)


class _EnumCall(Call):
    """Replaces a class of enums. A pickle calls the class with the value of a member."""

    def __init__(self, cls: type[Enum]) -> None:
        super().__init__(self._of_value)
        self.members = cls

    def _of_value(self, value: Any) -> Enum:
        check_key(value)
        return self.members(value)


def _member_of_name(cls: Any, name: Any) -> Enum:
    """Replaces `getattr`, with which Python 3.11.0 to 3.11.3 pickle the members of enums (`Enum.__reduce_ex__`)."""
    if not isinstance(cls, _EnumCall) or type(name) is not str or name not in cls.members.__members__:
        raise PickleError("the pickle takes an attribute of something that is not an enum with that member")
    return cls.members[name]


def _size(*args: Any) -> torch.Size:
    return torch.Size(as_shape(*args))


def _path(*parts: Any) -> Path:
    if any(type(part) is not str for part in parts):
        raise PickleError("the pickle has a path with parts that are not strings")
    return Path(*parts)


def _device(*args: Any) -> torch.device:
    if any(type(arg) not in (str, int) for arg in args):
        raise PickleError("the pickle has a device that is neither a name nor a number")
    return torch.device(*args)


def _layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise PickleError("the pickle has a memory layout other than torch.strided")
    return torch.strided


# The names of these classes and functions of Python differ between versions of Python.
_OF_PYTHON: dict[tuple[str, str], Any] = {
    **{(module, "getattr"): Call(_member_of_name) for module in ("builtins", "__builtin__")},
    **{(module, "PosixPath"): Call(_path) for module in ("pathlib", "pathlib._local")},  # `_local` in Python 3.13
}
_METADATA_OTHERS: dict[tuple[str, str], Any] = {
    **_OF_PYTHON,  # needed for `StorageMeta.checkpoint_id`, the path of the folder that torch wrote to
    ("torch", "Size"): Call(_size),
    ("torch", "device"): Call(_device),
    ("torch.serialization", "_get_layout"): Call(_layout),
}


def _build_metadata(made: Any, state: Any) -> None:
    cls = type(made)
    if cls.__name__ not in _METADATA_CLASSES.get(cls.__module__, ()):
        raise PickleError(f"the pickle sets the state of a {cls.__name__}")
    if hasattr(cls, "__setstate__") and isinstance(state, tuple):
        made.__setstate__(state)  # the state of TensorProperties is a tuple of its five fields
        return
    # Unknown fields come from another version of the class. They are kept, but nothing reads them.
    if not isinstance(state, dict) or any(type(name) is not str or name.startswith("__") for name in state):
        raise PickleError(f"the pickle sets the state of a {cls.__name__} to something other than a dict of fields")
    vars(made).update(state)
    if cls.__name__ == "MetadataIndex":
        # A MetadataIndex is a dict key and is hashed by its fields, so the fields must be hashable plain values.
        check_key((made.fqn, made.offset, made.index))


def _fields(value: Any) -> Iterable[Any]:
    return vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, Enum) else ()


# -- the classes in files of torch.save -------------------------------------------------------------------


def _find_data(module: str, name: str) -> Any:
    if name in _ENUMS.get(module, ()):
        return _maker(getattr(importlib.import_module(module), name))
    if module in _NUMPY_ARRAY and name == "_reconstruct":
        return Call(_empty_array)
    found = _DATA.get((module, name))
    return find_plain(module, name) if found is None else found


def _empty_array(kind: Any, shape: Any, code: Any) -> numpy.ndarray[Any, Any]:
    import numpy

    if kind != "numpy.ndarray" or shape != (0,) or code not in (b"b", "b"):
        raise PickleError("the pickle makes an array in a way that NumPy does not use")
    return numpy.empty(0, dtype="b")


def _number_type(code: Any, *flags: Any) -> numpy.dtype[Any]:
    import numpy

    if type(code) is not str or not _NUMPY_NUMBER.fullmatch(code):
        raise PickleError(f"the pickle has an array of {str(code)[:80]!r} instead of numbers")
    return numpy.dtype(code)


_DATA: dict[tuple[str, str], Any] = {
    **{
        (cls.__module__, cls.__name__): _without_arguments(str(cls), cls)
        for cls in (argparse.Namespace, types.SimpleNamespace, io.BytesIO)
    },
    **_OF_PYTHON,
    ("torch", "device"): Call(_device),
    ("numpy", "ndarray"): "numpy.ndarray",
    ("numpy", "dtype"): Call(_number_type),
    # The param groups of HybridDeviceOptimizer contain the classes of its inner optimizers. The names of these classes
    # are enough.
    **{
        (module, name): f"{module}.{name}"
        for module, name in (
            ("torch.optim.adam", "Adam"),
            ("torch.optim.adamw", "AdamW"),
            ("torch.optim.sgd", "SGD"),
            ("transformer_engine.pytorch.optimizers.fused_adam", "FusedAdam"),
            ("transformer_engine.pytorch.optimizers.fused_sgd", "FusedSGD"),
            ("apex.optimizers.fused_adam", "FusedAdam"),
            ("apex.optimizers.fused_sgd", "FusedSGD"),
        )
    },
}


def _build_data(made: Any, state: Any) -> None:
    import numpy

    if isinstance(made, numpy.ndarray):
        _fill_array(made, state)
    elif isinstance(made, numpy.dtype):
        if state not in _NUMPY_DTYPE_STATES:
            raise PickleError("the pickle has an array whose dtype is not a plain number")
    elif isinstance(made, io.BytesIO) and isinstance(state, tuple) and state and type(state[0]) is bytes:
        made.write(state[0])
        made.seek(0)
    elif isinstance(made, (argparse.Namespace, types.SimpleNamespace)) and isinstance(state, dict):
        if any(type(name) is not str or name.startswith("__") for name in state):
            raise PickleError("the pickle has fields with names that are not allowed")
        vars(made).update(state)
    else:
        raise PickleError(f"the pickle sets the state of a {type(made).__name__}")


def _fill_array(made: numpy.ndarray[Any, Any], state: Any) -> None:
    import numpy

    _, shape, dtype, by_column, data = state
    lengths = as_shape(shape)
    if not isinstance(dtype, numpy.dtype) or type(data) is not bytes or type(by_column) is not bool:
        raise PickleError("the pickle has an array with malformed fields")
    if min(lengths, default=0) < 0 or prod(lengths) * dtype.itemsize != len(data):
        raise PickleError(f"the pickle has an array of shape {str(lengths)[:200]} with {len(data)} bytes")
    numpy.ndarray.__setstate__(made, (1, lengths, dtype, by_column, data))  # type: ignore[arg-type]


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"
