"""A training of the tests, and verl's words for it: constructor keywords, paths, and what its trainers write."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_ckpt.integrations.verl import MegatronCheckpointManager
from tests.distributed.checkpointing import TIMEOUT_S
from tests.distributed.training import DTYPES, Training

TRACKER = "latest_checkpointed_iteration.txt"


def verl_manager(training: Training, role: str = "actor", **options: Any) -> MegatronCheckpointManager:
    """As verl 0.9.1's `MegatronEngine.initialize` makes it, with all of its keywords."""
    own = {name: options.pop(name) for name in ("hf_config", "peft_cls", "frees_memory") if name in options}
    defaults = {"save_contents": None, "load_contents": None, "async_save": False, "strict": True}
    keywords = {
        "config": SimpleNamespace(model=SimpleNamespace(path="/nowhere"), megatron=SimpleNamespace()),
        "checkpoint_config": SimpleNamespace(**defaults | {"timeout_s": TIMEOUT_S} | options),
        "model_config": None,
        "transformer_config": training.model[0].config,
        "role": role,
        "model": training.model,
        "arch": "Qwen2ForCausalLM",
        "hf_config": None,
        "param_dtype": DTYPES[training.layout.precision],
        "share_embeddings_and_output_weights": training.layout.tied_embeddings,
        "processing_class": None,
        "optimizer": training.optimizer,
        "optimizer_scheduler": training.scheduler,
        "use_distributed_optimizer": training.layout.distributed_optimizer,
        "use_checkpoint_opt_param_scheduler": False,
        "use_dist_checkpointing": False,
        "bridge": object(),
        "provider": object(),
        "peft_cls": None,
        "use_megatron_fsdp": False,
    }
    return MegatronCheckpointManager(**keywords | own)


def resume(training: Training, folder: Path | str, hdfs_path: str | None = None, **options: Any) -> None:
    """As a trainer that has just been started does."""
    manager = verl_manager(training, **options)
    manager.load_checkpoint(str(folder), hdfs_path)
    manager.close()


def step_folder(root: Path, step: int) -> Path:
    return root / f"global_step_{step}"


def write_ppo_data(root: Path, step: int) -> None:
    """As PPO's trainer does on its own, after the roles' saves have returned."""
    if dist.get_rank() == 0:
        step_folder(root, step).mkdir(parents=True, exist_ok=True)
        torch.save({"seen": step}, step_folder(root, step) / "data.pt")
        # verl 0.9 in its asynchronous modes, with TransferQueue 0.1.11.
        queue = step_folder(root, step) / "transfer_queue"
        queue.mkdir(exist_ok=True)
        (queue / "metadata.json").write_text('{"storage_saved": false}')
    dist.barrier()


def write_sft_data_and_tracker(root: Path, step: int) -> None:
    """As `CheckpointHandler.save_checkpoint` does after the engine's save has returned: committed or not."""
    step_folder(root, step).mkdir(parents=True, exist_ok=True)
    if parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.is_pipeline_last_stage():
        name = f"data_{parallel_state.get_data_parallel_rank()}.pt"
        torch.save({"seen": step}, step_folder(root, step) / name)
    if dist.get_rank() == 0:
        (root / f"{TRACKER}.tmp").write_text(str(step))
        os.rename(root / f"{TRACKER}.tmp", root / TRACKER)
    dist.barrier()


def tracked(root: Path) -> str | None:
    """What verl's `find_latest_ckpt_path` reads."""
    return (root / TRACKER).read_text() if (root / TRACKER).exists() else None


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in root.glob("global_step_*"))
