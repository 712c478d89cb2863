"""Measures a save of GPU state: how long the trainer waits, and how fast the bytes leave the GPU.

    python benchmarks/gpu.py [--gigabytes 1 10 40] [--pairs 9] [--json]

The reference is torch's `copy_` of the same bytes into the same pinned memory, a single cudaMemcpyAsync. Figures are
medians over interleaved pairs. A size that does not fit into the GPU or into half of the host memory is skipped with a
message.

Then it copies 10,000 tensors of 40 KB in three ways, in turn: by the gather kernel, by one cudaMemcpyBatchAsync, and by
a cudaMemcpyAsync each. These calls come from Python, so the last way has a row for the calls alone.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from cuda_copies import Copies

from mcore_ckpt.io import _native, tuning

GIGABYTE = 10**9
TIMEOUT_S = 60.0
SMALL_TENSORS, SMALL_BYTES = 10_000, 40_960


def sizes_of(nbytes: int) -> list[int]:
    """Returns sizes like those of a model's tensors, cut as a save cuts them: no copy is larger than a group."""
    pattern = [tuning.COPY_GROUP_BYTES] * 3 + [4 << 20] * 6 + [300_000] * 4 + [8192] * 8
    sizes: list[int] = []
    left = nbytes
    while left > 0:
        size = min(pattern[len(sizes) % len(pattern)], left)
        sizes.append(size)
        left -= size
    return sizes


def measure(copier: _native.DeviceCopier, sizes: list[int], pairs: int) -> dict[str, float]:
    nbytes = sum(sizes)
    state = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    buffer = _native.HostBuffer(nbytes, device=torch.cuda.current_device())
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)  # in one piece, as one copy needs it
    starts = [0]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size)
    sources = [state.data_ptr() + start for start in starts]
    stream = torch.cuda.current_stream().cuda_stream

    def ours() -> tuple[float, float]:
        torch.cuda.synchronize()
        before = time.perf_counter()
        copier.start(buffer, starts, sources, sizes, stream, tuning.COPY_GROUP_BYTES)
        copier.hold(stream, TIMEOUT_S)
        stall = time.perf_counter() - before
        copier.wait(TIMEOUT_S)
        return stall, time.perf_counter() - before

    def reference() -> float:
        torch.cuda.synchronize()
        before = time.perf_counter()
        host.copy_(state, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - before

    ours(), reference()
    times = [(*ours(), reference()) for _ in range(pairs)]
    return {
        "gigabytes": nbytes / GIGABYTE,
        "tensors": len(sizes),
        "stall_ms": statistics.median(stall for stall, _, _ in times) * 1e3,
        "worst_stall_ms": max(stall for stall, _, _ in times) * 1e3,
        "ours_gb_per_s": nbytes / statistics.median(ours for _, ours, _ in times) / 1e9,
        "reference_gb_per_s": nbytes / statistics.median(reference for _, _, reference in times) / 1e9,
        "ratio": statistics.median(reference / ours for _, ours, reference in times),
    }


def measure_ways(copier: _native.DeviceCopier, rounds: int) -> dict[str, dict[str, float]]:
    """Copies many small tensors in each way. Returns, by way, when all copies were queued and when they were done."""
    nbytes = SMALL_TENSORS * SMALL_BYTES
    state = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_()
    buffer = _native.HostBuffer(nbytes, device=torch.cuda.current_device())
    ours = torch.frombuffer(buffer, dtype=torch.uint8)[:nbytes]
    # A buffer is pinned in pieces, and no copy of CUDA may cross their edges.
    plain = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    starts = list(range(0, nbytes, SMALL_BYTES))
    sources = [state.data_ptr() + start for start in starts]
    stream = torch.cuda.Stream()
    try:
        copies = Copies([plain.data_ptr() + start for start in starts], sources, SMALL_BYTES, stream.cuda_stream)
    except OSError as error:
        print(f"10,000 x 40 KB by other ways: skipped, because {error}", file=sys.stderr)
        return {}

    def gather() -> None:
        copier.start(buffer, starts, sources, [SMALL_BYTES] * SMALL_TENSORS, stream.cuda_stream, nbytes)

    ways: dict[str, Callable[[], None]] = {"the gather kernel": gather}
    if copies.has_batches:
        ways["one cudaMemcpyBatchAsync"] = copies.queue_batch
    ways |= {"a cudaMemcpyAsync each": copies.queue_each, "calls from Python that do nothing": copies.call_each}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):  # the first one warms up
        for name, queue in ways.items():
            host = ours if queue == gather else plain
            host.zero_()
            torch.cuda.synchronize()
            before = time.perf_counter()
            queue()
            queued = time.perf_counter() - before
            torch.cuda.synchronize()
            done = time.perf_counter() - before
            if queue != copies.call_each and not torch.equal(host[-SMALL_BYTES:], state[-SMALL_BYTES:].cpu()):
                raise RuntimeError(f"{name} has not copied the last tensor")
            if round_:
                times[name].append((queued, done))
    return {
        name: {
            "queued_ms": statistics.median(queued for queued, _ in found) * 1e3,
            "done_ms": statistics.median(done for _, done in found) * 1e3,
            "gb_per_s": nbytes / statistics.median(done for _, done in found) / 1e9,
        }
        for name, found in times.items()
    }


def fits(nbytes: int) -> bool:
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return nbytes < torch.cuda.mem_get_info()[0] and nbytes < host / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 10, 40], help="sizes of GPU state")
    parser.add_argument("--pairs", type=int, default=9, help="interleaved pairs of ours and the reference")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if not (torch.cuda.is_available() and _native.built_with_cuda):
        sys.exit("benchmarks/gpu.py needs a GPU and a mcore_ckpt built with CUDA")

    cases = {f"{size:g} GB": sizes_of(int(size * GIGABYTE)) for size in arguments.gigabytes}
    cases["10,000 x 40 KB"] = [SMALL_BYTES] * SMALL_TENSORS
    copier = _native.DeviceCopier(torch.cuda.current_device(), torch.cuda.Stream().cuda_stream)
    results = {}
    for name, sizes in cases.items():
        if fits(sum(sizes)):
            results[name] = measure(copier, sizes, arguments.pairs)
            torch.cuda.empty_cache()
        else:
            print(f"{name}: skipped, because there is not enough memory", file=sys.stderr)
    ways = measure_ways(copier, arguments.pairs) if fits(SMALL_TENSORS * SMALL_BYTES) else {}
    copier.close(TIMEOUT_S)

    if arguments.json:
        setting = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "pairs": arguments.pairs}
        print(json.dumps(setting | {"results": results, "ways": ways}, indent=2))
        return
    for name, result in results.items():
        print(
            f"{name}: {result['tensors']} tensors, "
            f"stall {result['stall_ms']:.2f} ms (worst {result['worst_stall_ms']:.2f}), "
            f"{result['ours_gb_per_s']:.1f} / {result['reference_gb_per_s']:.1f} GB/s, {result['ratio']:.2f} times"
        )
    for name, way in ways.items():
        print(
            f"10,000 x 40 KB by {name}: queued after {way['queued_ms']:.2f} ms, done after {way['done_ms']:.2f} ms, "
            f"{way['gb_per_s']:.1f} GB/s"
        )


if __name__ == "__main__":
    main()
