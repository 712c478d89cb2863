"""NeMo-RL's registry of the Python environments of its actors."""

MCORE_EXECUTABLE = "uv run --extra mcore"
ACTOR_ENVIRONMENT_REGISTRY = {
    "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker": MCORE_EXECUTABLE,
}


def get_actor_python_env(actor_class_fqn):
    return ACTOR_ENVIRONMENT_REGISTRY[actor_class_fqn]
