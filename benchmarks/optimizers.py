"""What the optimizer's settings do to checkpoints: bytes per parameter, and the speed where state is on two devices.

    python benchmarks/optimizers.py [--ranks 1] [--gigabytes 1.7] [--pairs 9] [--folder DIR] [--json]

Starts its own ranks. The first table has the bytes of model and optimizer files per parameter, for each setting. Then
the durable save and the stall of an asynchronous save of a state that is offloaded by half (HybridDeviceOptimizer) are
compared with those of the same model without offload. The device is simulated, and so are transformer-engine's kernels:
tests/support has both.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from measuring import Findings, common_arguments, compare, each_rank, run, show
from ours import Ours
from references import bytes_of_all_ranks
from training_state import TrainingState, build, shape_of_size

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.fused_adam import fused_adam
from tests.support.simulated_device import simulated_device

AWARE = {"use_precision_aware_optimizer": True, "store_param_remainders": False}
HALVES = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
Context = Callable[[], AbstractContextManager[None]]
SETTINGS: dict[str, tuple[Context, dict[str, Any]]] = {
    "plain": (contextlib.nullcontext, {}),
    "offloaded by half": (simulated_device, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}),
    "precision-aware": (fused_adam, AWARE),
    "remainders": (fused_adam, {**AWARE, "store_param_remainders": True}),
    "fp16 moments": (fused_adam, {**AWARE, **HALVES}),
    "remainders, bf16 moments": (
        fused_adam,
        {
            **AWARE,
            "store_param_remainders": True,
            "exp_avg_dtype": torch.bfloat16,
            "exp_avg_sq_dtype": torch.bfloat16,
        },
    ),
    "remainders, fp8 and fp16 moments": (
        fused_adam,
        {
            **AWARE,
            "store_param_remainders": True,
            "exp_avg_dtype": torch.uint8,
            "exp_avg_sq_dtype": torch.float16,
        },
    ),
    "fp16 main parameters and moments": (fused_adam, {**AWARE, **HALVES, "main_params_dtype": torch.float16}),
}
SMALL_GIGABYTES = 0.3
LIMIT = 1.1


def main() -> None:
    run(common_arguments(__doc__), __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    for name in SETTINGS:
        state = built(name, SMALL_GIGABYTES)
        ours = Ours(arguments.folder / "bytes", state)
        ours.save()
        files = [*ours.folder().glob("model/*/*.pt"), *ours.folder().glob("optim/distrib*.pt")]
        nbytes = sum(file.stat().st_size for file in files)
        findings.facts[f"bytes per parameter: {name}"] = round(nbytes / parameters(state), 2)
        show(f"{name}: {nbytes / parameters(state):.2f} bytes per parameter")
        ours.forget()
        ours.manager.close()
    plain, half = (built(name, arguments.gigabytes) for name in ("plain", "offloaded by half"))
    for is_async in (False, True):
        reference = Ours(arguments.folder / "plain", plain, async_save=is_async)
        ours = Ours(arguments.folder / "half", half, async_save=is_async)
        contenders = [each.stalling() if is_async else each.saving() for each in (ours, reference)]
        ours.save()
        nbytes = bytes_of_all_ranks(ours.report.nbytes)
        ours.forget()
        found = compare(*contenders, arguments.pairs, nbytes, "cost")
        findings.comparisons.append(found)
        findings.at_most(f"{found.what}, offloaded by half / not offloaded", found.ratio, LIMIT)
        for each in (ours, reference):
            each.manager.close()


def built(name: str, gigabytes: float) -> TrainingState:
    context, settings = SETTINGS[name]
    with context():
        return build(shape_of_size(gigabytes), **settings)


def parameters(state: TrainingState) -> int:
    return max(each_rank(sum(parameter.numel() for chunk in state.model for parameter in chunk.parameters())))


if __name__ == "__main__":
    main()
