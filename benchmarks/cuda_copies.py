"""Copies from GPU memory by calls of torch's own CUDA runtime, to compare with those of csrc/device_copier.cu."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path

DEVICE_TO_HOST = 2
IN_STREAM_ORDER = 1
BATCHES_SINCE = 12080
WITHOUT_FAILED_INDEX_SINCE = 13000


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """cudaMemcpyAttributes of driver_types.h."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class Copies:
    """Copies of equal size, which can be queued again and again.

    Args:
        destinations, sources: addresses of pinned host memory and of GPU memory.
        nbytes: the size of each copy.
        stream: a raw handle. It must not be the default stream, in which CUDA allows no batches.
        runtime: the CUDA runtime. None: the one that torch has loaded.

    Raises:
        OSError: this process has loaded no shared CUDA runtime.
    """

    def __init__(
        self,
        destinations: Sequence[int],
        sources: Sequence[int],
        nbytes: int,
        stream: int,
        runtime: ctypes.CDLL | None = None,
    ) -> None:
        self._runtime = runtime or loaded_runtime()
        self._count = len(sources)
        self._pairs = list(zip(map(ctypes.c_void_p, destinations), map(ctypes.c_void_p, sources), strict=True))
        self._destinations = (ctypes.c_void_p * self._count)(*destinations)
        self._sources = (ctypes.c_void_p * self._count)(*sources)
        self._nbytes = ctypes.c_size_t(nbytes)
        self._sizes = (ctypes.c_size_t * self._count)(*[nbytes] * self._count)
        self._stream = ctypes.c_void_p(stream)
        self._attributes = Attributes(IN_STREAM_ORDER)

    @property
    def has_batches(self) -> bool:
        """Whether runtime and driver have cudaMemcpyBatchAsync."""
        versions = (self._version("cudaRuntimeGetVersion"), self._version("cudaDriverGetVersion"))
        return min(versions) >= BATCHES_SINCE

    def queue_each(self) -> None:
        """Queues each copy by a cudaMemcpyAsync of its own."""
        copy, nbytes, kind, stream = self._runtime.cudaMemcpyAsync, self._nbytes, DEVICE_TO_HOST, self._stream
        for destination, source in self._pairs:
            if status := copy(destination, source, nbytes, kind, stream):
                raise RuntimeError(f"cudaMemcpyAsync returned {status}")

    def call_each(self) -> None:
        """Makes as many calls as `queue_each`, which do nothing: what Python's part of it costs."""
        nothing, nbytes, kind, stream = ctypes.CDLL(None).abs, self._nbytes, DEVICE_TO_HOST, self._stream
        for destination, source in self._pairs:
            if nothing(destination, source, nbytes, kind, stream) == -1:
                raise RuntimeError("abs returned -1")

    def queue_batch(self) -> None:
        """Queues all copies by one cudaMemcpyBatchAsync."""
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        arguments = [
            *(self._destinations, self._sources, self._sizes, ctypes.c_size_t(self._count)),
            *(ctypes.byref(self._attributes), ctypes.byref(first), ctypes.c_size_t(1)),
        ]
        if self._version("cudaRuntimeGetVersion") < WITHOUT_FAILED_INDEX_SINCE:
            arguments.append(ctypes.byref(failed))
        if status := self._runtime.cudaMemcpyBatchAsync(*arguments, self._stream):
            raise RuntimeError(f"cudaMemcpyBatchAsync returned {status}, at copy {failed.value}")

    def _version(self, function: str) -> int:
        version = ctypes.c_int()
        if status := getattr(self._runtime, function)(ctypes.byref(version)):
            raise RuntimeError(f"{function} returned {status}")
        return version.value


def loaded_runtime() -> ctypes.CDLL:
    """Returns the CUDA runtime that this process has loaded. Raises OSError if there is none."""
    path = find_runtime(Path("/proc/self/maps").read_text())
    if path is None:
        raise OSError("no libcudart is loaded: torch has none, or has linked it statically")
    return ctypes.CDLL(path)


def find_runtime(maps: str) -> str | None:
    """Returns the path of the CUDA runtime in the lines of /proc/PID/maps. None if it is not there."""
    found = re.search(r"\s(/\S*/libcudart[^/\s]*)$", maps, re.MULTILINE)
    return found[1] if found else None
