"""Measures the GPU memory that a save takes beside that of the training."""

from __future__ import annotations

from typing import Any

from gpu_checks.needs import has_module, need_gpus, need_module
from gpu_checks.outcome import Failed
from gpu_checks.ranks import on_ranks, process_group

LIMIT_S = 600.0
GIGABYTES = 6.0
# What a save may take: clones of small tensors, and quantized weights in bf16 piece by piece. All of these weights at
# once would be as many bytes as the model's in bf16.
MOST_OF_WEIGHTS = 0.25
MOST_BESIDE = 64 << 20
FP8_SINCE = (8, 9)


def peaks() -> str:
    """Compares the peak of GPU memory in a training step with that of saves and of steps beside them."""
    need_gpus()
    need_module("megatron.core", "megatron-core")
    found, failed = [], []
    for kind in ("bf16", "fp8"):
        if kind == "fp8" and (why := _no_fp8()):
            found.append(f"FP8: not possible here: {why}")
            continue
        (measured,) = on_ranks("gpu_checks.memory:peak_of_saves", kind, limit_s=LIMIT_S)
        text = f"{kind}: {in_words(measured)}"
        (failed if takes_too_much(measured) else found).append(text)
    if failed:
        raise Failed(f"a save takes more than {MOST_OF_WEIGHTS:.0%} of the weights: {'; '.join(failed + found)}")
    return "; ".join(found)


def _no_fp8() -> str | None:
    import torch

    if not has_module("transformer_engine"):
        return "no transformer-engine"
    return None if torch.cuda.get_device_capability() >= FP8_SINCE else "this GPU has no FP8"


def takes_too_much(measured: dict[str, Any]) -> bool:
    """Returns whether a save takes more GPU memory than it may."""
    most = MOST_OF_WEIGHTS * measured["weights"] + MOST_BESIDE
    return max(measured["saves"].values()) > most


def in_words(measured: dict[str, Any]) -> str:
    """Returns what was measured, in MB (10^6 bytes)."""
    saves = ", ".join(f"{mode} save {extra / 1e6:.0f} MB" for mode, extra in measured["saves"].items())
    weights, before, after = (measured[name] / 1e6 for name in ("weights", "before", "after"))
    return f"{saves} beside weights of {weights:.0f} MB; peak of steps {before:.0f} MB alone, {after:.0f} MB with saves"


def peak_of_saves(kind: str) -> dict[str, Any]:
    """Returns the peaks of this rank's GPU memory in bytes.

    "weights": the model's parameters in bf16. "saves": by mode, the peak of a save above what was allocated before.
    "before", "after": the peak of training steps alone, and with a save at the begin of each.
    """
    import torch

    from gpu_checks import trainer

    with process_group():
        state = trainer.build(trainer.shape(trainer.fitting(GIGABYTES)), fp8=kind == "fp8")
        weights = 2 * sum(parameter.numel() for chunk in state.model for parameter in chunk.parameters())
        trainer.timed_steps(state, 3)
        before = _peak(lambda: trainer.timed_steps(state, 3))
        saves, after = {}, 0
        for mode in ("lazy", "snapshot"):
            with trainer.saved_by(trainer.shared_folder(), state, async_mode=mode) as manager:
                manager.save(1).wait()
                allocated = torch.cuda.memory_allocated()
                saves[mode] = _peak(lambda manager=manager: manager.save(2).wait()) - allocated
                after = max(after, _peak(lambda manager=manager: _train_under_saves(manager, state)))
    return {"weights": weights, "saves": saves, "before": before, "after": after}


def _train_under_saves(manager: Any, state: Any) -> None:
    from gpu_checks import trainer

    for step in (3, 4, 5):
        handle = manager.save(step)
        trainer.timed_step(state)
        handle.wait()


def _peak(work: Any) -> int:
    """Returns the most bytes of GPU memory that are allocated at a time while something is done."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
