"""Runs `mcore-ckpt`: parses the arguments, runs one subcommand and turns its errors into an exit status.

Each subcommand is a module of the same name. The modules of `list`, `inspect`, `test` and `collect` end in `_command`,
because the plain names mean something else. Each module has `add_to(subparsers)`, which adds the subcommand's parser
and sets `run`, a function that accepts the parsed arguments and returns the exit status, and `EXAMPLES`, command lines
for its `--help`. To add a subcommand, write such a module and list it in `COMMANDS`.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from rich.console import Console

from mcore_ckpt.cli import (
    bench,
    collect_command,
    completion,
    convert,
    diff,
    doctor,
    inspect_command,
    list_command,
    merge,
    prune,
    reshard,
    test_command,
    verify,
    watch,
)
from mcore_ckpt.cli.demo import command as demo
from mcore_ckpt.cli.examples import add_examples
from mcore_ckpt.errors import CheckpointError, InvalidArgumentError
from mcore_ckpt.redaction import redacted

SUCCESS, BAD_CHECKPOINT, UNUSABLE_ARGUMENTS = 0, 1, 2
INTERRUPTED, READER_GONE = 130, 141  # as shells report programs that SIGINT or SIGPIPE has ended

COMMANDS = (
    demo,
    doctor,
    bench,
    list_command,
    inspect_command,
    watch,
    diff,
    verify,
    prune,
    collect_command,
    merge,
    test_command,
    convert,
    reshard,
    completion,
)


def main(argv: Sequence[str] | None = None, **defaults: Any) -> int:
    """Runs one subcommand.

    Returns 0 for success, 1 for a bad checkpoint, 2 for unusable arguments, 130 for Ctrl-C, and 141 if the program that
    reads the output has ended.

    Args:
        argv: the arguments; None for those of this process.
        defaults: what a script with other defaults than `mcore-ckpt` sets, such as `default_target` of `merge`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name can contain bytes that are not text
    try:
        try:
            return _run(argv, defaults)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # As with `| head`. What the interpreter still flushes when it exits must go somewhere, or it complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE


def _run(argv: Sequence[str] | None, defaults: Mapping[str, Any]) -> int:
    # Errors are written to stderr, so that a program can read what `--json` writes to stdout.
    complaints = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        args = build_parser().parse_args(argv, argparse.Namespace(**defaults))
        return int(args.run(args))
    except InvalidArgumentError as error:
        complaints.print(f"mcore-ckpt: {error}", style="red", markup=False)
        return UNUSABLE_ARGUMENTS
    except CheckpointError as error:
        complaints.print(f"mcore-ckpt: {error}", style="red", markup=False)
        return BAD_CHECKPOINT
    except BrokenPipeError:
        raise
    except OSError as error:
        complaints.print(redacted(f"mcore-ckpt: {type(error).__name__}: {error}"), style="red", markup=False)
        return BAD_CHECKPOINT
    except KeyboardInterrupt:
        complaints.print("mcore-ckpt: interrupted", style="red")
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints quote the arguments without secrets. Those of subcommands are of the same class."""

    def error(self, message: str) -> NoReturn:
        super().error(redacted(message))


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all subcommands."""
    parser = _Parser(prog="mcore-ckpt", description="Checkpoints for training with Megatron-core.")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        command.add_to(subparsers)
        name = next(reversed(subparsers.choices))
        add_examples(subparsers.choices[name], command.EXAMPLES)
    return parser


if __name__ == "__main__":
    sys.exit(main())
