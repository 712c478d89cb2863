"""The `mcore-ckpt` command."""

import re
from collections.abc import Iterable


class UsageError(Exception):
    """The arguments cannot be used as they are: exit status 2."""


def check_patterns(flag: str, patterns: Iterable[str]) -> None:
    """Raises UsageError unless all are regular expressions."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{flag} {pattern!r} is no regular expression: {error}") from None
