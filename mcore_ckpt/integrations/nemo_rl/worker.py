"""Makes NeMo-RL's Megatron worker (2026-08) save and load with this package.

The worker calls Megatron-Bridge's functions, not Bridge's checkpoint manager: `save_checkpoint` and
`maybe_finalize_async_save` from the worker's module, `load_checkpoint` from `nemo_rl.models.megatron.setup`. These
three names are replaced in each worker's process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

try:
    import ray
    from nemo_rl.models.megatron import setup
    from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
    from nemo_rl.models.policy.workers import megatron_policy_worker as stock
except ImportError as error:
    raise ImportError(f"the workers of mcore_ckpt.integrations.nemo_rl need NeMo-RL: {error}") from error

import torch.distributed as dist

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations.kit.published import published_config
from mcore_ckpt.integrations.nemo_rl.functions import BridgeFunctions


class CheckpointedWorkerImpl(stock.MegatronPolicyWorkerImpl):
    """NeMo-RL's worker with our checkpoints.

    Derive from this class, not from PolicyWorker, because PolicyWorker is an actor of ray.

    Attributes:
        checkpoint_config: options that a subclass may set. NeMo-RL's own options
            (`policy.megatron_cfg.checkpoint.async_save`, `checkpointing.save_optimizer`) override these.
    """

    checkpoint_config: ClassVar[CheckpointConfig] = CheckpointConfig()

    def __init__(self, config: Any, tokenizer: Any, *args: Any, **more: Any) -> None:
        if config.get("quant_cfg") is not None:
            raise UnsupportedError(
                "quant_cfg is set: quantized policies need another worker of NeMo-RL, so start the script without "
                "mcore_ckpt.integrations.nemo_rl"
            )
        hf_config = published_config(
            config.get("model_name"), needed="hf_model" in self.checkpoint_config.save_contents
        )
        functions = BridgeFunctions(self.checkpoint_config, setup.load_checkpoint, hf_config, tokenizer)
        setup.load_checkpoint = functions.load_checkpoint
        stock.save_checkpoint = functions.save_checkpoint
        stock.maybe_finalize_async_save = functions.maybe_finalize_async_save
        super().__init__(config, tokenizer, *args, **more)

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None, **more: Any) -> None:
        """Saves as NeMo-RL's worker does, and makes the folder that tells the driver that the optimizer was saved."""
        super().save_checkpoint(weights_path, optimizer_path, **more)
        if optimizer_path is not None and dist.get_rank() == 0:
            # `CheckpointManager.get_resume_paths` looks for this folder. A file is put into it, because some programs
            # do not copy empty folders.
            folder = Path(optimizer_path)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "README.txt").write_text("The optimizer is in the checkpoint in the folder weights.\n")


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class PolicyWorker(CheckpointedWorkerImpl):
    """The actor of ray that `worker_extension_cls_fqn` names."""
