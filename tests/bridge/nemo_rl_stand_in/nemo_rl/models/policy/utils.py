"""NeMo-RL's choice of a worker."""


def get_runtime_env_for_policy_worker(policy_worker_name):
    return {}


def resolve_policy_worker_cls(default_cls, config):
    return default_cls if config.get("quant_cfg") is None else "nemo_rl.modelopt.QuantizedWorker"
