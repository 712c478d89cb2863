"""Parses and checks arguments that several commands take."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_ckpt.errors import InvalidArgumentError


def expanded_path(text: str) -> Path:
    """Returns a path whose leading `~` is the home folder. A shell leaves `--dir=~/x` as it is."""
    return Path(text).expanduser()


def check_is_folder(path: Path, flag: str = "") -> None:
    """Raises InvalidArgumentError unless the folder exists. `flag` is named in the message."""
    if not path.is_dir():
        raise InvalidArgumentError(f"{flag + ' ' if flag else ''}{path}: there is no such folder")


def check_patterns(flag: str, patterns: Iterable[str]) -> None:
    """Raises InvalidArgumentError unless all patterns of a flag are regular expressions."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidArgumentError(f"{flag} {pattern!r} is no regular expression: {error}") from None


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, and nothing else")


def add_ignored_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags that users of verl's merger type and that change nothing here."""
    parser.add_argument(
        "--use_cpu_initialization",
        "--use-cpu-initialization",
        action="store_true",
        help="accepted: no model is made, so none is initialized",
    )
    parser.add_argument(
        "--trust-remote-code",
        "--trust_remote_code",
        action="store_true",
        help="accepted: no code of the model is run, nor needed",
    )


@contextmanager
def torchrun_variables() -> Iterator[None]:
    """Explains the ValueError that torch raises if a job's scheduler sets some of torchrun's variables but not all.

    Raises InvalidArgumentError.
    """
    try:
        yield
    except ValueError as error:
        raise InvalidArgumentError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')!r}, without what torchrun sets beside it: {error}: use "
            "torchrun, or unset it to work alone"
        ) from None
