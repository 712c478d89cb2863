"""Lives of a SkyRL training: its real trainer, strategy and worker, and a real megatron-core model, in one process.

    python -m tests.skyrl FOLDER

It imports once, and reads lives as lines of JSON on stdin. Each is a fork, which writes `report_{number}.json` into the
folder; when it has ended, its number and exit status are written to stdout. A rollout is stood in for: the data
loader's prompts decide which sequences the model trains on.
"""

import json
import os
import re
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.skyrl import skyrl_on_cpu

skyrl_on_cpu.import_skyrl()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from skyrl.backends.skyrl_train.workers.megatron import megatron_worker  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from skyrl.train.utils.trainer_utils import ResumeMode  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from mcore_ckpt import CheckpointConfig  # noqa: E402
from mcore_ckpt.integrations.skyrl import PolicyWorkerBase, checkpointed  # noqa: E402
from mcore_ckpt.integrations.skyrl import trainer as ours  # noqa: E402
from tests.distributed.snapshot import snapshot  # noqa: E402
from tests.distributed.training import Layout, Training, build, train  # noqa: E402
from tests.support.lives import digest  # noqa: E402

PROMPTS, ALARM_S = 40, 120
LAYOUT = Layout(1, precision="bf16", num_layers=1, hidden_size=24, global_batch=2)


@dataclass(frozen=True)
class Life:
    """One life of a training.

    Attributes:
        root: trainer.ckpt_path.
        resume: trainer.resume_mode, or a path for `from_path`.
        last: the step after which it ends.
        saves: the steps after which it saves.
        killed_in: kills the process: "step 3" before that step, "state 4" before the driver writes the first file of
            step 4, "driver 4" before it commits them.
        stock: SkyRL without this package; "worker": our trainer with SkyRL's own worker.
        asynchronous: the fully asynchronous trainer.
        keep: trainer.max_ckpts_to_keep.
        options: fields of CheckpointConfig.
        async_save: trainer.policy.megatron_config.async_dist_ckpt_save, which is newer than 0.3.
        deaf_loader: the data loader refuses its state.
        broken_loader: the data loader has a state that cannot be pickled.
        refused: the workers refuse each save, and return as they do with if_failed="warn".
        bucket: trainer.ckpt_path is in an object store.
    """

    number: int
    root: str
    resume: str = "latest"
    last: int = 5
    saves: tuple[int, ...] = ()
    killed_in: str = ""
    stock: bool | str = False
    asynchronous: bool = False
    keep: int = -1
    options: dict[str, Any] = field(default_factory=dict)
    async_save: bool = False
    deaf_loader: bool = False
    broken_loader: bool = False
    refused: bool = False
    bucket: bool = False


class Loader(StatefulDataLoader):  # type: ignore[type-arg]
    deaf = kills = broken = False

    def state_dict(self) -> dict[str, Any]:
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"f": lambda: None} if self.broken else super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.deaf:
            raise ValueError("another data set")
        super().load_state_dict(state_dict)


class Tracker:
    def log(self, data: dict[str, Any], step: int, commit: bool = True) -> None: ...


class FakeAsyncLoader:
    """What FullyAsyncRayPPOTrainer asks its loader when it saves."""

    def __init__(self) -> None:
        self.consumed: list[str] = []

    def get_consumed_uids_list(self) -> list[str]:
        return list(self.consumed)

    def get_filtered_uids_list(self) -> list[str]:
        return self.consumed[:1]


def configuration(life: Life) -> Any:
    config = SkyRLTrainConfig()
    config.trainer.strategy = "megatron"
    config.trainer.ckpt_path = "s3://bucket/run" if life.bucket else life.root
    config.trainer.max_ckpts_to_keep = life.keep
    config.trainer.resume_mode = life.resume if life.resume in ("latest", "none") else "from_path"
    config.trainer.resume_path = None if life.resume in ("latest", "none") else life.resume
    if life.async_save:
        config.trainer.policy.megatron_config.async_dist_ckpt_save = True
    return config


def make_worker(life: Life, config: Any) -> Any:
    class Ours(PolicyWorkerBase):  # type: ignore[misc]
        checkpoint_config = CheckpointConfig(**life.options)

    cls = megatron_worker.MegatronPolicyWorkerBase if life.stock else Ours
    worker: Any = object.__new__(cls)
    worker.cfg, worker._is_lora, worker._local_rank, worker._world_size = config.trainer, False, 0, 1
    worker.init_worker_process_group()
    # The worker makes its model from a HuggingFace folder, by Megatron-Bridge.
    resumes = any(Path(life.root).glob("global_step_*"))
    training = build(LAYOUT, seed=2 if resumes else 1)
    if resumes:
        # It must leave no trace. With torch's Adam, Megatron's own loader needs an optimizer that has a state.
        train(training, 77, 78)
    worker.training = training
    worker.model = type("Wrapper", (), {"actor_module": training.model})()
    worker.optimizer, worker.scheduler = training.optimizer, training.scheduler
    worker.strategy.save_hf_configs = lambda *args: None
    return worker, Ours


def make_trainer(life: Life, config: Any, worker: Any, cls: Any) -> Any:
    """The trainer with what saves and loads read. Its constructor starts servers for inference."""
    of = FullyAsyncRayPPOTrainer if life.asynchronous else RayPPOTrainer
    trainer: Any = object.__new__(of)
    trainer.cfg, trainer.dispatch = config, skyrl_on_cpu.Dispatch(worker)
    trainer.resume_mode = ResumeMode(config.trainer.resume_mode)
    trainer.global_step, trainer.tokenizer, trainer._node_ids = 0, None, None
    trainer.all_timings, trainer.all_metrics, trainer.tracker = {}, {}, Tracker()
    trainer.train_dataloader = Loader(
        range(PROMPTS), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(7)
    )
    trainer.train_dataloader.deaf, trainer.train_dataloader.broken = life.deaf_loader, life.broken_loader
    if life.asynchronous:
        trainer.async_train_dataloader, trainer.epoch = FakeAsyncLoader(), 0
    return checkpointed(trainer, cls) if life.stock in (False, "worker") else trainer


def run(life: Life, report: dict[str, Any]) -> None:
    config = configuration(life)
    worker, cls = make_worker(life, config)
    trainer = make_trainer(life, config, worker, cls)
    hold(life)
    if life.refused:
        worker.strategy.save_checkpoint = lambda *args, **kwargs: None
    step, path, *more = trainer.load_checkpoints()
    report |= {
        "resumed": step,
        "path": path and str(path),
        "more": [sorted(m) if isinstance(m, set) else m for m in more],
    }
    separate_steps(worker.training)
    report["prompts"] = []
    batches = iter(trainer.train_dataloader)
    while step < life.last:
        step += 1
        if life.killed_in == f"step {step}":
            os.kill(os.getpid(), signal.SIGKILL)
        prompts = next(batches).tolist()
        report["prompts"] += prompts
        if life.asynchronous:
            trainer.async_train_dataloader.consumed += [f"uid{prompt}" for prompt in prompts]
        losses = train(worker.training, prompts[0], prompts[0] + 1)[0].losses
        trainer.all_metrics = {"reward/avg_raw_reward": losses[0]}
        trainer.global_step = step
        if life.asynchronous:  # it has logged and forgotten a step's metrics when it saves
            trainer.tracker.log(trainer.all_metrics, step=step)
            trainer.all_metrics = {}
        trainer.train_dataloader.kills = life.killed_in == f"state {step}"
        if step in life.saves:
            report.setdefault("saved", []).append(trainer.save_checkpoints())
    if not life.stock:
        worker.strategy.finalize_pending_saves()  # as SkyRL's driver asks since it has asynchronous saves
    report["digest"] = digest(compared(worker.training))


def hold(life: Life) -> None:
    commit = ours.commit_driver_files

    def killed(role_dir: Path, step: int, *args: Any) -> None:
        if life.killed_in == f"driver {step}":
            os.kill(os.getpid(), signal.SIGKILL)
        commit(role_dir, step, *args)

    ours.commit_driver_files = killed


def separate_steps(training: Training) -> None:
    """Gives each parameter its own step. Megatron's own loader gives all parameters of torch's Adam one tensor."""
    for state in training.optimizer.chained_optimizers[0].optimizer.state.values():
        state["step"] = state["step"].clone()


def compared(training: Training) -> dict[str, Any]:
    """What two trainings must have in common to be the same.

    Megatron's own loader leaves a step in the groups of torch's Adam, which counts in its state.
    """
    return {name: value for name, value in snapshot(training).items() if not re.fullmatch(r".*group\d+\.step", name)}


def live(life: Life, folder: Path) -> None:
    """One life, in this process. Never returns."""
    signal.alarm(ALARM_S)
    report: dict[str, Any] = {"error": None}
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        run(life, report)
    except Exception as error:
        report["error"] = [type(error).__name__, str(error), traceback.format_exc()]
    (folder / f"report_{life.number}.json").write_text(json.dumps(report))
    os._exit(0)


def main() -> None:
    folder = Path(sys.argv[1])
    answers = os.dup(1)
    os.dup2(2, 1)  # what the libraries print
    for line in sys.stdin:
        life = Life(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            os.setpgrp()
            live(life, folder)
        _, status = os.waitpid(pid, 0)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # the processes that Megatron's torch_dist has spawned
        os.write(answers, f"{life.number} {os.waitstatus_to_exitcode(status)}\n".encode())
