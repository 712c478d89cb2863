"""Lists the checks, in the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass

MINUTE = 60.0


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: a word to choose it by.
        title: what it shows.
        function: the function that checks it, as "gpu_checks.graphs:captures".
        limit_s: after how many seconds it is killed, and has failed.
    """

    name: str
    title: str
    function: str
    limit_s: float


# What takes longest is last, except that nothing is worth measuring if the tests fail.
CHECKS = (
    Check("tests", "tests of the GPU and of the native part", "gpu_checks.suites:gpu_tests", 30 * MINUTE),
    Check(
        "graphs",
        "CUDA graphs, captured in Global mode beside preparation, lazy and snapshot saves",
        "gpu_checks.graphs:captures",
        20 * MINUTE,
    ),
    Check("overlap", "steps beside saves, with 1 and 8 connections", "gpu_checks.steps:overlap", 40 * MINUTE),
    Check("pinning", "steps while memory is pinned", "gpu_checks.steps:pinning", 20 * MINUTE),
    Check("numa", "each GPU's NUMA node, and that of its pinned memory", "gpu_checks.placement:numa", 15 * MINUTE),
    Check("contexts", "no context on the GPU of another rank", "gpu_checks.placement:own_contexts", 15 * MINUTE),
    Check("endings", "close, free and exit; exit without close", "gpu_checks.endings:endings", 25 * MINUTE),
    Check("stuck", "a collective that never ends", "gpu_checks.endings:stuck_device", 35 * MINUTE),
    Check(
        "sanitizer", "compute-sanitizer: memcheck and racecheck", "gpu_checks.variants:compute_sanitizer", 80 * MINUTE
    ),
    Check("segments", "expandable segments", "gpu_checks.variants:expandable_segments", 30 * MINUTE),
    Check("ptx", "kernels from PTX alone", "gpu_checks.variants:forced_ptx", 10 * MINUTE),
    Check("memory", "GPU memory of a save, in bf16 and FP8", "gpu_checks.memory:peaks", 30 * MINUTE),
    Check(
        "communicators",
        "NCCL communicators of load_hf(source='rank0')",
        "gpu_checks.communicators:rank0_loads",
        15 * MINUTE,
    ),
    Check("trainings", "whole trainings over NCCL", "gpu_checks.suites:trainings", 150 * MINUTE),
    Check("benchmark", "benchmarks/gpu.py", "gpu_checks.suites:benchmark", 60 * MINUTE),
)
