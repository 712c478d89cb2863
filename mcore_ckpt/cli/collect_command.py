"""`mcore-ckpt collect`: makes an ordinary checkpoint from the fast tier's folders of several nodes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.amounts import moved_text
from mcore_ckpt.cli.arguments import add_force, add_json, check_can_be_folder, expanded_path, step_number, taken
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import result_console

if TYPE_CHECKING:
    from mcore_ckpt.tools.maintain.collect import CollectReport, FoundStep

HELP = "put the folders of the fast tier's nodes together"
DESCRIPTION = """\
Puts the folders of several nodes of the fast tier together into an ordinary checkpoint. Copy or mount the folders to
this machine first. All roles of the newest step that is whole are taken, and every CRC is checked; if a file is damaged
on one node, it is taken from another node. The result appears once it is complete. If no step is whole, the exit status
is 1, and the command lists the missing files and the nodes that had them."""

EXAMPLES = (
    "collect node0 node1 node2 checkpoints # node0 is a copy of /dev/shm/run of a node",
    "collect /mnt/node*/run checkpoints --step 100 --json",
)

# Longer lists are cut, because nobody reads more lines.
_MOST_LINES = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", type=expanded_path, nargs="+", metavar="NODEFOLDER", help="folder of the fast tier from one node"
    )
    parser.add_argument("root", type=expanded_path, metavar="DST", help="folder of steps to write to")
    parser.add_argument(
        "--step", type=step_number, metavar="N", help="step to collect (the newest whole one if not given)"
    )
    add_force(parser, "the step in DST")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Collects a step. Returns 0 when the step is in place, and 1 if no step is whole."""
    from mcore_ckpt.tools.maintain.collect import choose, collect, find_steps

    check_can_be_folder("DST", args.root)
    steps = find_steps([taken(folder, "collect") for folder in args.folders], args.step, args.root)
    chosen = choose(steps)
    lacking = list(takewhile(lambda step: step is not chosen, steps))
    if not args.json:
        _show_lacking(lacking)
    report = None
    if chosen is not None:
        with progress_of_bytes(args.json) as bar:
            report = collect(chosen, args.root, progress_in(bar, f"step {chosen.step}"), args.force)
    if args.json:
        print(json.dumps(as_json(report, lacking)))
    elif report is not None:
        _show(report)
    return 1 if report is None else 0


def _show_lacking(steps: Sequence[FoundStep]) -> None:
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for step in steps:
        console.print(f"step {step.step} is not whole:", style="red")
        lines = [*step.problems]
        for lacks in step.missing:
            lines.append(f"{lacks.role}: {len(lacks.files)} files that were on {', '.join(lacks.nodes)}:")
            lines += [f"  {path}" for path in lacks.files]
        for line in lines[:_MOST_LINES]:
            console.print(f"  {line}")
        if len(lines) > _MOST_LINES:
            console.print(f"  and {len(lines) - _MOST_LINES} more lines: see --json")


def _show(report: CollectReport) -> None:
    console = result_console()
    for role in report.roles:
        console.print(f"{role.path}: {role.files} files")
        for reason in role.damaged:
            console.print(f"  a file was taken from another node: {reason}")
    console.print(moved_text(report.nbytes, report.seconds))


def as_json(report: CollectReport | None, lacking: Sequence[FoundStep]) -> dict[str, Any]:
    """Returns the result as JSON values. `lacking` has newer steps, which are not whole."""
    return {
        "step": None if report is None else report.step,
        "seconds": None if report is None else report.seconds,
        "bytes": 0 if report is None else report.nbytes,
        "roles": [
            {
                "role": role.role,
                "path": str(role.path),
                "files": role.files,
                "bytes": role.nbytes,
                "damaged": list(role.damaged),
            }
            for role in (() if report is None else report.roles)
        ],
        "not_whole": [
            {
                "step": step.step,
                "problems": list(step.problems),
                "missing": [
                    {"role": lacks.role, "nodes": list(lacks.nodes), "files": list(lacks.files)}
                    for lacks in step.missing
                ],
            }
            for step in lacking
        ],
    }
