"""ms-swift's Megatron pipelines (4.6), with trainers that save and load with this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift.megatron import trainers
from swift.megatron.arguments import MegatronPretrainArguments, MegatronRLHFArguments, MegatronSftArguments
from swift.megatron.pipelines.train import sft
from swift.megatron.pipelines.train.pretrain import MegatronPretrain as StockPretrain
from swift.megatron.pipelines.train.rlhf import MegatronRLHF as StockRLHF
from swift.megatron.pipelines.train.sft import MegatronSft as StockSft

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations import swift as own
from mcore_ckpt.integrations.swift.options import read_config
from mcore_ckpt.integrations.swift.trainer import CheckpointTrainer, replaced

# The trainers that `prepare_trainer` chooses by `rlhf_type` or `task_type`. MegatronTrainer is for all other tasks.
_BY_TYPE = {
    "embedding": "MegatronEmbeddingTrainer",
    "reranker": "MegatronRerankerTrainer",
    "generative_reranker": "MegatronRerankerTrainer",
    "dpo": "MegatronDPOTrainer",
    "kto": "MegatronKTOTrainer",
    "rm": "MegatronRewardTrainer",
    "grpo": "MegatronGRPOTrainer",
    "gkd": "MegatronGKDTrainer",
}


@dataclass
class OwnArguments:
    """A mixin that adds `--mcore_ckpt` to ms-swift's options: options of CheckpointConfig as JSON.

    The mixin must be the first base. The constructor raises InvalidArgumentError for wrong values of our options before
    ms-swift does anything.
    """

    mcore_ckpt: str | None = None

    def __post_init__(self) -> None:
        read_config(self)
        super().__post_init__()  # type: ignore[misc]


@dataclass
class SftArguments(OwnArguments, MegatronSftArguments):
    """ms-swift's options for `megatron sft`, and ours."""


@dataclass
class PretrainArguments(OwnArguments, MegatronPretrainArguments):
    """ms-swift's options for `megatron pt`, and ours."""


@dataclass
class RLHFArguments(OwnArguments, MegatronRLHFArguments):
    """ms-swift's options for `megatron rlhf`, and ours."""


class CheckpointPipeline:
    """A mixin that gives our trainers to a Megatron pipeline. The mixin must be the first base."""

    args: Any

    def prepare_trainer(self) -> Any:
        """Makes our version of the trainer that ms-swift chooses. Raises UnsupportedError if we have no version."""
        args = self.args
        name = _BY_TYPE.get(args.rlhf_type or args.task_type, "MegatronTrainer")
        # ms-swift finds a trainer by its name in the module `sft`, or else in the package `trainers`.
        module = sft if hasattr(sft, name) else trainers
        with replaced((module.__name__,), name, getattr(own, name)):
            trainer = super().prepare_trainer()  # type: ignore[misc]
        if not isinstance(trainer, CheckpointTrainer):
            raise UnsupportedError(
                f"ms-swift trains this with {type(trainer).__name__}, for which mcore_ckpt has no replacement: use "
                "ms-swift's own script"
            )
        return trainer


class MegatronSft(CheckpointPipeline, StockSft):
    """`megatron sft` with checkpoints of this package."""

    args_class = SftArguments


class MegatronPretrain(CheckpointPipeline, StockPretrain):
    """`megatron pt` with checkpoints of this package."""

    args_class = PretrainArguments


class MegatronRLHF(CheckpointPipeline, StockRLHF):
    """`megatron rlhf` with checkpoints of this package."""

    args_class = RLHFArguments
