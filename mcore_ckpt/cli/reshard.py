"""`mcore-ckpt reshard`: rewrites a checkpoint for another parallel layout, without GPUs and without the model."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mcore_ckpt.amounts import moved_text
from mcore_ckpt.cli import arguments
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import result_console, show_result

if TYPE_CHECKING:
    from mcore_ckpt.tools.convert.reshard.reshard import ReshardReport

HELP = "rewrite a checkpoint for another parallel layout"
DESCRIPTION = """\
Rewrites a committed checkpoint for another parallel layout, on one machine, without GPUs and without the model. Sizes
that are not given stay as saved if possible. If the other sizes do not divide the saved number of ranks, the smallest
number that they divide is taken. If --etp and --tp were equal in the checkpoint, they stay equal. The result appears
once it is complete."""

EXAMPLES = (
    "reshard checkpoints resharded --tp 4 --pp 2",
    "reshard checkpoints/global_steps_100 resharded --tp 2 --ep 4 --dp 8 --json",
    'reshard checkpoints resharded --pp 2 --pipeline-layout "Et|tL"',
)

# Each option and its help text. The options are named after the fields of WantedLayout.
_SIZES = {
    **arguments.SIZES,
    "vpp": f"{arguments.SIZES['vpp']}; 1 for no virtual pipelining",
    "world": "number of all ranks, instead of --dp",
    "vocab-size": "number of tokens in the vocabulary, without padding",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=arguments.expanded_path, metavar="SRC", help="folder of a role, of a step, or of the steps"
    )
    parser.add_argument(
        "root",
        type=arguments.expanded_path,
        metavar="DST",
        help="folder of steps to write to; must not be the folder of steps that has SRC",
    )
    arguments.add_step(parser)
    for name, what in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=what)
    text = "pad the vocabulary to a multiple of N times tp (if not given, N is 128 with --vocab-size, otherwise 1)"
    parser.add_argument("--make-vocab-size-divisible-by", type=int, metavar="N", dest="vocab_divisor", help=text)
    arguments.add_stage_options(parser)
    arguments.add_force(parser, "a checkpoint of the step in DST")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Rewrites a checkpoint. Returns 0 when the new checkpoint is in place."""
    from mcore_ckpt.tools.convert.reshard.reshard import reshard
    from mcore_ckpt.tools.convert.reshard.target import WantedLayout
    from mcore_ckpt.tools.examine.select import select

    fields = (*(name.replace("-", "_") for name in _SIZES), "vocab_divisor")
    wanted = WantedLayout(**{field: getattr(args, field) for field in fields}, **arguments.stage_options(args))
    arguments.check_can_be_folder("DST", args.root)
    selection = select(arguments.taken(args.source, "reshard"), args.step)
    with progress_of_bytes(args.json) as bar:
        progress = progress_in(bar, f"step {selection.step}")
        report = reshard(selection, args.root, wanted, progress, args.force)
    show_result(report, as_json, _show, args.json)
    return 0


def _show(report: ReshardReport) -> None:
    console = result_console()
    for role in report.roles:
        console.print(f"{role.path}: {role.saved} -> {role.written}")
        if role.reseeded:
            console.print("  the random number generators start anew from the saved seed")
    if report.beside:
        console.print(f"  copied unchanged, next to the roles: {', '.join(report.beside)}")
    console.print(moved_text(report.nbytes, report.seconds))


def as_json(report: ReshardReport) -> dict[str, Any]:
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
