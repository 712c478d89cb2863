"""Parses and checks arguments that several commands share."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_ckpt.errors import InvalidArgumentError


def expanded_path(text: str) -> Path:
    """Returns a path with a leading `~` replaced by the home folder, because a shell leaves `--dir=~/x` as it is."""
    return Path(text).expanduser()


def folder_or_model(text: str) -> str:
    """Returns a HuggingFace folder, as `expanded_path` does, or the name of a model on the hub as it is."""
    return os.path.expanduser(text)


def check_is_folder(path: Path, flag: str = "") -> None:
    """Raises InvalidArgumentError unless the folder exists. The message names `flag`.

    A checkpoint's folder counts as there if a save has moved it aside, since the commands find it there.
    """
    from mcore_ckpt.steps import find_moved_aside

    if not path.is_dir() and find_moved_aside(path) is None:
        raise InvalidArgumentError(f"{flag + ' ' if flag else ''}{path}: there is no such folder")


def near_root(path: Path) -> Path:
    """Returns the folder of steps at a path: the path itself, or the only one near it if it has no steps.

    It says on stderr that it has taken another folder. Only for commands that change nothing.

    Raises InvalidArgumentError if there are several, which the message names.
    """
    from mcore_ckpt.tools.nearby import advice_on, nearby_roots

    roots = nearby_roots(path)
    if len(roots) > 1:
        raise InvalidArgumentError(f"{path}: has no steps{advice_on(path)}")
    if not roots:
        return path
    print(f"{path}: has no steps: taking {roots[0]}", file=sys.stderr)
    return roots[0]


def check_has_steps(path: Path) -> None:
    """Raises InvalidArgumentError if a folder has no steps, but one near it has. The message names that one."""
    from mcore_ckpt.tools.nearby import advice_on

    advice = advice_on(path)
    if advice:
        raise InvalidArgumentError(f"{path}: has no steps{advice}")


def check_can_be_file(flag: str, path: Path) -> None:
    """Raises InvalidArgumentError if no file can be written at a path, because of what is there. Names `flag`."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no regular file"
        raise InvalidArgumentError(f"{flag} {path}: is {what}: name another file")
    if not path.parent.is_dir():
        raise InvalidArgumentError(f"{flag} {path}: there is no folder {path.parent}: make it, or name another file")


def check_is_folder_or_model(name: str, flag: str) -> None:
    """Raises InvalidArgumentError unless the folder exists, or a model on the hub can have this name."""
    from mcore_ckpt.formats import HubModel

    if not Path(name).is_dir() and HubModel.find(name) is None:
        raise InvalidArgumentError(
            f"{flag} {name}: there is no such folder, and models on the hub have names such as Qwen/Qwen3-0.6B"
        )


def check_patterns(flag: str, patterns: Iterable[str]) -> None:
    """Raises InvalidArgumentError unless all patterns of a flag are regular expressions."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidArgumentError(f"{flag} {pattern!r} is no regular expression: {error}") from None


def add_ignore(parser: argparse.ArgumentParser, tensors: str = "tensors") -> None:
    """Adds `--ignore`, whose help calls what is left out `tensors`. `check_patterns` checks its values."""
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="REGEX",
        help=f"leave out {tensors} whose whole name matches; may be repeated",
    )


def add_force(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds `--force`, with a help text that says what it replaces (`what`), and what is never replaced."""
    parser.add_argument(
        "--force",
        action="store_true",
        help=f"replace {what} that is there already; a pinned step is never replaced, and nothing is written to a "
        "folder of steps in which a trainer that is alive saves",
    )


def add_json(
    parser: argparse.ArgumentParser, what: str = "print the result as one JSON object, and nothing else"
) -> None:
    """Adds `--json`, with a help text that says what it does."""
    parser.add_argument("--json", action="store_true", help=what)


def add_revision(parser: argparse.ArgumentParser, flag: str) -> None:
    """Adds `--revision`, for the model that `flag` names."""
    parser.add_argument(
        "--revision",
        metavar="NAME",
        help=f"branch, tag or commit of a model on the hub that {flag} names (the main branch if not given)",
    )


def add_ignored_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags of verl's merger that are accepted, but have no effect here."""
    parser.add_argument(
        "--use_cpu_initialization",
        "--use-cpu-initialization",
        action="store_true",
        help="accepted, but without effect: no model is made",
    )
    parser.add_argument(
        "--trust-remote-code",
        "--trust_remote_code",
        action="store_true",
        help="accepted, but without effect: no code of the model is executed",
    )


@contextmanager
def torchrun_variables() -> Iterator[None]:
    """Replaces the ValueError that torch raises about torchrun's variables by an InvalidArgumentError with advice.

    Some job schedulers set a few of these variables, but not all.
    """
    try:
        yield
    except ValueError as error:
        raise InvalidArgumentError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')!r}, but the variables of torchrun are incomplete or invalid "
            f"({error}): use torchrun, or unset it to use a single process"
        ) from None
