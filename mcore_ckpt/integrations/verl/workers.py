"""Makes the megatron workers of verl 0.4 to 0.7 save and load with this package.

These workers look the checkpoint manager up by name in `verl.workers.megatron_workers`, and the import of this module
replaces the manager there. `model.external_lib` can name this module, because the workers import the named module
before they make the manager. verl 0.8 and newer have engines instead (`engines.py`), and import `model.external_lib`
only for the actor.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

if find_spec("verl.workers.megatron_workers") is None:
    import verl

    raise ImportError(
        f"verl {verl.__version__} has no megatron workers (only verl 0.4 to 0.7 have them): instead of "
        "model.external_lib, set checkpoint._target_=mcore_ckpt.integrations.verl.McoreCkptConfig, as "
        "docs/integrations.md says"
    )
from verl.workers import megatron_workers

from mcore_ckpt.integrations.verl.manager import MegatronCheckpointManager


class WorkerCheckpointManager(MegatronCheckpointManager):
    """The manager for verl's megatron workers, which offload and end differently from verl's engines.

    Args:
        config: `actor_rollout_ref` for an actor, `critic` for a critic.
        keywords: see MegatronCheckpointManager.
    """

    def __init__(self, *, config: Any, **keywords: Any) -> None:
        options = config.get(keywords["role"], config)
        megatron = options.megatron
        # The workers bring an offloaded model back to the GPU before a save, and offload it again right after.
        offloads = megatron.get("param_offload", False) or megatron.get("optimizer_offload", False)
        super().__init__(frees_memory=offloads, **keywords)
        # The `save_checkpoint` of the actor's worker (0.7) reads `checkpoint_config.async_save`.
        self.checkpoint_config = keywords.get("checkpoint_config")
        self._last_step = options.optim.get("total_training_steps", -1)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """See MegatronCheckpointManager. Waits for the last save, because Ray kills the workers after that save."""
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        if 0 < self._last_step <= global_step:
            self.wait()


megatron_workers.MegatronCheckpointManager = WorkerCheckpointManager
