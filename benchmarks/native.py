"""CRC-32 and host copies against what everyone has: zlib, torch's copy_ and one memcpy. Also what it costs to fetch
pages of the GPU's NUMA node instead of any node's (`mbind`), and in small steps instead of all at once.

    python benchmarks/native.py [--mebibytes 512] [--pairs 15] [--json]

Each figure is the median over interleaved pairs, so that a machine that slows down slows both sides of a ratio.
"""

import argparse
import ctypes
import json
import os
import statistics
import time
import zlib
from collections.abc import Callable
from functools import partial

import torch

from mcore_ckpt.io import _native, tuning

MEBIBYTE = 1 << 20


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(ours: Callable[[], object], reference: Callable[[], object], nbytes: int, pairs: int) -> dict[str, float]:
    """Returns both speeds in 10**9 bytes a second, and how many times faster ours is."""
    ours(), reference()
    times = [(seconds(ours), seconds(reference)) for _ in range(pairs)]
    return {
        "ours_gb_per_s": nbytes / statistics.median(ours for ours, _ in times) / 1e9,
        "reference_gb_per_s": nbytes / statistics.median(reference for _, reference in times) / 1e9,
        "ratio": statistics.median(reference / ours for ours, reference in times),
    }


def measure_crc(nbytes: int, pairs: int) -> dict[str, dict[str, float]]:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    array = data.numpy()
    ours: dict[str, Callable[[], object]] = {
        f"crc32 by {method}": partial(_native.crc32_by, method, data.data_ptr(), nbytes)
        for method in _native.crc32_methods()
    }
    ours["crc32_blocks of 1 MiB"] = partial(_native.crc32_blocks, data.data_ptr(), nbytes, MEBIBYTE)
    return {
        f"{name}, 1 thread / zlib.crc32": compare(call, lambda: zlib.crc32(array), nbytes, pairs)
        for name, call in ours.items()
    }


def measure_copy(nbytes: int, tensors: int, threads: int, pairs: int) -> dict[str, dict[str, float]]:
    size = nbytes // tensors
    sources = [torch.full((size,), 1, dtype=torch.uint8) for _ in range(tensors)]
    destinations = [torch.zeros(size, dtype=torch.uint8) for _ in range(tensors)]
    to, origin = [[tensor.data_ptr() for tensor in side] for side in (destinations, sources)]
    sizes = [size] * tensors

    def by_torch() -> None:
        for destination, source in zip(destinations, sources, strict=True):
            destination.copy_(source)

    def by_memmove() -> None:
        for destination, source in zip(to, origin, strict=True):
            ctypes.memmove(destination, source, size)

    torch.set_num_threads(threads)
    what = f"copy_host, {tensors} x {size / MEBIBYTE:g} MiB, {threads} threads"
    return {
        f"{what} / {name}": compare(
            lambda: _native.copy_host(to, origin, sizes, threads), reference, size * tensors, pairs
        )
        for name, reference in [("torch copy_", by_torch), ("ctypes.memmove", by_memmove)]
    }


def measure_pages(nbytes: int, pairs: int) -> dict[str, dict[str, float]]:
    """Fetches the pages of host memory as a save prepares it, but for the pauses."""

    def fetch(node: int, step: int) -> None:
        buffer = _native.HostBuffer.reserve(nbytes, numa_node=node)
        for at in range(0, nbytes, step):
            buffer.fetch(at, min(step, nbytes - at))

    def plain() -> None:
        fetch(-1, nbytes)

    return {
        "pages of NUMA node 0, at once / of any node, at once": compare(
            partial(fetch, 0, nbytes), plain, nbytes, pairs
        ),
        f"pages in steps of {tuning.PREPARE_BYTES >> 20} MiB / at once": compare(
            partial(fetch, -1, tuning.PREPARE_BYTES), plain, nbytes, pairs
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512, help="bytes that each call works on")
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs of ours and the reference")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()

    nbytes = arguments.mebibytes * MEBIBYTE
    results = measure_crc(nbytes, arguments.pairs) | measure_pages(nbytes, arguments.pairs)
    for threads in sorted({1, os.cpu_count() or 1}):
        for tensors in (1, 64, 8192):
            results |= measure_copy(nbytes, tensors, threads, arguments.pairs)

    if arguments.json:
        print(json.dumps({"mebibytes": arguments.mebibytes, "pairs": arguments.pairs, "results": results}, indent=2))
        return
    for name, result in results.items():
        ours, reference, ratio = result["ours_gb_per_s"], result["reference_gb_per_s"], result["ratio"]
        print(f"{name}: {ours:.1f} / {reference:.1f} GB/s, {ratio:.2f} times")


if __name__ == "__main__":
    main()
