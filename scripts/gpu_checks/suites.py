"""Runs what is not made for GPUs alone: the project's tests, whole trainings, and the benchmark of the GPU."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_checks.needs import need_gpus, need_module
from gpu_checks.outcome import Failed
from gpu_checks.runner import Command, run
from gpu_checks.variants import tests_in

WORLDS = (1, 2, 4, 8)


def gpu_tests() -> str:
    """Runs the tests of the GPU and of the native part."""
    need_gpus()
    log = Path(tempfile.gettempdir()) / "tests.log"
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "tests/native")
    ended = run(Command(pytest, log), 28 * 60.0)
    if ended.status != 0:
        raise Failed(f"pytest {ended.why}")
    return tests_in(log)


def trainings() -> str:
    """Saves whole trainings in every mode while they go on, in every world size that has a GPU for each rank."""
    count = need_gpus()
    need_module("megatron.core", "megatron-core")
    found, failed = [], []
    for world in (world for world in WORLDS if world <= count):
        log = Path(tempfile.gettempdir()) / f"trainings-{world}.log"
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world))
        pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=20", "--full", "tests/distributed")
        ended = run(Command((*torchrun, *pytest), log, {"OMP_NUM_THREADS": "1"}), 35 * 60.0)
        if ended.status == 0:
            found.append(f"{world} ranks: {tests_in(log)}")
        else:
            failed.append(f"{world} ranks: pytest {ended.why}")
    if failed:
        raise Failed("; ".join(failed + found))
    return "; ".join(found)


def benchmark() -> str:
    """Runs benchmarks/gpu.py. Returns its sizes, and its tables in Markdown."""
    need_gpus()
    folder = Path(tempfile.gettempdir())
    words = (sys.executable, "benchmarks/gpu.py", "--json")
    output = folder / "benchmark.json"
    ended = run(Command(words, folder / "benchmark.log", output=output), 58 * 60.0)
    if ended.status != 0:
        raise Failed(f"benchmarks/gpu.py {ended.why}")
    return tables(json.loads(output.read_text()))


def tables(measured: dict[str, Any]) -> str:
    """Returns what `benchmarks/gpu.py --json` prints as a line and, after an empty line, two tables in Markdown."""
    lines = [f"medians of {measured['pairs']} interleaved pairs: see below", ""]
    lines += ["| GPU state | tensors | stall, ms (worst) | copy, GB/s | one cudaMemcpyAsync, GB/s | ratio |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {name} | {r['tensors']:,} | {r['stall_ms']:.2f} ({r['worst_stall_ms']:.2f}) | {r['ours_gb_per_s']:.1f} "
        f"| {r['reference_gb_per_s']:.1f} | {r['ratio']:.2f} |"
        for name, r in measured["results"].items()
    ]
    if measured["ways"]:
        lines += ["", "| 10,000 x 40 KB by | queued after, ms | done after, ms | GB/s |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {way['queued_ms']:.2f} | {way['done_ms']:.2f} | {way['gb_per_s']:.1f} |"
            for name, way in measured["ways"].items()
        ]
    return "\n".join(lines)
