"""`mcore-ckpt`: one command, one module per subcommand.

A subcommand is a module with `add_to(subparsers)`, which adds its parser and sets `run`, a function that takes the
parsed arguments and returns the exit status. It is listed in `COMMANDS`, and that is all.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from rich.console import Console

from mcore_ckpt.cli import UsageError, compare, convert, inspecting, listing, merge, prune, reshard, verify
from mcore_ckpt.cli.demo import command as demo
from mcore_ckpt.errors import CheckpointError

SUCCESS, BAD_CHECKPOINT, UNUSABLE_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130

COMMANDS = (demo, listing, inspecting, verify, prune, merge, compare, convert, reshard)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 is success, 1 a checkpoint that is bad, 2 unusable arguments."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no text
    args = build_parser().parse_args(argv)
    # Errors go to stderr, so that what `--json` writes to stdout stays readable for a program.
    complaints = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        return int(args.run(args))
    except UsageError as error:
        complaints.print(f"mcore-ckpt: {error}", style="red", markup=False)
        return UNUSABLE_ARGUMENTS
    except CheckpointError as error:
        complaints.print(f"mcore-ckpt: {error}", style="red", markup=False)
        return BAD_CHECKPOINT
    except OSError as error:
        complaints.print(f"mcore-ckpt: {type(error).__name__}: {error}", style="red", markup=False)
        return BAD_CHECKPOINT
    except KeyboardInterrupt:
        complaints.print("mcore-ckpt: interrupted", style="red")
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="mcore-ckpt", description="Checkpoints for training with Megatron-core.")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        command.add_to(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
