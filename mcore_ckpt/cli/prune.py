"""`mcore-ckpt prune`: deletes old steps and the leftovers of crashes, as a trainer does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.amounts import size_text
from mcore_ckpt.cli.arguments import add_json, at_least, expanded_path, step_number, taken
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import result_console
from mcore_ckpt.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.tools.maintain.prune import PrunedFolder

HELP = "delete old steps and the leftovers of crashes"
DESCRIPTION = """\
Deletes old steps like a trainer with the same max_to_keep and keep_every, and the leftovers of processes that died.
Without --max-to-keep every step stays. These always stay: pinned steps, the newest complete step, steps that a process
is writing or reading, and folders of unknown content. The command can run while trainers run. The exit status is 1 if a
folder that should go cannot be deleted."""

EXAMPLES = (
    "prune checkpoints --max-to-keep 2 --keep-every 1000 --dry-run # what would go",
    "prune checkpoints # only what crashes have left",
    "prune checkpoints --pin 100",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", type=expanded_path, metavar="ROOT", help="folder of steps")
    parser.add_argument(
        "--max-to-keep", type=at_least(1), metavar="N", help="keep the N newest complete steps of each role"
    )
    parser.add_argument("--keep-every", type=at_least(1), metavar="N", help="also keep steps that are multiples of N")
    parser.add_argument("--role", help="delete only steps that have this role; they are deleted with all their roles")
    text = "never delete this step from now on"
    parser.add_argument("--pin", type=step_number, metavar="STEP", action="append", default=[], help=text)
    parser.add_argument("--unpin", type=step_number, metavar="STEP", action="append", default=[], help="undo --pin")
    parser.add_argument("--dry-run", action="store_true", help="show what would be deleted, but delete nothing")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Deletes steps, or shows what would be deleted. Returns 1 if one of them cannot be deleted, otherwise 0."""
    from mcore_ckpt import pin, unpin
    from mcore_ckpt.steps import PreservationPolicy
    from mcore_ckpt.tools.maintain.prune import prune

    if args.keep_every is not None and args.max_to_keep is None:
        raise InvalidArgumentError("--keep-every is given, but without --max-to-keep every step stays: give both")
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
                PreservationPolicy(args.max_to_keep, args.keep_every),
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
            }
            for folder in folders
        ],
    }
