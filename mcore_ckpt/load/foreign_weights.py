"""Reads weights, through `CheckpointReader`, from kinds of checkpoints that have no other state for a training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mcore_ckpt.checkpoint.file_names import config_dir
from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.checkpoint_kind import CheckpointKind
from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.formats.foreign_state import ForeignState, FoundWeight
from mcore_ckpt.formats.locate import Locator, Wanted
from mcore_ckpt.formats.step_folders import step_of
from mcore_ckpt.load.fill import TensorFill, fill_tensors
from mcore_ckpt.load.fresh_adapters import choice_of
from mcore_ckpt.load.tensor_fills import not_there, plan_fill
from mcore_ckpt.load.together import names_left_over, positions_taken
from mcore_ckpt.models.architecture import read_config
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.state.model import model_shards
from mcore_ckpt.state.shards import LocalShard
from mcore_ckpt.state.trainer import Trainer


class WeightsAlone(ForeignState):
    """The weights in one checkpoint.

    Raises:
        UnsupportedError: `load_contents` names more than the model.
    """

    def __init__(self, trainer: Trainer, kind: CheckpointKind, path: Path) -> None:
        if set(trainer.config.load_contents) != {"model"}:
            raise UnsupportedError(
                f"{path}: is {kind.what}, of which a training can load only the weights: set load_contents=('model',)"
            )
        folder = config_dir(path)
        self._trainer = trainer
        self._reader = kind.open(path, None if folder is None else read_config(folder))
        self._shards = [shard for shard in model_shards(trainer.chunks) if shard.key.kind == MODEL]
        position = RankPosition(trainer.topology, trainer.coordinates)
        self._locator = Locator(self._reader, position, trainer.vocab_size, trainer.layers)
        self.step = step_of(path)
        self.nbytes = 0
        self.facts = kind.facts(self._reader)

    def weights(self) -> list[FoundWeight]:
        names = (shard.key.name for shard in self._shards)
        is_taken = choice_of(self._trainer, self._reader.place, names, self._reader.names)
        taken = [shard for shard in self._shards if is_taken(shard.key.name, shard.is_frozen)]
        memory = [torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype) for shard in taken]
        fills = list(map(self._fill, taken, memory))
        self.nbytes = fill_tensors(fills, self._reader.read)
        return [
            FoundWeight(shard.tensor, loaded, fill.rounding)
            for shard, loaded, fill in zip(taken, memory, fills, strict=True)
        ]

    def _fill(self, shard: LocalShard, memory: torch.Tensor) -> TensorFill:
        wanted = Wanted(shard.key, shard.region, str(self._reader.place))
        located = self._locator.find(wanted)
        if located is None:
            raise not_there(wanted, could_be_skipped=shard.is_frozen)
        return plan_fill(wanted, memory.dtype, located, lambda: memory)

    def report(self) -> Record:
        return {"used": positions_taken(self._locator, (shard.key for shard in self._shards))}

    def check(self, reports: Sequence[Record]) -> None:
        """Refuses a checkpoint with a tensor that no rank has, because this tensor would be lost silently."""
        for name in names_left_over(self._locator, (report["used"] for report in reports)):
            raise CheckpointMismatchError(
                f"{self._reader.place}: tensor {name}: wanted no such tensor, found one: build the model that was saved"
            )
