"""ROLL's factory: a fixed list of strategies."""

from roll.distributed.strategy import megatron_strategy


def create_strategy(worker, sync_wrapper=False):
    name = worker.worker_config.strategy_args.strategy_name
    if name == "megatron_train":
        return megatron_strategy.MegatronTrainStrategy(worker)
    assert name == "megatron_infer"
    return megatron_strategy.MegatronInferStrategy(worker)
