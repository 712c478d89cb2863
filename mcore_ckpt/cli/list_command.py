"""`mcore-ckpt list`: shows the steps below a folder, which of them are complete, and why the others are not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.cli.arguments import add_json, check_is_folder, expanded_path
from mcore_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from mcore_ckpt.steps import StepSize, StepStatus

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Lists the steps below a folder, the oldest first, and the step that the tracker names. Reads only the manifests; use
`mcore-ckpt verify` to check the bytes."""


def add_to(subparsers: Subparsers) -> None:
    """Adds the parser of `list`."""
    parser = subparsers.add_parser("list", help="show which steps there are", description=DESCRIPTION)
    parser.add_argument("root", type=expanded_path, metavar="ROOT", help="folder of steps")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Lists the steps. Returns 0 whatever is found."""
    from mcore_ckpt.steps import list_steps, read_tracker, size_of

    check_is_folder(args.root)
    try:
        statuses = list_steps(args.root)
    except OSError as error:
        raise CheckpointError(f"{args.root}: {error}") from error
    tracked = read_tracker(args.root)
    if args.json:
        steps = [_as_json(status, size_of(status)) for status in statuses]
        print(json.dumps({"tracker": tracked, "steps": steps}))
    else:
        _show([(status, size_of(status)) for status in statuses], tracked)
    return 0


def _show(sizes: Sequence[tuple[StepStatus, StepSize]], tracked: int | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for status, size in sizes:
        if status.is_complete:
            marks = "  pinned" if status.pinned else ""
            roles = ", ".join(sorted(status.committed))
            line = f"{status.path.name}  {size.nbytes / 1e9:10.3f} GB  {size.created}  {roles}{marks}"
            console.print(line, markup=False)
        else:
            console.print(f"{status.path.name}  is not complete: {status.reason}", style="red", markup=False)
    complete = [status.step for status, _ in sizes if status.is_complete]
    newest = f"newest complete step: {complete[-1]}" if complete else "no step is complete"
    console.print(f"{newest}; the tracker names {'none' if tracked is None else tracked}", markup=False)


def _as_json(status: StepStatus, size: StepSize) -> dict[str, Any]:
    """Returns a step as JSON values."""
    return {
        "step": status.step,
        "path": str(status.path),
        "complete": status.is_complete,
        "reason": None if status.is_complete else status.reason,
        "roles": sorted(status.committed),
        "declared": sorted(status.declared),
        "pinned": status.pinned,
        "bytes": size.nbytes,
        "created": size.created or None,
    }
