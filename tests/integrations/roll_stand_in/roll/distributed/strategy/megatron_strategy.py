"""ROLL's Megatron strategies; the model is the test's."""

from abc import ABC

from roll.utils.checkpoint_manager import CheckpointManager


class InferenceStrategy(ABC):  # noqa: B024 -- as in ROLL: of several bases, Python lets no class be assigned
    strategy_name = None


class TrainStrategy(InferenceStrategy):
    pass


class MegatronInferStrategy(InferenceStrategy):
    strategy_name = "megatron_infer"

    def __init__(self, worker):
        self.worker = worker
        self.worker_config = worker.worker_config


class MegatronTrainStrategy(MegatronInferStrategy, TrainStrategy):
    strategy_name = "megatron_train"

    def __init__(self, worker):
        super().__init__(worker)
        self.megatron_train_args = self.worker_config.training_args
        self.checkpoint_manager = CheckpointManager(checkpoint_config=self.worker_config.checkpoint_config)
        self.tokenizer = self.processor = None
        self.offloaded = False
        self.loaded_by_roll: list[str] = []  # the stand-in's own

    def initialize(self, model_provider):
        training = self.worker_config.build()
        self.models_wrapped = training.model
        self.models_unwrapped = [chunk.module for chunk in training.model]
        self.optimizer, self.scheduler = training.optimizer, training.scheduler
        self.training = training

    def load_states(self, include=None, non_blocking=False):
        self.offloaded = False

    def offload_states(self, include=None, non_blocking=False, pin_memory=True):
        self.offloaded = True

    def save_checkpoint(self, save_dir, global_step, ckpt_id, tag="checkpoint", local_state_path=None, **kwargs):
        raise AssertionError("ROLL's own strategy saves")

    def load_checkpoint(self, load_dir, tag="checkpoint", **kwargs):
        self.loaded_by_roll.append(load_dir)
