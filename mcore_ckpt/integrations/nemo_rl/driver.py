"""Lets NeMo-RL's driver start our workers."""

from __future__ import annotations

import functools
from typing import Any

from mcore_ckpt.errors import UnsupportedError

STOCK_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
WORKER = "mcore_ckpt.integrations.nemo_rl.PolicyWorker"


def register(worker: str = WORKER) -> None:
    """Tells NeMo-RL that a worker needs the Python environment of NeMo-RL's own Megatron worker.

    Raises ImportError: NeMo-RL is not installed.
    """
    try:
        from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    except ImportError as error:
        raise ImportError(f"mcore_ckpt.integrations.nemo_rl needs NeMo-RL: {error}") from error
    ACTOR_ENVIRONMENT_REGISTRY[worker] = ACTOR_ENVIRONMENT_REGISTRY[STOCK_WORKER]


def choose_worker(worker: str = WORKER) -> None:
    """Gives our workers to every Policy with the Megatron backend.

    NeMo-RL's algorithms make a Policy without naming a class of workers. So this function changes one method of NeMo-RL
    in the driver's process.
    """
    from nemo_rl.models.policy.lm_policy import Policy

    make: Any = Policy.__init__

    @functools.wraps(make)
    def make_with_ours(self: Any, cluster: Any, config: Any, *args: Any, **more: Any) -> None:
        if (config.get("megatron_cfg") or {}).get("enabled") and more.get("worker_extension_cls_fqn") is None:
            _refuse_other_workers(config)
            more["worker_extension_cls_fqn"] = worker
        make(self, cluster, config, *args, **more)

    Policy.__init__ = make_with_ours


def _refuse_other_workers(config: Any) -> None:
    from nemo_rl.models.policy.utils import resolve_policy_worker_cls

    chosen = resolve_policy_worker_cls(STOCK_WORKER, config)
    if chosen != STOCK_WORKER:
        raise UnsupportedError(
            f"the configuration needs the worker {chosen}, which mcore_ckpt.integrations.nemo_rl would replace: start "
            "the script without mcore_ckpt.integrations.nemo_rl"
        )
