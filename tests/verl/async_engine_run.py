"""A run of verl's asynchronous trainer (`async_run`) with verl's own worker and engine, by its configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.verl import engine_on_cpu, ppo, ppo_engines
from tests.verl.async_run import AsyncRun, counts_in


@dataclass(frozen=True)
class AsyncEngineRun(AsyncRun):
    """A run of the real worker, which verl's own manager saves unless `overrides` have it replaced."""

    model: Path = Path()
    overrides: tuple[str, ...] = ()

    def config(self) -> Any:
        return ppo.configuration(
            self.root,
            self.model,
            (
                *self.overrides,
                "critic.enable=False",
                "trainer.v1.trainer_mode=colocate_async",
                "trainer.max_actor_ckpt_to_keep=1",
                f"trainer.checkpoint_callback_class={self.callback or 'null'}",
                f"trainer.resume_mode={self.resume[0]}",
                f"trainer.resume_from_path={self.resume[1] or 'null'}",
                f"{ppo.ACTOR}.checkpoint.save_contents=[model,extra]",
            ),
        )

    def _work(self, rank: int) -> None:
        engine_on_cpu.enable()
        self.run(_EngineActor())


class _EngineActor:
    def init(self, config: Any) -> None:
        self._worker = ppo_engines.make_actor(config)
        self.save_checkpoint, self.load_checkpoint = self._worker.save_checkpoint, self._worker.load_checkpoint
        self.counts.zero_()

    def wait(self) -> None:
        self._worker.wait()

    @property
    def counts(self) -> torch.Tensor:
        return counts_in(self._worker.engine.module)
