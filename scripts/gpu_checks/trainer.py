"""A real megatron-core training on the GPU of this rank, and a manager that saves it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training_state import Shape, TrainingState, build, rank_tensors, shape_of_size, train_step

from gpu_checks.needs import has_module
from gpu_checks.outcome import NotPossible
from gpu_checks.ranks import same_everywhere
from mcore_ckpt import CheckpointConfig, CheckpointManager

# A step has to last several times as long as the copy of the state, as in a large training, and long sequences keep the
# GPU busy: else the CPU, which launches the kernels, is what is measured.
STEP = {"sequence_length": 4096, "num_microbatches": 4}


def shape(gigabytes: float, **step: int) -> Shape:
    """Returns the sizes of a training whose checkpoint takes this many bytes (10^9) on all ranks together."""
    return replace(shape_of_size(gigabytes), **{"sequence_length": 128, **step})


def fitting(gigabytes: float) -> float:
    """Returns the size of all ranks' checkpoint together, the same on all ranks.

    Args:
        gigabytes: the wanted size per rank. It becomes less if a quarter of a rank's GPU memory, of its share of the
            free host memory, or of its share of the disk is less.

    Raises:
        NotPossible: less than a tenth of a gigabyte per rank is free.
    """
    world = dist.get_world_size()
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world
    disk = shutil.disk_usage(tempfile.gettempdir()).free / world
    fits = same_everywhere(min(gigabytes, min(torch.cuda.mem_get_info()[0], host, disk) / 4e9))
    if fits < 0.1:
        raise NotPossible(f"GPU, host memory or {tempfile.gettempdir()} have space for {fits:.2f} GB only")
    return fits * world


@contextmanager
def saved_by(root: Path, state: TrainingState, **config: Any) -> Iterator[CheckpointManager]:
    """A manager that saves the training in the background. It is closed at the end.

    After an error it is not: closing could hang, or raise something else, and hide what was found.
    """
    manager = open_manager(root, state, **config)
    yield manager
    manager.close()


def open_manager(root: Path, state: TrainingState, **config: Any) -> CheckpointManager:
    """Returns a manager that saves the training in the background."""
    settings = CheckpointConfig(**{"async_save": True, "max_to_keep": 1, **config})
    return CheckpointManager(root, state.model, state.optimizer, state.scheduler, config=settings)


def timed_steps(state: TrainingState, number: int) -> list[float]:
    """Trains, and returns how long each step took, in seconds."""
    return [timed_step(state) for _ in range(number)]


def timed_step(state: TrainingState) -> float:
    """Trains one step, and returns how long it took, in seconds."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    train_step(state)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def free(state: TrainingState) -> None:
    """Frees the memory of everything that is saved. The allocator looks at every stream that has used it."""
    for tensor in rank_tensors(state).values():
        tensor.untyped_storage().resize_(0)


def shared_folder() -> Path:
    """Returns a new folder that all ranks know."""
    return Path(same_everywhere(tempfile.mkdtemp(prefix="saved-") if dist.get_rank() == 0 else ""))


@contextmanager
def exporting_trainer(root: Path, **config: Any) -> Iterator[tuple[CheckpointManager, TrainingState]]:
    """A manager that also writes the model in HuggingFace's format, and its training: the demo's, with all ranks as dp.

    Raises NotPossible without transformers, whose classes the model's configuration has.
    """
    if not has_module("transformers"):
        raise NotPossible("no transformers, which the export needs")
    from megatron.core import parallel_state, tensor_parallel

    from mcore_ckpt.cli.demo import tiny_trainer, training
    from mcore_ckpt.cli.demo.huggingface import byte_tokenizer, hf_config

    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    tensor_parallel.model_parallel_cuda_manual_seed(training.SEED)
    device = torch.device("cuda", torch.cuda.current_device())
    model, optimizer, scheduler = training.build_training_state(device, 10)
    text, sizes = training.StandardLibraryText(device), training.MICRO_BATCH
    tiny_trainer.train_step(model, optimizer, scheduler, text, num_microbatches=training.NUM_MICROBATCHES, **sizes)
    contents = ("model", "optimizer", "extra", "hf_model")
    manager = CheckpointManager(
        root,
        model,
        optimizer,
        scheduler,
        hf_config=hf_config(),
        processing_class=byte_tokenizer(),
        config=CheckpointConfig(save_contents=contents, async_save=True, **config),
    )
    yield manager, TrainingState(model, optimizer, scheduler, Shape(8, 256, 256), device)
    manager.close()


__all__ = [
    "STEP",
    "TrainingState",
    "build",
    "exporting_trainer",
    "fitting",
    "free",
    "open_manager",
    "saved_by",
    "shape",
    "shared_folder",
    "timed_step",
    "timed_steps",
    "train_step",
]
