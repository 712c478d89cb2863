"""`mcore-ckpt prune`: deletes old steps and the leftovers of crashes, as a trainer does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.amounts import size_text
from mcore_ckpt.cli.arguments import add_json, at_least, expanded_path, seconds_in, step_number, taken
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import result_console
from mcore_ckpt.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.tools.maintain.prune import PrunedFolder

HELP = "delete old steps and the leftovers of crashes"
DESCRIPTION = """\
Deletes the old steps that a trainer with the same options would delete, and the leftovers of processes that died. A
step stays if one of the options keeps it. Without --max-to-keep every step stays. These always stay: pinned steps, the
newest complete step, steps that a process is writing or reading, and folders of unknown content. The command can run
while trainers run. The exit status is 1 if something cannot be deleted that should be."""

EXAMPLES = (
    "prune checkpoints --max-to-keep 2 --keep-every 1000 --dry-run # what would go",
    "prune checkpoints --max-to-keep 2 --keep-best reward:3:max --optimizer-for-last 2 --dry-run",
    "prune checkpoints # only what crashes have left",
    "prune checkpoints --pin 100",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", type=expanded_path, metavar="ROOT", help="folder of steps")
    parser.add_argument(
        "--max-to-keep", type=at_least(1), metavar="N", help="keep the N newest complete steps of each role"
    )
    parser.add_argument("--keep-every", type=at_least(1), metavar="N", help="also keep steps that are multiples of N")
    text = (
        "also keep the N complete steps with the largest value of a metric, or with the smallest value if :min is given"
    )
    parser.add_argument("--keep-best", metavar="METRIC:N:max", action="append", default=[], help=text)
    text = "also keep steps that are younger than this, such as 45min, 12h or 2d"
    parser.add_argument("--keep-for", type=seconds_in, metavar="TIME", help=text)
    text = "remove the optimizer from all steps except pinned ones and the N newest complete steps of each role"
    parser.add_argument("--optimizer-for-last", type=at_least(1), metavar="N", help=text)
    parser.add_argument("--role", help="delete only steps that have this role (with all roles that the steps have)")
    text = "never delete this step from now on"
    parser.add_argument("--pin", type=step_number, metavar="STEP", action="append", default=[], help=text)
    parser.add_argument("--unpin", type=step_number, metavar="STEP", action="append", default=[], help="undo --pin")
    parser.add_argument("--dry-run", action="store_true", help="show what would be deleted, but delete nothing")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Deletes steps, or shows what would be deleted. Returns 1 if a step cannot be deleted, otherwise 0."""
    from mcore_ckpt import pin, unpin
    from mcore_ckpt.steps import PreservationPolicy
    from mcore_ckpt.tools.maintain.prune import prune

    for flag in ("--keep-every", "--keep-best", "--keep-for"):
        if getattr(args, flag[2:].replace("-", "_")) not in (None, []) and args.max_to_keep is None:
            raise InvalidArgumentError(f"{flag} is given, but without --max-to-keep every step stays: give both")
    policy = PreservationPolicy(
        args.max_to_keep,
        args.keep_every,
        args.keep_best,
        args.keep_for,
        args.optimizer_for_last,
    )
    if args.dry_run and (args.pin or args.unpin):
        raise InvalidArgumentError("--dry-run changes nothing, so it cannot be combined with --pin or --unpin")
    args.root = taken(args.root, "prune")
    try:
        for step in args.pin:
            pin(args.root, step)
        for step in args.unpin:
            unpin(args.root, step)
        with progress_of_bytes(args.json or args.dry_run) as bar:
            folders = prune(
                args.root,
                policy,
                role=args.role,
                dry_run=args.dry_run,
                progress=progress_in(bar, "prune"),
            )
    except OSError as error:
        raise CheckpointError(f"{args.root}: {error}") from error
    if args.json:
        print(json.dumps(_as_json(folders, args.dry_run)))
    else:
        _show(folders, args.root, args.dry_run)
    return 1 if any(folder.failed for folder in folders) else 0


def _show(folders: Sequence[PrunedFolder], root: Path, dry_run: bool) -> None:
    console = result_console()
    for folder in folders:
        word = "keep  " if folder.stays else "delete"
        line = f"{word}  {size_text(folder.nbytes):>10}  {folder.path.relative_to(root)}: {folder.reason}"
        console.print(line)
    gone = [folder for folder in folders if not folder.stays]
    word = "would be deleted" if dry_run else "deleted"
    console.print(
        f"{len(gone)} of {len(folders)} folders {word}, {size_text(_nbytes(gone))}; "
        f"{size_text(_nbytes([folder for folder in folders if folder.stays]))} stay"
    )
    lost = [folder for folder in folders if folder.loses]
    if lost:
        word = "would lose their optimizer" if dry_run else "have lost their optimizer"
        console.print(f"{len(lost)} steps {word}, {size_text(sum(folder.lost_bytes for folder in lost))}")


def _nbytes(folders: Sequence[PrunedFolder]) -> int:
    return sum(folder.nbytes for folder in folders)


def _as_json(folders: Sequence[PrunedFolder], dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "deleted_bytes": _nbytes([folder for folder in folders if not folder.stays]),
        "folders": [
            {
                "path": str(folder.path),
                "step": folder.step,
                "deleted": not folder.stays,
                "reason": folder.reason,
                "bytes": folder.nbytes,
                "loses_optimizer": list(folder.loses),
                "lost_bytes": folder.lost_bytes,
            }
            for folder in folders
        ],
    }
