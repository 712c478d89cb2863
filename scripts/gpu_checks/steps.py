"""Times the steps of a training: beside saves, and while host memory is pinned."""

from __future__ import annotations

import statistics
import time
from typing import Any

from gpu_checks.needs import need_gpus, need_module
from gpu_checks.outcome import Failed, NotPossible
from gpu_checks.ranks import on_ranks, process_group

# The longest step of a block beside a save may take this many times as long as that of a block alone, in the median
# over the blocks (docs/benchmarks.md). The longest of all steps is that of the machine's worst moment.
LONGEST_RATIO = 1.05
BLOCKS = 6
STEPS_OF_A_BLOCK = 10
GIGABYTES = 2.0
GIBIBYTE = 1 << 30


def overlap() -> str:
    """Trains with a lazy save in every block of steps, under 1 and 8 connections to the GPU, a rank on each GPU."""
    world = need_gpus()
    need_module("megatron.core", "megatron-core")
    found, slow = [], []
    for connections in ("1", "8"):
        more = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
        by_rank = on_ranks("gpu_checks.steps:beside_saves", world=world, limit_s=15 * 60, more=more)
        text, ratio = compared(by_rank)
        found.append(f"{connections} connections: {text}, stall {max(each['stall'] for each in by_rank) * 1e3:.1f} ms")
        slow += [ratio] if ratio > LONGEST_RATIO else []
    text = f"{world} ranks; {'; '.join(found)}"
    if slow:
        raise Failed(f"the longest step beside saves takes more than {LONGEST_RATIO} times as long as alone: {text}")
    return text


def beside_saves() -> dict[str, Any]:
    """Trains blocks of steps alone and with a save at their begin, in turns. Returns the times of this rank."""
    from gpu_checks import trainer

    with process_group():
        state = trainer.build(trainer.shape(trainer.fitting(GIGABYTES), **trainer.STEP))
        with trainer.saved_by(trainer.shared_folder(), state, async_mode="lazy") as manager:
            manager.save(0).wait()
            trainer.timed_steps(state, 5)
            found: dict[str, list[list[float]]] = {"alone": [], "beside": []}
            stalls = []
            for block in range(1, BLOCKS + 1):
                # In turns, so that a machine that gets slower does so for both.
                for kind in ("alone", "beside")[:: 1 if block % 2 else -1]:
                    started = time.perf_counter()
                    handle = manager.save(block) if kind == "beside" else None
                    stalls += [time.perf_counter() - started] if handle else []
                    found[kind].append(trainer.timed_steps(state, STEPS_OF_A_BLOCK))
                    if handle:
                        handle.wait()
    return {**found, "stall": max(stalls)}


def compared(by_rank: list[dict[str, Any]]) -> tuple[str, float]:
    """Returns the times in words, and how many times as long as alone the longest step beside something takes.

    Args:
        by_rank: for each rank the seconds of the steps of each block, as "alone" and "beside". Ranks train in step, so
            that the slowest one's time is that of the step.
    """
    alone, beside = (_slowest([each[kind] for each in by_rank]) for kind in ("alone", "beside"))
    longest = statistics.median(map(max, beside)) / statistics.median(map(max, alone))
    text = f"steps alone {_in_words(alone)}, beside {_in_words(beside)}"
    return f"{text}, median of the longest {longest:.2f} times", longest


def blocks_of(times: list[float]) -> list[list[float]]:
    """Returns the times block by block. What does not fill a block is left out."""
    return [times[at : at + STEPS_OF_A_BLOCK] for at in range(0, len(times) + 1 - STEPS_OF_A_BLOCK, STEPS_OF_A_BLOCK)]


def _slowest(by_rank: list[list[list[float]]]) -> list[list[float]]:
    """Returns for each step of each block the longest time of any rank."""
    return [[max(times) for times in zip(*blocks, strict=True)] for blocks in zip(*by_rank, strict=True)]


def _in_words(blocks: list[list[float]]) -> str:
    middle = statistics.median(seconds for block in blocks for seconds in block)
    longest = " ".join(f"{max(block) * 1e3:.1f}" for block in blocks)
    return f"{middle * 1e3:.1f} ms, longest of each block {longest}"


def pinning() -> str:
    """Trains while a new manager prepares its host memory, and pins memory of torch's own for comparison."""
    need_gpus()
    need_module("megatron.core", "megatron-core")
    (measured,) = on_ranks("gpu_checks.steps:beside_pinning", limit_s=15 * 60)
    text, ratio = compared([measured])
    speed = f"pinning {measured['pin']:.1f} GB/s with cudaHostRegister, {measured['buffer']:.1f} GB/s with HostBuffer"
    text = f"{text}; {speed}; state {measured['gigabytes']:.1f} GB"
    if ratio > LONGEST_RATIO:
        raise Failed(f"the longest step while memory is pinned takes more than {LONGEST_RATIO} times as long: {text}")
    return text


def beside_pinning() -> dict[str, Any]:
    """Returns the times of steps alone and while memory is prepared, and how fast memory is pinned (GB/s)."""
    from gpu_checks import trainer

    with process_group():
        gigabytes = trainer.fitting(2 * GIGABYTES)
        state = trainer.build(trainer.shape(gigabytes, **trainer.STEP))
        trainer.timed_steps(state, 5)
        alone = trainer.timed_steps(state, BLOCKS * STEPS_OF_A_BLOCK)
        with trainer.saved_by(trainer.shared_folder(), state) as manager:
            # Pages come at half a gigabyte a second or more, with pauses as long as the pieces take.
            end = time.monotonic() + 4 * gigabytes + 5
            beside = []
            while time.monotonic() < end or len(beside) < STEPS_OF_A_BLOCK:
                beside.append(trainer.timed_step(state))
            manager.save(1).wait()
    return {
        "alone": blocks_of(alone),
        "beside": blocks_of(beside),
        "pin": _pinning_speed(),
        "buffer": _buffer_speed(),
        "gigabytes": gigabytes,
    }


def _pinning_speed() -> float:
    """Returns how many bytes (10^9) a second CUDA pins, of memory whose pages are there."""
    import torch

    memory = torch.ones(GIBIBYTE, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    started = time.perf_counter()
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    seconds = time.perf_counter() - started
    if int(status) != 0:
        raise NotPossible(f"CUDA cannot pin 1 GiB: error {int(status)}")
    runtime.cudaHostUnregister(memory.data_ptr())
    return GIBIBYTE / seconds / 1e9


def _buffer_speed() -> float:
    """Returns how many bytes (10^9) a second a pinned HostBuffer gets, its pages included."""
    import torch

    from mcore_ckpt.io import _native, tuning

    started = time.perf_counter()
    buffer = _native.HostBuffer(GIBIBYTE, device=torch.cuda.current_device(), threads=tuning.HOST_THREADS)
    return buffer.nbytes / (time.perf_counter() - started) / 1e9
