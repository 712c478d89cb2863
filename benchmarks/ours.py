"""Saves and loads with this package: our side of every pair."""

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
    """A manager, with the report of its last save or load. Every save is a new step, deleted after the measurement."""

    def __init__(self, root: Path, state: TrainingState, *, async_save: bool = False) -> None:
        self.root = root
        self.manager = _manager(root, state, async_save)
        self.report: Any = None
        self.handle: Any = None
        self._steps: Iterator[int] = itertools.count(1)
        self._step = 0

    def renew(self, state: TrainingState) -> None:
        """Replaces the manager by a new one for the same folder, which has no memory of earlier saves."""
        self.manager.close()
        self.manager = _manager(self.root, state, False)

    def save(self) -> None:
        """Saves and waits for the commit, with a synchronous or an asynchronous manager."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Starts a save and returns when training may go on."""
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
        """Returns the role's folder of the last save."""
        return file_names.step_dir(self.root, self._step) / "actor"

    def files_of_rank(self) -> list[Path]:
        """Returns the files that a data-parallel rank loads: the shared model files and its own optimizer file."""
        model = sorted(self.folder().glob("model/*/*.pt"))
        return [*model, self.folder() / file_names.optimizer_file(0, 0, 0, dist.get_rank())]

    def saving(self, name: str = "durable save") -> Contender:
        return Contender(name, self.save, after=self.forget)

    def stalling(self) -> Contender:
        """Times a save until training may go on. The rest of the save falls outside of the measurement."""
        return Contender("async save, stall", self.start, after=self.finish_and_forget)

    def loading(self) -> Contender:
        return Contender("load", self.load, before=lambda: drop_by_rank_0(self.folder()))


def _manager(root: Path, state: TrainingState, async_save: bool) -> CheckpointManager:
    config = CheckpointConfig(async_save=async_save)
    return CheckpointManager(root, state.model, state.optimizer, state.scheduler, config=config)
