"""`mcore-ckpt branch`: makes a fork, which is a new run in a new folder that begins with a copy of one step."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mcore_ckpt.amounts import moved_text
from mcore_ckpt.cli.arguments import add_json, check_can_be_folder, expanded_path, step_number, taken
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import result_console, show_result

if TYPE_CHECKING:
    from mcore_ckpt.tools.maintain.branch import BranchReport

HELP = "begin a new run with a step of another run"
DESCRIPTION = """\
Makes a fork: a new run in a new folder of steps, which begins with a copy of one complete step. A training with
NEWROOT goes on from the step, and its saves and deletions do not change ROOT. On one file system, both folders share
the files as hard links, or as blocks, so that no bytes are copied. NEWROOT must not have steps or a run: nothing is
replaced. The step appears once it is complete."""

EXAMPLES = (
    "branch checkpoints 100 other_rewards",
    "branch checkpoints 100 other_rewards --test # first reads and checks all bytes",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", type=expanded_path, metavar="ROOT", help="folder of steps")
    parser.add_argument("step", type=step_number, metavar="STEP", help="step to begin with")
    parser.add_argument("new_root", type=expanded_path, metavar="NEWROOT", help="new folder of steps")
    parser.add_argument("--test", action="store_true", help="first check the CRCs of all files, not only their sizes")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Begins the new folder. Returns 0 when the step is in place."""
    from mcore_ckpt.tools.maintain.branch import branch

    check_can_be_folder("NEWROOT", args.new_root)
    root = taken(args.root, "branch")
    with progress_of_bytes(args.json) as bar:
        progress = progress_in(bar, f"step {args.step}")
        report = branch(root, args.step, args.new_root, test=args.test, progress=progress)
    show_result(report, as_json, _show, args.json)
    return 0


def _show(report: BranchReport) -> None:
    console = result_console()
    for role in report.roles:
        console.print(f"{role.path}: {role.files} files, {role.linked} of them shared with {role.source}")
    if report.beside:
        console.print(f"  copied, because other programs may change them: {', '.join(report.beside)}")
    parent = report.run.parent
    assert parent is not None, "a fork has a parent"
    console.print(f"run {report.run.id}, which begins with step {parent.step} of run {parent.run or 'unknown'}")
    console.print(moved_text(report.nbytes, report.seconds))


def as_json(report: BranchReport) -> dict[str, Any]:
    """Returns the report as JSON values."""
    parent = report.run.parent
    return {
        "step": report.step,
        "run": report.run.id,
        "parent": parent and vars(parent),
        "seconds": report.seconds,
        "bytes": report.nbytes,
        "beside": list(report.beside),
        "roles": [
            {
                "role": role.role,
                "source": str(role.source),
                "path": str(role.path),
                "files": role.files,
                "linked": role.linked,
                "bytes": role.nbytes,
            }
            for role in report.roles
        ],
    }
