"""Starts the demo's three trainings, kills one of them, and compares their reports.

The ranks write one JSON line for each event (`training.Progress`): their process ids, each finished step with its loss,
each save. The parent follows these lines, so that it can kill the ranks after a certain step and not after a certain
time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.checkpoint import HUGGINGFACE_DIR, TRACKER_FILE, parse_tracker, step_dir
from mcore_ckpt.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.cli.demo.huggingface import Generated

RANKS = 4  # equals training.RANKS, which is not imported because the import would load Megatron into the parent
SAVE_EVERY = 4
POLL_SECONDS = 0.005
LOSS_TOLERANCE = 1e-4
# If no rank reports anything for this many seconds, the demo treats the training as hung. On a loaded machine, ranks
# need up to a minute to start.
STALLED_SECONDS = 300.0
LOG_LINES_SHOWN = 25

MARKER = "demo.json"
CHECKPOINTS = "checkpoints"
LOGS = "logs"


class DemoError(CheckpointError):
    """A training failed, or did not report what the demo needs."""


@dataclass(frozen=True)
class Plan:
    """How many steps to train, the step after which the training is killed, and the demo's folder."""

    directory: Path
    steps: int
    kill_after: int

    @property
    def checkpoints(self) -> Path:
        return self.directory / CHECKPOINTS

    @property
    def logs(self) -> Path:
        return self.directory / LOGS


@dataclass
class Training:
    """The events that one training reported."""

    name: str
    losses: dict[int, float] = field(default_factory=dict)
    resumed_from: int | None = None
    held_out_loss: float | None = None
    processes: dict[int, int] = field(default_factory=dict)

    def record(self, event: dict[str, Any]) -> None:
        """Records the event in one line of `training.Progress`."""
        if "pid" in event:
            self.processes[event["rank"]] = event["pid"]
        elif "loss" in event:
            self.losses[event["step"]] = event["loss"]
        elif "held_out_loss" in event:
            self.held_out_loss = event["held_out_loss"]
        elif "resumed_from" in event:
            self.resumed_from = event["resumed_from"]


@dataclass(frozen=True)
class Outcome:
    """The results of the three trainings and of the exported model."""

    plan: Plan
    uninterrupted: Training
    killed: Training
    resumed: Training
    generated: Generated

    @property
    def is_exported(self) -> bool:
        """True if transformers computes the same loss as Megatron, except for rounding of sums in fp32."""
        expected = self.resumed.held_out_loss
        return expected is not None and abs(self.generated.loss - expected) <= LOSS_TOLERANCE

    @property
    def identical(self) -> bool:
        """True if every loss has the same bits as in the uninterrupted run, even in steps that were trained twice."""
        expected = self.uninterrupted.losses
        interrupted = [*self.killed.losses.items(), *self.resumed.losses.items()]
        complete = {step for step, _ in interrupted} == set(expected) == set(range(1, self.plan.steps + 1))
        return complete and all(loss.hex() == expected[step].hex() for step, loss in interrupted)

    @property
    def checkpoint(self) -> Path:
        return newest_checkpoint(self.plan)

    @property
    def checkpoint_bytes(self) -> int:
        return folder_bytes(self.checkpoint)


class Report:
    """Receives the progress of the trainings. This class shows nothing, so `--json` uses it."""

    def update(self, training: Training) -> None:
        """Called when a training has reported something."""

    def ended(self, training: Training) -> None:
        """Called when a training has ended or was killed."""

    def exporting(self) -> None:
        """Called before transformers loads the exported model."""


def prepare_directory(directory: Path) -> None:
    """Makes the folder, and deletes the files of an earlier demo in it.

    Raises InvalidArgumentError: the folder cannot be used, for example because it has other files. These files stay.
    """
    if directory.exists() and not directory.is_dir():
        raise InvalidArgumentError(f"{directory} is not a folder: name another folder with --dir")
    if directory.exists() and any(directory.iterdir()):
        if not is_demo(directory):
            raise InvalidArgumentError(
                f"{directory} is not empty and was not made by the demo, so it is left as it is: "
                "name another folder with --dir"
            )
        for folder in (directory / CHECKPOINTS, directory / LOGS):
            if folder.exists():
                shutil.rmtree(folder)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Write the marker first. If a demo is killed right after this write, the next demo must still accept the
        # folder.
        (directory / MARKER).write_text(json.dumps({"made_by": "mcore-ckpt demo"}) + "\n")
        (directory / LOGS).mkdir()
    except OSError as error:
        raise InvalidArgumentError(f"cannot write to {directory}: {error}") from error


@contextmanager
def removed_if_interrupted(directory: Path) -> Iterator[None]:
    """Removes the files of a demo, and the folders made for it, if Ctrl-C or SIGTERM ends the block."""
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if is_demo(directory):
            for folder in (directory / CHECKPOINTS, directory / LOGS):
                shutil.rmtree(folder, ignore_errors=True)
            (directory / MARKER).unlink()
        for folder in made:
            with suppress(OSError):  # the folder may have other files by now
                folder.rmdir()
        raise


def is_demo(directory: Path) -> bool:
    """True if an earlier demo made this folder."""
    try:
        marker = json.loads((directory / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("made_by") == "mcore-ckpt demo"


def perform(plan: Plan, report: Report) -> Outcome:
    """Runs the three trainings, one after the other because they share the machine, and then the exported model."""
    # `--help` must not wait for the import of torch, which takes a second.
    from mcore_ckpt.cli.demo.huggingface import load_and_generate

    uninterrupted = train(plan, "uninterrupted", report)
    killed = train(plan, "killed", report, checkpoints=plan.checkpoints, kill_after=plan.kill_after)
    resumed = train(plan, "resumed", report, checkpoints=plan.checkpoints)
    if resumed.resumed_from is None:
        raise DemoError(f"the resumed training found no checkpoint in {plan.checkpoints}; its log is in {plan.logs}")
    report.exporting()
    folder = newest_checkpoint(plan) / "actor" / HUGGINGFACE_DIR
    try:
        generated = load_and_generate(folder)
    except (OSError, ValueError) as error:
        raise DemoError(f"transformers cannot use {folder}: {error}") from error
    return Outcome(plan, uninterrupted, killed, resumed, generated)


def newest_checkpoint(plan: Plan) -> Path:
    """Returns the folder of the step that the tracker names. Raises DemoError if the tracker names no step."""
    step = parse_tracker((plan.checkpoints / TRACKER_FILE).read_text())
    if step is None:
        raise DemoError(f"{plan.checkpoints / TRACKER_FILE} does not name a step")
    return step_dir(plan.checkpoints, step)


def train(
    plan: Plan, name: str, report: Report, *, checkpoints: Path | None = None, kill_after: int | None = None
) -> Training:
    """Runs one training under torchrun to its end, or kills it once it has reported step `kill_after`."""
    training = Training(name)
    events, log = plan.logs / f"{name}.jsonl", plan.logs / f"{name}.log"
    events.touch()
    with open(log, "wb") as output:
        launcher = subprocess.Popen(
            torchrun_command(plan.steps, events, checkpoints),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            # Ctrl-C must reach only the demo, which then stops the ranks itself.
            start_new_session=True,
        )
    try:
        report.update(training)
        for event in follow(events, launcher, log):
            training.record(event)
            report.update(training)
            if "loss" in event and event["step"] == kill_after:
                kill(training)
                report.ended(training)
                return training
    finally:
        stop(launcher, training)
    if launcher.returncode != 0:
        raise DemoError(f"the {name} training failed with status {launcher.returncode}:\n{excerpt(log)}")
    if kill_after is not None:
        raise DemoError(
            f"the {name} training ended before step {kill_after}, so it could not be killed after that step"
        )
    report.ended(training)
    return training


def torchrun_command(steps: int, events: Path, checkpoints: Path | None) -> list[str]:
    """Returns the command line that starts the ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", "mcore_ckpt.cli.demo.training", "--steps", str(steps), "--save-every", str(SAVE_EVERY)]
    command += ["--progress", str(events)]
    return command + (["--checkpoints", str(checkpoints)] if checkpoints else [])


def environment() -> dict[str, str]:
    """Returns the environment of the ranks. Each rank has one thread, and GPUs sum in a fixed order."""
    import torch

    settings = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    if torch.cuda.device_count() < RANKS:
        # There are fewer GPUs than ranks: hide the GPUs, because Megatron would keep a part of its state on them.
        settings["CUDA_VISIBLE_DEVICES"] = ""
    return {**os.environ, **settings}


def follow(events: Path, launcher: subprocess.Popen[bytes], log: Path) -> Iterator[dict[str, Any]]:
    """Yields the events as they are written, until the launcher has ended."""
    heard = time.monotonic()
    rest = ""
    with open(events) as stream:
        while True:
            # Poll before reading. Otherwise lines that are written between the read and the poll would be lost.
            ended = launcher.poll() is not None
            *lines, rest = (rest + stream.read()).split("\n")
            for line in lines:
                heard = time.monotonic()
                yield json.loads(line)
            if ended:
                return
            if time.monotonic() - heard > STALLED_SECONDS:
                raise DemoError(f"no rank reported anything for {STALLED_SECONDS:.0f} seconds:\n{excerpt(log)}")
            time.sleep(POLL_SECONDS)


def kill(training: Training) -> None:
    """Sends SIGKILL to all ranks. As in a machine's failure, no rank can clean up."""
    for process in training.processes.values():
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


def stop(launcher: subprocess.Popen[bytes], training: Training) -> None:
    """Stops the processes of a training that are still running."""
    if launcher.poll() is not None:
        return
    launcher.terminate()
    try:
        launcher.wait(timeout=30)
    except subprocess.TimeoutExpired:
        kill(training)
        launcher.kill()
        launcher.wait()


def excerpt(log: Path) -> str:
    """Returns the part of a log that shows the error: one rank's traceback, without the launcher's own lines."""
    lines = log.read_text(errors="replace").splitlines()
    prefixes = [match[1] for line in lines if (match := re.match(r"(\[rank\d+\]: )Traceback", line))]
    if prefixes:
        # After one rank fails, the other ranks fail because a peer is gone. So show only the lines of the rank that
        # failed first.
        lines = [line.removeprefix(prefixes[0]) for line in lines if line.startswith(prefixes[0])]
    else:
        launcher = [number for number, line in enumerate(lines) if "torch/distributed/elastic/" in line]
        lines = lines[: launcher[0]] if launcher and launcher[0] > 0 else lines
        # Before torch.distributed is set up, lines do not name their rank. All ranks write the same traceback, so show
        # only the last traceback.
        tracebacks = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
        lines = lines[tracebacks[-1] :] if tracebacks else lines
    return "\n".join([*lines[-LOG_LINES_SHOWN:], f"(the whole log: {log})"])


def folder_bytes(folder: Path) -> int:
    """Returns the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
