"""NeMo-RL's worker: what it does with checkpoints."""

import ray
from megatron.bridge.training.checkpointing import maybe_finalize_async_save, save_checkpoint

from nemo_rl.models.megatron.setup import setup_model_and_optimizer
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker


class MegatronPolicyWorkerImpl:
    def __init__(
        self,
        config,
        tokenizer,
        weights_path=None,
        optimizer_path=None,
        init_optimizer=True,
        init_reference_model=True,
        *,
        worker_sharding_annotations,
        skip_weight_load=False,
        **kwargs,
    ):
        megatron_cfg = config["make_megatron_cfg"](weights_path, optimizer_path)  # of the tests
        megatron_cfg.validate()
        found = setup_model_and_optimizer(config, megatron_cfg, init_optimizer)
        self.mcore_state, self.model, self.optimizer, self.scheduler, self.checkpointing_context = found

    def save_checkpoint(self, weights_path, optimizer_path=None, **kwargs):
        cfg = self.mcore_state.cfg.checkpoint
        before, is_async = cfg.save, cfg.async_save
        try:
            maybe_finalize_async_save(self.mcore_state, ckpt_cfg=cfg, blocking=True)
            cfg.save = weights_path
            save_checkpoint(
                state=self.mcore_state,
                model=[self.model],
                optimizer=None if optimizer_path is None else self.optimizer,
                opt_param_scheduler=None if optimizer_path is None else self.scheduler,
                num_floating_point_operations_so_far=self.mcore_state.train_state.floating_point_operations_so_far,
                checkpointing_context=self.checkpointing_context,
            )
            if not is_async:
                maybe_finalize_async_save(self.mcore_state, ckpt_cfg=cfg, blocking=True)
        finally:
            cfg.save = before

    def finalize_async_save(self):
        maybe_finalize_async_save(self.mcore_state, ckpt_cfg=self.mcore_state.cfg.checkpoint, blocking=True)


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class MegatronPolicyWorker(MegatronPolicyWorkerImpl):
    pass
