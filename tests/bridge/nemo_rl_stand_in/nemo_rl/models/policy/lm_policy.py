"""NeMo-RL's Policy, without ray: its worker is an object of this process."""

from importlib import import_module

from nemo_rl.distributed.ray_actor_environment_registry import get_actor_python_env
from nemo_rl.models.policy.utils import resolve_policy_worker_cls


class Policy:
    def __init__(
        self,
        cluster,
        config,
        tokenizer,
        name_prefix="lm_policy",
        workers_per_node=None,
        init_optimizer=True,
        weights_path=None,
        optimizer_path=None,
        init_reference_model=True,
        processor=None,
        worker_extension_cls_fqn=None,
        skip_weight_load=False,
    ):
        stock = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
        name = worker_extension_cls_fqn or resolve_policy_worker_cls(stock, config)
        self.python_env = get_actor_python_env(name)
        module, _, cls = name.rpartition(".")
        self.worker = getattr(import_module(module), cls)(
            config,
            tokenizer,
            weights_path,
            optimizer_path,
            init_optimizer,
            init_reference_model,
            worker_sharding_annotations=None,
            skip_weight_load=skip_weight_load,
        )

    def save_checkpoint(self, weights_path, optimizer_path=None, tokenizer_path=None, checkpointing_cfg=None):
        self.worker.save_checkpoint(
            weights_path=weights_path, optimizer_path=optimizer_path, tokenizer_path=tokenizer_path
        )

    def finalize_async_save(self):
        self.worker.finalize_async_save()
