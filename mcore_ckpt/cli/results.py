"""Prints the result of a command: for people, or with `--json` as one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console

Result = TypeVar("Result")


def show_result(
    result: Result, as_json: Callable[[Result], object], show: Callable[[Result], object], is_json: bool
) -> None:
    """Prints the JSON values of a result if `is_json`; otherwise lets `show` print it for people."""
    if is_json:
        print(json.dumps(as_json(result)))
    else:
        show(result)


def is_terminal() -> bool:
    """Returns True if stdout is a terminal. Otherwise, commands print plain lines that a program can search."""
    return sys.stdout.isatty()


def result_console(markup: bool = False) -> Console:
    """Returns the console for a command's result. Square brackets are plain text unless `markup`.

    In a pipe or a log the console folds no line, so that programs can read the lines.
    """
    return _ResultConsole(highlight=False, markup=markup, soft_wrap=not is_terminal())


class _ResultConsole(Console):
    def on_broken_pipe(self) -> None:
        """Raises the error again, so that `main` handles it.

        rich itself would end the process with status 1, which means a bad checkpoint.
        """
        raise
