"""`mcore-ckpt list`: which steps are below a folder, which of them count, and why the others do not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.cli import UsageError
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    from mcore_ckpt.steps.listing import StepStatus

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Lists the steps below a folder, the oldest first, and what the tracker names. Looks at manifests alone: whether the
bytes are what was written says `mcore-ckpt verify`."""


@dataclass(frozen=True)
class _Listed:
    """One step; `nbytes` and `created` are of its committed roles."""

    status: StepStatus
    nbytes: int
    created: str


def add_to(subparsers: Subparsers) -> None:
    """Add the parser of `list`."""
    parser = subparsers.add_parser("list", help="show which steps there are", description=DESCRIPTION)
    parser.add_argument("root", type=Path, metavar="ROOT", help="folder of steps")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List; 0 whatever is found."""
    from mcore_ckpt.steps.listing import list_steps
    from mcore_ckpt.steps.tracker import read_tracker

    if not args.root.is_dir():
        raise UsageError(f"{args.root}: there is no such folder")
    try:
        listed = [_look(status) for status in list_steps(args.root)]
    except OSError as error:
        raise CheckpointError(f"{args.root}: {error}") from error
    tracked = read_tracker(args.root)
    if args.json:
        print(json.dumps({"tracker": tracked, "steps": [_as_json(step) for step in listed]}))
    else:
        _show(listed, tracked)
    return 0


def _look(status: StepStatus) -> _Listed:
    from mcore_ckpt.checkpoint.reading import read_manifest

    manifests = []
    for role in sorted(status.committed):
        try:
            manifests.append(read_manifest(status.role_dir(role)))
        except (CheckpointCorruptError, CheckpointNotFoundError):
            continue  # retention has just deleted it
    created = max((manifest.created for manifest in manifests), default="")
    return _Listed(status, sum(manifest.nbytes for manifest in manifests), created)


def _show(listed: Sequence[_Listed], tracked: int | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for step in listed:
        status = step.status
        if status.is_complete:
            marks = "  pinned" if status.pinned else ""
            roles = ", ".join(sorted(status.committed))
            line = f"{status.path.name}  {step.nbytes / 1e9:10.3f} GB  {step.created}  {roles}{marks}"
            console.print(line, markup=False)
        else:
            console.print(f"{status.path.name}  does not count: {status.reason}", style="red", markup=False)
    complete = [step.status.step for step in listed if step.status.is_complete]
    newest = f"newest complete step: {complete[-1]}" if complete else "no step is complete"
    console.print(f"{newest}; the tracker names {'none' if tracked is None else tracked}", markup=False)


def _as_json(listed: _Listed) -> dict[str, Any]:
    """What a program may want to know."""
    status = listed.status
    return {
        "step": status.step,
        "path": str(status.path),
        "complete": status.is_complete,
        "reason": None if status.is_complete else status.reason,
        "roles": sorted(status.committed),
        "declared": sorted(status.declared),
        "pinned": status.pinned,
        "bytes": listed.nbytes,
        "created": listed.created or None,
    }
