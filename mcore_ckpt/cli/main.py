"""Runs `mcore-ckpt`: parses the arguments, runs one subcommand and turns its errors into an exit status.

Each subcommand is a module with `HELP` and `DESCRIPTION`, `EXAMPLES` (command lines for its `--help`),
`add_arguments(parser)`, and `run(args)`, which returns the exit status. Only `run` imports torch and modules that need
torch, so that `--help` does not wait a second for torch. To add a subcommand, write such a module and list it in
`COMMANDS`.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from mcore_ckpt import __version__
from mcore_ckpt.cli.parsers import CommandParser, TopParser, add_examples
from mcore_ckpt.errors import CheckpointError, InvalidArgumentError
from mcore_ckpt.redaction import redacted

SUCCESS, BAD_CHECKPOINT, UNUSABLE_ARGUMENTS = 0, 1, 2
INTERRUPTED, READER_GONE = 130, 141  # 128 + SIGINT and 128 + SIGPIPE, as shells report them

# The modules of the commands in `mcore_ckpt.cli`, in the order of the help. Some modules are named `..._command`,
# because their plain names are taken.
COMMANDS: Mapping[str, str] = {
    "demo": "demo.command",
    "doctor": "doctor",
    "bench": "bench",
    "list": "list_command",
    "inspect": "inspect_command",
    "watch": "watch",
    "diff": "diff",
    "verify": "verify",
    "prune": "prune",
    "collect": "collect_command",
    "branch": "branch",
    "merge": "merge",
    "test": "test_command",
    "convert": "convert",
    "reshard": "reshard",
    "completion": "completion",
}


def main(argv: Sequence[str] | None = None, **defaults: Any) -> int:
    """Runs one subcommand.

    Returns the exit status: 0 for success, 1 for a bad checkpoint, 2 for unusable arguments, 130 for Ctrl-C, and 141 if
    the program that reads the output has ended.

    Args:
        argv: the arguments; None for the arguments of this process.
        defaults: default values of arguments, for a script with other defaults than `mcore-ckpt`, such as
            `default_target` of `merge`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name can contain bytes that are not text
    try:
        try:
            return _run(argv, defaults)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The program that reads stdout has ended, as with `| head`. The interpreter flushes stdout when it exits, and
        # would complain if the flush failed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE


def _run(argv: Sequence[str] | None, defaults: Mapping[str, Any]) -> int:
    try:
        words = sys.argv[1:] if argv is None else argv
        args = build_parser(_named(words)).parse_args(words, argparse.Namespace(**defaults))
        return int(args.run(args))
    except InvalidArgumentError as error:
        _complain(str(error))
        return UNUSABLE_ARGUMENTS
    except CheckpointError as error:
        _complain(str(error))
        return BAD_CHECKPOINT
    except BrokenPipeError:
        raise
    except OSError as error:
        _complain(redacted(f"{type(error).__name__}: {error}"))
        return BAD_CHECKPOINT
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED


def _complain(message: str) -> None:
    """Writes an error to stderr, so that a program can read what `--json` writes to stdout."""
    from rich.console import Console  # imported only here, because the import takes a tenth of a command's start

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"mcore-ckpt: {message}", style="red", markup=False)


def _named(words: Sequence[str]) -> Iterable[str]:
    """Returns the commands whose parsers are needed: the called command; all commands if no known command is called.

    The other commands' modules are not imported, because their import takes as long as the work of a small command.
    """
    return words[:1] if words and words[0] in COMMANDS else COMMANDS


def build_parser(commands: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """Returns a parser of some or all commands."""
    parser = TopParser(prog="mcore-ckpt", description="Checkpoints for training with Megatron-core.")
    parser.add_argument("--version", action="version", version=f"mcore-ckpt {__version__}", help="show the version")
    subparsers = parser.add_subparsers(metavar="command", required=True, parser_class=CommandParser)
    for name in commands:
        module = command_module(name)
        command = subparsers.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
        add_examples(command, module.EXAMPLES)
    return parser


def command_module(name: str) -> ModuleType:
    """Returns the module of a command."""
    return import_module(f"mcore_ckpt.cli.{COMMANDS[name]}")


if __name__ == "__main__":
    sys.exit(main())
