"""Makes verl's megatron engines save and load with this package.

Importing this module registers the engines. verl 0.9 uses them if VERL_ENGINE_VENDOR is `mcore_ckpt`. verl 0.6 to 0.8
have no vendors, so in these versions our engines replace verl's own.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

try:
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead, MegatronEngineWithValueHead
except ImportError as error:
    raise ImportError(
        f"the engines need verl 0.6 or newer and megatron-core: pip install verl megatron-core ({error})"
    ) from error

from mcore_ckpt.integrations.verl.manager import MegatronCheckpointManager
from mcore_ckpt.integrations.verl.vendor import VENDOR

HAS_VENDORS = "vendor" in signature(EngineRegistry.register).parameters


class _WithCheckpoints:
    """A mixin that makes one of verl's engines save and load with this package. The mixin must be the first base."""

    def initialize(self: Any) -> None:
        super().initialize()  # type: ignore[misc]
        # verl's own manager is None if the engine does not train. Otherwise the manager has only stored its arguments
        # so far. (The spelling of the attribute is verl's.)
        stock = getattr(self, "checkpoint_mananager", None)
        if stock is None:
            return
        self.checkpoint_mananager = MegatronCheckpointManager(
            model=stock.model,
            optimizer=stock.optimizer,
            optimizer_scheduler=stock.lr_scheduler,
            checkpoint_config=stock.checkpoint_config,
            role=stock.role,
            hf_config=stock.hf_config,
            processing_class=stock.processing_class,
            peft_cls=getattr(stock, "peft_cls", None),  # 0.6 has no adapters
            frees_memory=self.engine_config.param_offload or self.engine_config.optimizer_offload,
            use_megatron_fsdp=getattr(stock, "use_megatron_fsdp", False),  # since 0.8
        )

    def save_checkpoint(
        self: Any,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves like verl's engine, but leaves offloaded state in host memory.

        verl's own engine would first bring the state back to the GPU, but the rollout needs the GPU's memory now.
        """
        manager = self.checkpoint_mananager
        if any(chunk.ddp_config.overlap_param_gather for chunk in self.module):
            # Offloaded parameters can hold old values of other ranks' shards. The new values must be gathered on the
            # GPU, so call verl's method, which first brings the parameters back to the GPU.
            super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep, **kwargs)  # type: ignore[misc]
        else:
            manager.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        if 0 < self.optimizer_config.total_training_steps <= global_step:
            # This is the last save, and Ray kills the workers when the trainer returns.
            manager.wait()

    def load_checkpoint(
        self: Any,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
        **kwargs: Any,
    ) -> None:
        """Loads like verl's engine, but does not delete the checkpoint by default.

        verl's own engine deletes the checkpoint by default, and verl's SFT trainer does not pass
        `del_local_after_load`.
        """
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load, **kwargs)  # type: ignore[misc]


class LanguageModelEngine(_WithCheckpoints, MegatronEngineWithLMHead):
    """verl's engine for actors and SFT, with checkpoints of this package."""


class ValueModelEngine(_WithCheckpoints, MegatronEngineWithValueHead):
    """verl's engine for critics, with checkpoints of this package."""


def _register(model_type: str, engine: type[Any]) -> None:
    if HAS_VENDORS:
        EngineRegistry.register(model_type=model_type, backend="megatron", device="cuda", vendor=VENDOR)(engine)
        return
    # `EngineRegistry.register` (0.6 to 0.8) keeps the engine that was registered first, which is verl's own. So replace
    # that engine directly.
    EngineRegistry._engines[model_type]["megatron"]["cuda"] = engine


_register("language_model", LanguageModelEngine)
_register("value_model", ValueModelEngine)
