"""This package's side of a pair."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from measuring import Contender
from references import delete, drop_by_rank_0
from training_state import TrainingState

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.checkpoint import file_names


class Ours:
    """A manager, and what its last save said. Every save is a new step, deleted after it was measured."""

    def __init__(self, root: Path, state: TrainingState, *, async_save: bool = False) -> None:
        self.root = root
        self.manager = _manager(root, state, async_save)
        self.report: Any = None
        self.handle: Any = None
        self._steps: Iterator[int] = itertools.count(1)
        self._step = 0

    def renew(self, state: TrainingState) -> None:
        """Another manager of the same folder, with none of the memory that saves have taken."""
        self.manager.close()
        self.manager = _manager(self.root, state, False)

    def save(self) -> None:
        """Returns when the checkpoint is committed, whatever the manager's mode."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Returns when training may go on."""
        self._step = next(self._steps)
        self.handle = self.manager.save(self._step)

    def finish(self) -> None:
        self.report = self.handle.wait()

    def forget(self) -> None:
        dist.barrier()
        delete(file_names.step_dir(self.root, self._step))

    def finish_and_forget(self) -> None:
        self.finish()
        self.forget()

    def load(self) -> None:
        self.report = self.manager.load().report

    def folder(self) -> Path:
        """The last save's files of the one role."""
        return file_names.step_dir(self.root, self._step) / "actor"

    def files_of_rank(self) -> list[Path]:
        """What a rank of a data-parallel training loads from: the model, which all share, and its own optimizer."""
        model = sorted(self.folder().glob("model/*/*.pt"))
        return [*model, self.folder() / file_names.optimizer_file(0, 0, 0, dist.get_rank())]

    def saving(self, name: str = "durable save") -> Contender:
        return Contender(name, self.save, after=self.forget)

    def stalling(self) -> Contender:
        """Only until training may go on; the rest of the save is waited for outside the measurement."""
        return Contender("async save, stall", self.start, after=self.finish_and_forget)

    def loading(self) -> Contender:
        return Contender("load", self.load, before=lambda: drop_by_rank_0(self.folder()))


def _manager(root: Path, state: TrainingState, async_save: bool) -> CheckpointManager:
    config = CheckpointConfig(async_save=async_save)
    return CheckpointManager(root, state.model, state.optimizer, state.scheduler, config=config)
