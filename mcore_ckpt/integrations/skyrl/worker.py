"""Makes SkyRL's Megatron worker for the policy save and load with this package.

`MegatronPolicyWorkerBase` (0.3) makes its strategy in `init_worker_process_group`, and its `save_checkpoint` and
`load_checkpoint` call the strategy. The strategy is replaced as soon as it is made.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

try:
    from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy
    from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import MegatronPolicyWorkerBase
except ImportError as error:
    raise ImportError(
        f"the workers of mcore_ckpt.integrations.skyrl need SkyRL and Megatron-Bridge: {error}"
    ) from error

from mcore_ckpt.checkpoint import MANIFEST_FILE, parse_step
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.integrations.kit.kept import KeptManager
from mcore_ckpt.integrations.kit.together import decided_by_rank_0
from mcore_ckpt.integrations.skyrl.options import DRIVER_ROLE, options_of
from mcore_ckpt.steps import uncommit_earlier_save

logger = logging.getLogger(__name__)


class CheckpointStrategy(MegatronStrategy):
    """A MegatronStrategy that saves and loads with this package. The worker sets `checkpoint_options`."""

    checkpoint_options: CheckpointConfig
    _kept: KeptManager

    def save_checkpoint(
        self,
        model: Any,
        ckpt_dir: str,
        node_local_rank: int,
        optimizer: Any = None,
        scheduler: Any = None,
        tokenizer: Any = None,
    ) -> None:
        """Saves into `ckpt_dir`, which is `<ckpt_path>/global_step_{N}/policy`. Every rank calls this method.

        With `async_dist_ckpt_save`, training continues while the files are written, and the commit follows.

        Raises CheckpointError: see CheckpointManager.save; or the previous async save failed.
        """
        folder, step = Path(ckpt_dir), _step_of(Path(ckpt_dir))
        trainer = self._trainer(model, folder, optimizer, scheduler, tokenizer)
        manager = self._kept.get(folder.parents[1], trainer, self.checkpoint_options)

        def undo_earlier_save() -> None:
            # This runs after all checks, because a save that is refused must leave the earlier save as it is.
            uncommit_earlier_save(folder.parent, folder.name, DRIVER_ROLE)

        manager.save(step, roles=(folder.name, DRIVER_ROLE), path=folder, prepared=undo_earlier_save)

    def finalize_pending_saves(self) -> None:
        """Waits until no save is under way. Raises CheckpointError on all ranks: the save failed."""
        self._kept.wait()

    def load_checkpoint(
        self,
        model: Any,
        ckpt_dir: str,
        optimizer: Any = None,
        scheduler: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> tuple[str, dict[str, Any]]:
        """Loads `ckpt_dir`, which this package or SkyRL wrote. Every rank calls this method.

        A checkpoint of this package may have been saved under another parallel layout. `load_module_strict` is for
        SkyRL's own checkpoints alone. A checkpoint of this package must always fit the model.

        Raises CheckpointError: see CheckpointManager.load.
        """
        self.finalize_pending_saves()
        folder = Path(ckpt_dir)

        def is_ours() -> bool:
            return (folder / MANIFEST_FILE).exists()

        timeout_s = self.checkpoint_options.timeout_s
        if not decided_by_rank_0("skyrl/load", f"looking at {ckpt_dir}", str(ckpt_dir), is_ours, timeout_s):
            logger.info("%s is not a checkpoint of mcore_ckpt, so SkyRL's own strategy loads it", ckpt_dir)
            return super().load_checkpoint(
                model,
                ckpt_dir,
                optimizer,
                scheduler,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
            )
        trainer = self._trainer(
            model,
            folder,
            optimizer if load_optimizer_states else None,
            scheduler if load_lr_scheduler_states else None,
        )
        with self._kept.loader(folder.parents[1], trainer, self.checkpoint_options) as manager:
            result = manager.load(path=folder)
        logger.info("loaded step %d of %s from %s", result.step, folder.name, folder)
        return str(ckpt_dir), {}

    def _trainer(
        self, model: Any, folder: Path, optimizer: Any, scheduler: Any, tokenizer: Any = None
    ) -> dict[str, Any]:
        """Returns the arguments of CheckpointManager that are SkyRL's objects."""
        return {
            "model": list(model.actor_module),
            "optimizer": optimizer,
            "lr_scheduler": scheduler,
            "role": folder.name,
            "hf_config": self.hf_config,
            "processing_class": tokenizer,
        }


class PolicyWorkerBase(MegatronPolicyWorkerBase):
    """SkyRL's Megatron worker for the policy, with our checkpoints. `checkpointed` makes an actor of ray from it.

    Attributes:
        checkpoint_config: options that a subclass may set. SkyRL's own options (`trainer.max_ckpts_to_keep`,
            `trainer.policy.megatron_config.async_dist_ckpt_save`) override these.
    """

    checkpoint_config: ClassVar[CheckpointConfig] = CheckpointConfig()
    strategy: Any

    def init_worker_process_group(self) -> None:
        """Makes the process group and the strategy, as SkyRL's worker does."""
        super().init_worker_process_group()
        self.strategy = with_checkpoints(self.strategy, options_of(self.checkpoint_config, self.cfg))


def with_checkpoints(strategy: Any, options: CheckpointConfig) -> CheckpointStrategy:
    """Returns a strategy that has the attributes of `strategy`, and that saves and loads with this package."""
    made: Any = object.__new__(CheckpointStrategy)
    made.__dict__ = strategy.__dict__
    # With LoRA, SkyRL fills the base model from the HuggingFace folder. So only the adapters are saved, as SkyRL does.
    made.checkpoint_options = replace(options, skip_frozen=options.skip_frozen or strategy.is_lora)
    made._kept = KeptManager()
    return made


def _step_of(folder: Path) -> int:
    """Returns the N of `<ckpt_path>/global_step_{N}/policy`. Raises InvalidArgumentError for any other folder."""
    step = parse_step(folder.parent.name)
    if step is None:
        raise InvalidArgumentError(
            f"ckpt_dir is {folder}, but SkyRL's checkpoints have names such as global_step_10/policy: wrap the "
            "trainer in mcore_ckpt.integrations.skyrl.checkpointed"
        )
    return step
