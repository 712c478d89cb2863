"""One run of one of verl's trainers, on several ranks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.distributed import forked_ranks
from tests.distributed.snapshot import Snapshot, snapshot
from tests.verl import engine_on_cpu


@dataclass(frozen=True)
class Run(ABC):
    """A run, and what it leaves.

    Attributes:
        folder: what the run leaves beside its checkpoints: losses, the state of each rank, what was printed.
        root: `trainer.default_local_dir`.
        overrides: of the configuration, as on verl's command line.
    """

    world: int
    model: Path
    folder: Path
    root: Path
    overrides: tuple[str, ...] = ()

    @abstractmethod
    def configuration(self) -> Any:
        """verl's, as hydra composes it."""

    @abstractmethod
    def train(self, config: Any) -> dict[str, Any]:
        """A rank's part of the run. Returns its engines by name."""

    def start(self) -> list[int]:
        """What the ranks exited with."""
        self.folder.mkdir()
        return forked_ranks.run(self.world, partial(self._work, self.configuration()), self.folder / "log")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def states(self) -> list[Snapshot]:
        """What each rank had at its end, of all its engines."""
        return [torch.load(self._state_file(rank), weights_only=False) for rank in range(self.world)]

    def _state_file(self, rank: int) -> Path:
        return self.folder / f"state_{rank}.pt"

    def _work(self, config: Any, rank: int) -> None:
        engine_on_cpu.enable()
        engines = self.train(config)
        state = {f"{role}.{name}": value for role in engines for name, value in _state(engines[role]).items()}
        torch.save(state, self._state_file(rank))


def _state(engine: Any) -> Snapshot:
    """All that an engine has, loaded back if it is offloaded."""
    if any(hasattr(buffer, "grad_data_size") for buffer in _buffers(engine)):
        engine.to("cuda")
    training: Any = SimpleNamespace(
        layout=SimpleNamespace(overlap_param_gather=False),  # none is overlapped here
        model=engine.module,
        optimizer=engine.optimizer,
        scheduler=engine.lr_scheduler,
    )
    return snapshot(training)


def _buffers(engine: Any) -> list[Any]:
    return [buffer for chunk in engine.module for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
