"""Parses the arguments of `mcore-ckpt demo` and runs the demo."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from mcore_ckpt.cli.arguments import add_json, expanded_path
from mcore_ckpt.cli.demo.report import LiveReport, show_outcome, show_plan
from mcore_ckpt.cli.demo.runner import (
    SAVE_EVERY,
    Outcome,
    Plan,
    Report,
    perform,
    prepare_directory,
    removed_if_interrupted,
)
from mcore_ckpt.cli.results import result_console, show_result
from mcore_ckpt.cli.signals import cleaning_up_at_sigterm
from mcore_ckpt.errors import InvalidArgumentError

HELP = "kill a training and watch it resume"
DESCRIPTION = """\
Trains a small Qwen-like decoder with Megatron-core on four ranks (tensor parallel 2 x pipeline parallel 2), kills
all of them in the middle, resumes from the newest checkpoint, and compares every loss with an uninterrupted run.
Then transformers loads the HuggingFace model that the last save exported, and generates some text. The demo needs no
GPU and no download, and takes about two minutes on two cores."""

EXAMPLES = (
    "demo # two minutes on two cores; nothing is downloaded",
    "demo --dir /tmp/demo --steps 10 --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir", type=expanded_path, default=Path("demo_checkpoints"), help="folder to write to (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps to train (%(default)s)")
    parser.add_argument(
        "--kill-after", type=int, metavar="K", help="kill all ranks after step K, which must be between two saves"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the demo. Returns 0 if all losses are bit for bit as expected, and the exported model has the same loss."""
    plan = make_plan(args.dir, args.steps, args.kill_after)
    with cleaning_up_at_sigterm(), removed_if_interrupted(plan.directory):
        prepare_directory(plan.directory)
        console = result_console(markup=True)
        if args.json:
            outcome = perform(plan, Report())
        else:
            show_plan(console, plan)
            with LiveReport(console, plan) as report:
                outcome = perform(plan, report)
    show_result(outcome, as_json, partial(show_outcome, console), args.json)
    return 0 if outcome.identical and outcome.is_exported else 1


def make_plan(directory: Path, steps: int, kill_after: int | None) -> Plan:
    """Returns a plan with a kill strictly between two saves, so that some steps are lost and trained again."""
    if steps < SAVE_EVERY + 2:
        raise InvalidArgumentError(
            f"--steps {steps} is too few: with a save every {SAVE_EVERY} steps, use {SAVE_EVERY + 2} or more"
        )
    if kill_after is None:
        last_save_before = max(SAVE_EVERY, steps * 2 // 3 // SAVE_EVERY * SAVE_EVERY)
        kill_after = min(last_save_before + 2, steps - 1)
    if not SAVE_EVERY < kill_after < steps or kill_after % SAVE_EVERY == 0:
        raise InvalidArgumentError(
            f"--kill-after {kill_after} is not strictly between two saves: use a step above {SAVE_EVERY} and below "
            f"{steps} that is not a multiple of {SAVE_EVERY}"
        )
    return Plan(directory, steps, kill_after)


def as_json(outcome: Outcome) -> dict[str, object]:
    """Returns the outcome as JSON values. The losses are not rounded."""
    return {
        "identical": outcome.identical,
        "steps": outcome.plan.steps,
        "killed_after": max(outcome.killed.losses),
        "resumed_from": outcome.resumed.resumed_from,
        "losses": {
            "uninterrupted": outcome.uninterrupted.losses,
            "killed": outcome.killed.losses,
            "resumed": outcome.resumed.losses,
        },
        "held_out_loss": {"megatron": outcome.resumed.held_out_loss, "transformers": outcome.generated.loss},
        "text": outcome.generated.text,
        "checkpoint": str(outcome.checkpoint),
        "bytes": outcome.checkpoint_bytes,
    }
