"""`mcore-ckpt completion`: prints a script with which a shell completes commands, options and folders."""

from __future__ import annotations

import argparse

from mcore_ckpt.cli.arguments import expanded_path, folder_or_model
from mcore_ckpt.errors import InvalidArgumentError

HELP = "print a script for a shell's completion"
DESCRIPTION = """\
Prints a script for the completion of commands, options and folders. The script contains all options, so completing does
not start Python. Needs shtab: pip install 'mcore_ckpt[completion]'."""

EXAMPLES = (
    "completion bash > ~/.local/share/bash-completion/completions/mcore-ckpt # for bash",
    "completion zsh > ~/.zsh/completions/_mcore-ckpt # a folder in zsh's fpath",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")


def run(args: argparse.Namespace) -> int:
    """Prints the script. Returns 0."""
    from mcore_ckpt.cli.main import build_parser

    try:
        import shtab
    except ImportError:
        raise InvalidArgumentError("completion needs shtab: pip install 'mcore_ckpt[completion]'") from None
    parser = build_parser()
    for command in _commands(parser):
        for action in command._actions:
            if action.type in (expanded_path, folder_or_model):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [command for action in found for command in action.choices.values()]
