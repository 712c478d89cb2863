"""Pickles of other programs, opened without running anything that is in them."""

from __future__ import annotations

import argparse
import collections
import importlib
import io
import pathlib
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointCorruptError

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
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    # The folder that torch's own writer was told (`StorageMeta.checkpoint_id`).
    "pathlib": ("PosixPath",),
}


def load_safely(source: Path | bytes, name: str, mmap: bool = False) -> Any:
    """What `torch.save` wrote, under `weights_only=True` with a short list of classes that only hold data.

    Args:
        source: a file, or its bytes.
        name: what it is, for messages.
        mmap: leave tensors on disk until they are asked for; for files.

    Raises:
        CheckpointCorruptError: it is missing, damaged, or has anything else in it.
    """
    opened = io.BytesIO(source) if isinstance(source, bytes) else str(source)
    try:
        with torch.serialization.safe_globals(_data_classes()):
            return torch.load(opened, weights_only=True, map_location="cpu", mmap=mmap)
    except Exception as error:  # torch raises many types for a bad file
        raise CheckpointCorruptError(f"{name}: does not open under weights_only=True: {_short(error)}") from error


def load_metadata(path: Path) -> Any:
    """The `.metadata` of a torch_dist checkpoint.

    torch's own reader (2.13, `FileSystemReader.read_metadata`) runs whatever is in this pickle.

    Raises:
        CheckpointCorruptError: it is missing, damaged, or has a class in it that does not belong there.
    """
    try:
        return _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointCorruptError(f"{path}: cannot be read: {_short(error)}") from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into it: written by whom? Nothing was run")
        return getattr(importlib.import_module(module), name)


def _data_classes() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    import numpy
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    reconstruct = numpy.empty(0).__reduce__()[0]
    assert callable(reconstruct)
    return [
        argparse.Namespace,
        types.SimpleNamespace,
        pathlib.PosixPath,
        io.BytesIO,
        collections.OrderedDict,
        AttnBackend,
        ModelType,
        numpy.ndarray,
        numpy.dtype,
        type(numpy.dtype("uint32")),
        # NumPy 2 has moved it; files of NumPy 1 say the old name.
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        (reconstruct, "numpy.core.multiarray._reconstruct"),
    ]


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"
