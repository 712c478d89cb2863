"""`mcore-ckpt verify`: checks that checkpoints on disk are still exactly what was written."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.amounts import moved_text
from mcore_ckpt.cli.arguments import add_json, expanded_path, step_number, taken
from mcore_ckpt.cli.list_command import node_files_as_json
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import result_console, show_result

if TYPE_CHECKING:
    from mcore_ckpt.tools.examine.verify import Report, VerifiedRole

HELP = "find what is damaged in checkpoints"
DESCRIPTION = """\
Reads all bytes of checkpoints and shows what is damaged: file, rank, tensor and bytes. In a folder of steps it verifies
all steps and the tracker. It may run while a trainer saves: a step that is being saved is not a problem. The exit
status is 0 if everything is intact, 1 if not, and 2 if there is no such folder."""

EXAMPLES = (
    "verify checkpoints # all steps",
    "verify checkpoints/global_steps_100/actor --deep",
    "verify checkpoints --step 100 --json",
)

# Longer lists are cut, because a broken disk has thousands of bad blocks, and nobody reads that many lines.
_MOST_LINES = 50
_MOST_PATHS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=expanded_path, metavar="PATH", help="folder of a role, of a step, or of the steps")
    parser.add_argument("--step", type=step_number, metavar="N", help="verify only this step of a folder of steps")
    parser.add_argument("--deep", action="store_true", help="also open every file with torch, and compare the tensors")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Verifies checkpoints. Returns 0 if everything is intact, otherwise 1."""
    from mcore_ckpt.tools.examine.verify import verify

    path = taken(args.path, "verify")
    with progress_of_bytes(args.json) as bar:
        report = verify(path, args.step, args.deep, progress_in(bar, "verify"))
    show_result(report, as_json, _show, args.json)
    return 0 if report.is_sound else 1


def _show(report: Report) -> None:
    console = result_console()
    for verdict in report.roles:
        _show_verdict(console, verdict)
    for problem in report.problems:
        console.print(problem, style="red")
    for reason in report.under_way:
        console.print(f"{reason}. This is no damage: a trainer of this step is alive and may still be saving it")
    nbytes = sum(verdict.nbytes for verdict in report.roles)
    console.print(moved_text(nbytes, report.seconds))


def _show_verdict(console: Console, verdict: VerifiedRole) -> None:
    if not verdict.damages:
        console.print(f"{verdict.path}: sound, {verdict.files} files")
        _show_elsewhere(console, verdict)
        return
    state = "cannot be read" if all(damage.unreadable for damage in verdict.damages) else "damaged"
    console.print(f"{verdict.path}: {state}", style="red")
    for damage in verdict.damages[:_MOST_LINES]:
        by = "" if damage.rank is None else f" (written by rank {damage.rank})"
        console.print(f"  {damage.problem}{by}", style="red")
    if len(verdict.damages) > _MOST_LINES:
        console.print(f"  and {len(verdict.damages) - _MOST_LINES} more: see --json", style="red")


def _show_elsewhere(console: Console, verdict: VerifiedRole) -> None:
    if verdict.of_nodes is None or verdict.of_nodes.is_whole:
        return
    console.print(
        f"  this folder has only {verdict.of_nodes}; the other files are on other nodes, and are not verified:"
    )
    for names, files in verdict.of_nodes.by_nodes():
        shown = ", ".join(file.path for file in files[:_MOST_PATHS])
        more = f" and {len(files) - _MOST_PATHS} more" if len(files) > _MOST_PATHS else ""
        console.print(f"  on {', '.join(names)}: {shown}{more}")


def as_json(report: Report) -> dict[str, Any]:
    return {
        "sound": report.is_sound,
        "seconds": report.seconds,
        "bytes": sum(verdict.nbytes for verdict in report.roles),
        "problems": list(report.problems),
        "under_way": list(report.under_way),
        "roles": [
            {
                "path": str(verdict.path),
                "files": verdict.files,
                "bytes": verdict.nbytes,
                "nodes": None if verdict.of_nodes is None else node_files_as_json(verdict.of_nodes),
                "damages": [asdict(damage) for damage in verdict.damages],
            }
            for verdict in report.roles
        ],
    }
