"""One run of NeMo-RL: stand-ins for its driver and workers, around Megatron-Bridge's real model and optimizer.

Each rank has a worker in its own process; the first is the driver, too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.training.config import CheckpointConfig
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads

from tests.bridge import bridge_on_cpu
from tests.bridge.bridge_run import SEQUENCE, _stand_in, configuration, training_of
from tests.distributed import forked_ranks
from tests.distributed.snapshot import Snapshot, poison, snapshot

HERE = Path(__file__).parent
STEPS = 5
_BATCH = 4


@dataclass(frozen=True)
class NemoRun:
    """A run, and what it leaves.

    Attributes:
        folder: what the run leaves beside its checkpoints.
        root: `checkpointing.checkpoint_dir`.
        options: values of Bridge's configuration by their path.
        async_save: `policy.megatron_cfg.checkpoint.async_save`.
        ours: whether the start script is ours.
        killed_after: all ranks are killed after this step, which is saved but not finalized.
        keep: `checkpointing.keep_top_k`.
        save_optimizer: `checkpointing.save_optimizer`.
    """

    world: int
    folder: Path
    root: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    async_save: bool = False
    ours: bool = True
    killed_after: int | None = None
    keep: int = 9
    save_optimizer: bool = True

    def start(self) -> list[int]:
        """What the ranks exited with."""
        self.folder.mkdir()
        return forked_ranks.run(self.world, self._work, self.folder / "log")

    def check(self) -> NemoRun:
        """Runs to the end."""
        assert self.start() == [0] * self.world, self.log
        return self

    def again(self, name: str, **changes: Any) -> NemoRun:
        """The same run, started again."""
        return replace(self, **({"folder": self.folder.with_name(name), "killed_after": None} | changes))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def losses(self) -> dict[int, float]:
        """Of each step, from the first rank."""
        lines = (self.folder / "losses.jsonl").read_text().splitlines()
        return dict(json.loads(line) for line in lines)

    @property
    def states(self) -> list[Snapshot]:
        """What each rank had at its end."""
        return [torch.load(self.folder / f"state_{rank}.pt", weights_only=False) for rank in range(self.world)]

    def _work(self, rank: int) -> None:
        sys.path.insert(0, str(HERE / "nemo_rl_stand_in"))
        bridge_on_cpu.enable()
        if self.ours:
            # What `python -m mcore_ckpt.integrations.nemo_rl` does before it runs the script.
            from mcore_ckpt.integrations.nemo_rl.driver import choose_worker, register
            from mcore_ckpt.integrations.nemo_rl.driver_files import keep_driver_files

            register()
            choose_worker()
            keep_driver_files()
        with _stand_in(self.options):
            self._train(rank)

    def _train(self, rank: int) -> None:
        """The driver's loop, of which the first rank does the part of the driver alone."""
        from nemo_rl.models.policy.lm_policy import Policy
        from nemo_rl.utils.checkpoint import CheckpointManager

        checkpointer = CheckpointManager({"checkpoint_dir": self.root, "keep_top_k": self.keep})
        last = checkpointer.get_latest_checkpoint_path()
        done = json.loads((Path(last) / "training_info.json").read_text())["total_steps"] if last else 0
        weights, optimizer = checkpointer.get_resume_paths(last)
        dist.barrier()
        policy = Policy(None, self._config(), None, weights_path=weights, optimizer_path=optimizer)
        for step in range(done, STEPS):
            loss = train_step(policy.worker, step)
            if rank == 0:
                with (self.folder / "losses.jsonl").open("a") as file:
                    file.write(json.dumps((step + 1, loss)) + "\n")
            self._save(checkpointer, policy, step + 1, rank)
            if step + 1 == self.killed_after:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        self._finish(checkpointer, policy, rank)
        torch.save(snapshot(_training(policy.worker)), self.folder / f"state_{rank}.pt")

    def _save(self, checkpointer: Any, policy: Any, step: int, rank: int) -> None:
        self._finish(checkpointer, policy, rank)
        path = checkpointer.init_tmp_checkpoint(step, {"total_steps": step}) if rank == 0 else None
        dist.barrier()
        folder = (path or self.root / f"tmp_step_{step}") / "policy"
        policy.save_checkpoint(
            weights_path=str(folder / "weights"),
            optimizer_path=str(folder / "optimizer") if self.save_optimizer else None,
            tokenizer_path=str(folder / "tokenizer"),
        )
        if rank == 0:
            torch.save({"trajectories": [step]}, path / "replay_buffer.pt")
            checkpointer.begin_finalization(path, wait_fn=policy.finalize_async_save)

    def _finish(self, checkpointer: Any, policy: Any, rank: int) -> None:
        """The driver's call of all workers."""
        if rank > 0:
            policy.finalize_async_save()
        checkpointer.finalize_pending()
        dist.barrier()

    def _config(self) -> dict[str, Any]:
        def make(weights_path: Any, optimizer_path: Any) -> Any:
            found = configuration(None, {"model.hidden_dropout": 0.0, **self.options})
            folder = None if weights_path is None else str(weights_path)
            # As `_create_checkpoint_config` makes it, with a placeholder for asynchronous saves.
            found.checkpoint = CheckpointConfig(
                save=folder or str(self.folder),
                load=folder,
                load_optim=optimizer_path is not None,
                load_rng=False,
                save_interval=100,
                async_save=self.async_save,
            )
            return found

        return {"megatron_cfg": {"enabled": True}, "make_megatron_cfg": make, "before_load": self._before_load}

    def _before_load(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Whatever a load of ours leaves as it was makes the run another one."""
        if self.save_optimizer and any(self.root.glob("step_*/policy/weights/policy")):
            poison(training_of(model, optimizer, scheduler))


def train_step(worker: Any, step: int) -> float:
    """One step of a worker: the loss of this rank's sequences."""
    dp = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(100 * step + dp)
    tokens = torch.randint(131, (_BATCH, SEQUENCE + 1), generator=generator)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    worker.model.zero_grad_buffer()
    worker.optimizer.zero_grad()
    positions = torch.arange(SEQUENCE).expand(_BATCH, -1)
    losses = worker.model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
    losses.mean().backward()
    finalize_model_grads([worker.model])
    worker.optimizer.step()
    worker.scheduler.step(increment=8)
    return float(losses.mean())


def _training(worker: Any) -> Any:
    return training_of([worker.model], worker.optimizer, worker.scheduler)
