"""A trainer as ROLL is one, of real megatron-core models on a CPU: a driver, an actor, and a critic, in one process.

Run as a program it imports torch and megatron once, and forks for each job that comes as a line of JSON on stdin; when
a job has ended, its number and exit status are written to stdout, and what it saw lies in the job's folder.
"""

import hashlib
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "roll_stand_in"))

import torch
import torch.distributed as dist
from roll.pipeline.rlvr import rlvr_pipeline
from roll.utils import checkpoint_manager

from mcore_ckpt.integrations import roll as integration
from mcore_ckpt.integrations.kit import driver
from mcore_ckpt.steps import trainer_lock
from tests.distributed.snapshot import snapshot
from tests.distributed.training import Layout, Training, build, parallel, train
from tests.support.crash_worker import Watch

ROLES = ("actor_train", "critic")
SAVE_STEPS, MAX_STEPS = 2, 5
SEEDS = {"actor_train": 1, "critic": 2, "sft_train": 3}
ALARM_S = 120


@dataclass(frozen=True)
class Job:
    """One life of a trainer.

    Attributes:
        root, out: checkpoint_config.output_dir; where it tells what it saw, and ROLL writes first.
        resume: resume_from_checkpoint.
        kill_at, kill_count: see crash_worker.Watch.
        watched: the step from whose checkpoint on events count, until that of the step but one after.
        stop_after: it ends in order after the checkpoint of this step; -2: before its first step.
        options: more of checkpoint_config; config: more of the pipeline's.
        roles: the clusters that train.
        pipeline: "ours", or "rolls": ROLL's own, with our uploader and our workers.
        disk_full_at: the driver's part of this step's checkpoint cannot be written.
    """

    number: int
    root: str
    out: str
    resume: bool | str = False
    kill_at: str = ""
    kill_count: int = 0
    watched: int = -1
    stop_after: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    roles: tuple[str, ...] = ROLES
    pipeline: str = "ours"
    disk_full_at: int = -1


class Stop(Exception):
    """The trainer has done what it was started for."""


built: list[str] = []  # the roles whose model has been made


def pipeline_config(job: Job, watch: Watch) -> SimpleNamespace:
    """As BaseConfig makes it of the YAML file, `__post_init__` included."""
    checkpoint_config = {"type": "mcore_ckpt", "output_dir": job.root, "timeout_s": 30.0, **job.options}
    if job.resume is True:
        checkpoint_config["async_upload"] = False
    classes = {
        "actor_train": integration.RLVRActorWorker,
        "critic": integration.CriticWorker,
        "sft_train": integration.SFTWorker,
    }
    layout = Layout(1, precision="bf16", num_layers=1, hidden_size=24, global_batch=2)

    def build_model(role: str) -> Training:
        built.append(role)
        # A resumed trainer's own beginning must leave no trace.
        return build(layout, SEEDS[role] + (100 if job.resume else 0))

    def worker(role: str) -> Any:
        config = SimpleNamespace(
            checkpoint_config=checkpoint_config,
            training_args=SimpleNamespace(save_only_model=False, save_hf_model=False, ckpt_format="torch_dist"),
            strategy_args=SimpleNamespace(strategy_name="megatron_train"),
            model_args=SimpleNamespace(model_name_or_path=None),
            build=lambda: build_model(role),
        )
        return classes[role](config, role)

    config: dict[str, Any] = {
        "checkpoint_config": checkpoint_config,
        "resume_from_checkpoint": job.resume,
        "output_dir": f"{job.out}/output",
        "save_steps": SAVE_STEPS,
        "max_steps": MAX_STEPS,
        "max_ckpt_to_keep": 0,
        "clusters": [lambda role=role: worker(role) for role in job.roles],
        "train": lambda pipeline, step: step_of(pipeline, step, job, watch),
    }
    return SimpleNamespace(**config | job.config)


def step_of(pipeline: Any, step: int, job: Job, watch: Watch) -> dict[str, Any]:
    """One step of the pipeline. Which prompts come next is in the driver's state, as with ROLL's schedulers."""
    if job.stop_after in (step - 1, -2):
        raise Stop
    position = pipeline.state.kv.get("scheduler_state", {"prompts": 0})["prompts"] + 1 + random.randrange(3)
    losses = {}
    for cluster in pipeline.checkpoint_clusters:
        done = train(cluster.strategy.training, position, position + 1)
        losses[f"loss/{cluster.cluster_name}"] = done[0].losses[0]
    pipeline.state.kv["scheduler_state"] = {"prompts": position}
    # Training touches no file; a save that goes on beside it does.
    watch.phase = "save" if step in (job.watched, job.watched + 1) else ""
    return losses


def state_of(pipeline: Any) -> dict[str, Any]:
    """Everything that two trainers must have in common to be the same."""
    digest = hashlib.sha256()
    for name, value in tensors_of(pipeline):
        digest.update(name.encode())
        digest.update(value)
    # Times differ from run to run.
    history = [
        {name: value for name, value in metrics.items() if not name.startswith("time/")}
        for metrics in pipeline.state.log_history
    ]
    return {"digest": digest.hexdigest(), "step": pipeline.state.step, "kv": pipeline.state.kv, "history": history}


def tensors_of(pipeline: Any) -> Iterator[tuple[str, bytes]]:
    for cluster in pipeline.checkpoint_clusters:
        for name, value in sorted(snapshot(cluster.strategy.training).items()):
            is_tensor = isinstance(value, torch.Tensor)
            data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if is_tensor else repr(value).encode()
            yield f"{cluster.cluster_name}.{name}", data


def live(job: Job) -> None:
    """One life, in a process of its own. Never returns."""
    signal.alarm(ALARM_S)
    report: dict[str, Any] = {"error": None, "resumed": None}
    watch = Watch(f"save:{job.kill_at}" if job.kill_at else "", job.kill_count)
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        fill_disk(job)
        with parallel(Layout(1)):
            cls = integration.RLVRPipeline if job.pipeline == "ours" else rlvr_pipeline.RLVRPipeline
            pipeline = cls(pipeline_config(job, watch))
            report["loaded_by_roll"] = [
                folder for cluster in pipeline.checkpoint_clusters for folder in cluster.strategy.loaded_by_roll
            ]
            report["resumed"] = pipeline.state.step
            if job.pipeline == "ours":
                # Between its first line and `run` a pipeline of ROLL's makes datasets, which draw.
                random.seed(99)
                torch.manual_seed(99)
            watch.watch_io()
            try:
                pipeline.run()
            except Stop:
                watch.phase = ""
            watch.stop()
            report |= state_of(pipeline)
            for cluster in pipeline.checkpoint_clusters:
                if cluster.strategy._manager is not None:
                    cluster.strategy._manager.close()
    except Exception as error:
        watch.stop()
        report["error"] = [type(error).__name__, str(error), traceback.format_exc()]
    report["built"] = built
    report["swallowed"] = list(map(str, checkpoint_manager.swallowed))
    report["events"] = [name for name in watch.events if name.startswith("save:")]
    Path(job.out, "report.json").write_text(json.dumps(report))
    os._exit(0)


def fill_disk(job: Job) -> None:
    copy = driver.copy_files

    def fails(source: Path, files: Any) -> None:
        if f"checkpoint-{job.disk_full_at}" in source.parts:
            raise OSError(28, "No space left on device", str(source))
        copy(source, files)

    driver.copy_files = fails


def serve() -> None:
    for line in sys.stdin:
        job = Job(**json.loads(line))
        Path(job.out, "output").mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if pid == 0:
            live(job)
        _, status = os.waitpid(pid, 0)
        os.write(1, f"{job.number} {os.waitstatus_to_exitcode(status)}\n".encode())


def encode(job: Job) -> str:
    return json.dumps(asdict(job)) + "\n"


if __name__ == "__main__":
    # Killed while it is written, a lock does not say whose it is, and is taken over when it has been silent for this.
    trainer_lock.TRAINER_LEASE_S, trainer_lock.TRAINER_BEAT_S = 0.4, 0.1
    # Nothing here dies but by SIGKILL, which takes nothing that the kernel has been given.
    os.fsync = lambda descriptor: None
    serve()
