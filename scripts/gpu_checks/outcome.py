"""Defines how a check ends: it has passed, it has failed, or this machine cannot run it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Status = Literal["passed", "failed", "not possible here"]


class Failed(Exception):
    """What is checked does not hold. The message says why."""


class NotPossible(Exception):
    """This machine lacks something that the check needs. The message says what."""


@dataclass(frozen=True)
class Outcome:
    """How a call of a function ended.

    Attributes:
        status: passed, failed, or not possible here.
        found: what the function returned, as JSON can hold it, if it has passed; otherwise why, as a text. A check
            returns a text, which can have a table in Markdown after an empty line.
    """

    status: Status
    found: Any = ""

    @property
    def line(self) -> str:
        """The outcome in one line: "passed: 40 captures", "failed: ...", "not possible here: no GPU".

        A table, after an empty line, is left out.
        """
        text = " ".join(str(self.found).partition("\n\n")[0].split())
        return f"{self.status}: {text}" if text else self.status

    @classmethod
    def of(cls, record: dict[str, Any]) -> Outcome:
        """Returns the outcome that a record of its fields describes. Raises ValueError for an unknown status."""
        if record["status"] not in get_args(Status):
            raise ValueError(f"{record['status']!r} is not the status of an outcome")
        return cls(record["status"], record["found"])


def outcome_of(function: Callable[..., Any], *arguments: str) -> Outcome:
    """Calls a function and returns how that ended. An error that nobody expected is a failure, too."""
    try:
        return Outcome("passed", function(*arguments))
    except NotPossible as missing:
        return Outcome("not possible here", str(missing))
    except Failed as failure:
        return Outcome("failed", str(failure))
    except Exception as error:
        traceback.print_exc()
        return Outcome("failed", f"{type(error).__name__}: {error}")
