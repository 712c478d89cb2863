"""`mcore-ckpt list`: shows the steps below a folder, which of them are complete, and why the others are not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.cli.arguments import add_json, check_is_folder, expanded_path
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    from mcore_ckpt.steps import StepStatus

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Lists the steps below a folder, the oldest first, and the step that the tracker names. Reads only the manifests; use
`mcore-ckpt verify` to check the bytes."""


@dataclass(frozen=True)
class _StepRow:
    """One line of the list.

    Attributes:
        status: the step.
        nbytes: the bytes of all its committed roles.
        created: when the last of these roles was saved; empty if there is none.
    """

    status: StepStatus
    nbytes: int
    created: str


def add_to(subparsers: Subparsers) -> None:
    """Adds the parser of `list`."""
    parser = subparsers.add_parser("list", help="show which steps there are", description=DESCRIPTION)
    parser.add_argument("root", type=expanded_path, metavar="ROOT", help="folder of steps")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Lists the steps. Returns 0 whatever is found."""
    from mcore_ckpt.steps import list_steps, read_tracker

    check_is_folder(args.root)
    try:
        rows = [_row_of(status) for status in list_steps(args.root)]
    except OSError as error:
        raise CheckpointError(f"{args.root}: {error}") from error
    tracked = read_tracker(args.root)
    if args.json:
        print(json.dumps({"tracker": tracked, "steps": [_as_json(row) for row in rows]}))
    else:
        _show(rows, tracked)
    return 0


def _row_of(status: StepStatus) -> _StepRow:
    from mcore_ckpt.checkpoint import read_manifest

    manifests = []
    for role in sorted(status.committed):
        try:
            manifests.append(read_manifest(status.role_dir(role)))
        except (CheckpointCorruptError, CheckpointNotFoundError):
            continue  # a trainer's retention has just deleted it
    created = max((manifest.created for manifest in manifests), default="")
    return _StepRow(status, sum(manifest.nbytes for manifest in manifests), created)


def _show(rows: Sequence[_StepRow], tracked: int | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for row in rows:
        status = row.status
        if status.is_complete:
            marks = "  pinned" if status.pinned else ""
            roles = ", ".join(sorted(status.committed))
            line = f"{status.path.name}  {row.nbytes / 1e9:10.3f} GB  {row.created}  {roles}{marks}"
            console.print(line, markup=False)
        else:
            console.print(f"{status.path.name}  is not complete: {status.reason}", style="red", markup=False)
    complete = [row.status.step for row in rows if row.status.is_complete]
    newest = f"newest complete step: {complete[-1]}" if complete else "no step is complete"
    console.print(f"{newest}; the tracker names {'none' if tracked is None else tracked}", markup=False)


def _as_json(row: _StepRow) -> dict[str, Any]:
    """Returns a step as JSON values."""
    status = row.status
    return {
        "step": status.step,
        "path": str(status.path),
        "complete": status.is_complete,
        "reason": None if status.is_complete else status.reason,
        "roles": sorted(status.committed),
        "declared": sorted(status.declared),
        "pinned": status.pinned,
        "bytes": row.nbytes,
        "created": row.created or None,
    }
