"""Checks the regular expressions with which a caller chooses tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mcore_ckpt.errors import InvalidArgumentError


def compiled(patterns: Sequence[str], option: str = "ignore") -> list[re.Pattern[str]]:
    """Returns compiled regular expressions.

    Raises InvalidArgumentError, which names `option`, for anything except a list of regular expressions. A string is
    refused, too, because each of its letters would count as an expression.
    """
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        kind = "the string " if isinstance(patterns, str) else ""
        raise InvalidArgumentError(f"{option} is {kind}{patterns!r}: use a list of regular expressions")
    found = []
    for pattern in patterns:
        try:
            found.append(re.compile(pattern))
        except (re.error, TypeError) as error:
            raise InvalidArgumentError(
                f'{option}: {pattern!r} is no regular expression ({error}): write r"\\*" for a star itself, and '
                '".*" for any characters'
            ) from None
    return found
