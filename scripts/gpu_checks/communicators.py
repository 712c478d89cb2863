"""Counts the communicators that a load from rank 0 makes. Each takes memory of the GPU and, at scale, minutes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gpu_checks import nccl_log
from gpu_checks.needs import need_gpus, need_module
from gpu_checks.outcome import Failed
from gpu_checks.ranks import on_ranks, process_group

LIMIT_S = 600.0
# One more for all ranks together is no matter; one for each pair of ranks is.
MOST = 1


def rank0_loads() -> str:
    """Loads a HuggingFace model from rank 0 on all GPUs, and counts the communicators before and after."""
    world = need_gpus(2)
    need_module("megatron.core", "megatron-core")
    folder = Path(tempfile.mkdtemp(prefix="nccl-"))
    found = on_ranks(
        "gpu_checks.communicators:load",
        str(folder),
        world=world,
        limit_s=LIMIT_S,
        more=nccl_log.variables(folder),
    )
    before, after = found[0]
    text = f"{after - before} new ones for {world} ranks, beside {before} of the training"
    if not before:
        raise Failed(f"NCCL's logs in {folder} name no communicator, though the training has made some")
    if after - before > MOST:
        raise Failed(f"{text}; at most {MOST} is all right")
    return text if world > 2 else f"{text} (2 ranks are one pair: only 3 or more tell them apart)"


def load(folder: str) -> tuple[int, int]:
    """Exports the model, and loads it from rank 0. Returns how many communicators the job had before and after."""
    import torch
    import torch.distributed as dist

    from gpu_checks import trainer
    from mcore_ckpt import load_hf
    from mcore_ckpt.checkpoint import file_names

    logs = Path(folder)
    with process_group():
        root = trainer.shared_folder()
        with trainer.exporting_trainer(root) as (manager, state):
            manager.save(1).wait()
            exported = file_names.step_dir(root, 1) / "actor" / "huggingface"
            dist.barrier()
            torch.cuda.synchronize()
            before = nccl_log.communicators_in(logs)
            # All have counted before any makes more.
            dist.barrier()
            load_hf(state.model, os.fspath(exported), source="rank0", optimizer=state.optimizer)
            dist.barrier()
            torch.cuda.synchronize()
            return before, nccl_log.communicators_in(logs)
