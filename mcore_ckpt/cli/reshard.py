"""`mcore-ckpt reshard`: rewrites a checkpoint for another parallel layout, without GPUs and without the model."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mcore_ckpt.amounts import moved_text
from mcore_ckpt.cli.arguments import (
    add_force,
    add_json,
    add_stage_options,
    check_can_be_folder,
    expanded_path,
    stage_options,
    step_number,
    taken,
)
from mcore_ckpt.cli.progress import progress_of_bytes
from mcore_ckpt.cli.tables import result_console

if TYPE_CHECKING:
    from mcore_ckpt.tools.convert.reshard.reshard import ReshardReport

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Rewrites a committed checkpoint for another parallel layout, on one machine, without GPUs and without the model.
Sizes that are not given stay as saved if possible. If the other sizes do not divide the number of ranks, it becomes the
smallest number that they divide. If --etp and --tp were equal, they stay equal. The result appears once it is
complete."""

EXAMPLES = (
    "reshard checkpoints resharded --tp 4 --pp 2",
    "reshard checkpoints/global_steps_100 resharded --tp 2 --ep 4 --dp 8 --json",
    'reshard checkpoints resharded --pp 2 --pipeline-layout "Et|tL"',
)

# Each option and its help text. The options are named after the fields of WantedLayout.
_SIZES = (
    ("tp", "tensor-parallel size"),
    ("pp", "pipeline-parallel size"),
    ("vpp", "virtual stages per pipeline rank; 1 for no virtual pipelining"),
    ("cp", "context-parallel size"),
    ("dp", "data-parallel size"),
    ("ep", "expert-parallel size"),
    ("etp", "tensor-parallel size of experts"),
    ("world", "number of all ranks; it can be given instead of --dp"),
    ("vocab-size", "number of tokens in the vocabulary, without padding"),
)


def add_to(subparsers: Subparsers) -> None:
    """Adds the parser of `reshard`."""
    parser = subparsers.add_parser(
        "reshard", help="rewrite a checkpoint for another parallel layout", description=DESCRIPTION
    )
    parser.add_argument(
        "source", type=expanded_path, metavar="SRC", help="folder of a role, of a step, or of the steps"
    )
    parser.add_argument(
        "root", type=expanded_path, metavar="DST", help="folder of steps to write to; not the folder that SRC is in"
    )
    parser.add_argument(
        "--step", type=step_number, metavar="N", help="step in a folder of steps (the newest complete one if not given)"
    )
    for name, what in _SIZES:
        parser.add_argument(f"--{name}", type=int, metavar="N", help=what)
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        metavar="N",
        dest="vocab_divisor",
        help="pad the vocabulary to a multiple of N times tp (if not given, N is 128 with --vocab-size, otherwise 1)",
    )
    add_stage_options(parser)
    add_force(parser, "a checkpoint of the step in DST")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Rewrites a checkpoint. Returns 0 when the new one is in place."""
    # `--help` must not wait for the import of torch, which takes a second.
    from mcore_ckpt.tools.convert.reshard.reshard import reshard
    from mcore_ckpt.tools.convert.reshard.target import WantedLayout
    from mcore_ckpt.tools.examine.select import select

    fields = (*(name.replace("-", "_") for name, _ in _SIZES), "vocab_divisor")
    wanted = WantedLayout(**{field: getattr(args, field) for field in fields}, **stage_options(args))
    check_can_be_folder("DST", args.root)
    selection = select(taken(args.source, "reshard"), args.step)
    with progress_of_bytes(args.json) as bar:
        task = bar.add_task(f"step {selection.step}", total=None)
        report = reshard(
            selection, args.root, wanted, lambda done, total: bar.update(task, completed=done, total=total), args.force
        )
    if args.json:
        print(json.dumps(as_json(report)))
    else:
        _show(report)
    return 0


def _show(report: ReshardReport) -> None:
    console = result_console()
    for role in report.roles:
        console.print(f"{role.path}: {role.saved} -> {role.written}", markup=False)
        if role.reseeded:
            console.print("  the random number generators start anew from the saved seed", markup=False)
    if report.beside:
        console.print(f"  copied as it is, beside the roles: {', '.join(report.beside)}", markup=False)
    console.print(moved_text(report.nbytes, report.seconds), markup=False)


def as_json(report: ReshardReport) -> dict[str, Any]:
    """Returns the report as JSON values."""
    return {
        "step": report.step,
        "seconds": report.seconds,
        "bytes": report.nbytes,
        "beside": list(report.beside),
        "roles": [
            {
                "role": role.role,
                "source": str(role.source),
                "path": str(role.path),
                "saved": asdict(role.saved),
                "written": asdict(role.written),
                "bytes": role.nbytes,
                "files": role.files,
                "rng_reseeded": role.reseeded,
            }
            for role in report.roles
        ],
    }
