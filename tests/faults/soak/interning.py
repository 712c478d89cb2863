"""Lets Python's table of interned strings grow before anybody measures."""

import sys

STRINGS = 400_000


def settle_interned_strings() -> None:
    """Interns so many passing strings that the table has its final size.

    CPython 3.11 keeps all interned strings in one dict. Strings come and go, and the dict does not use their slots
    again, but from time to time makes itself anew, for three times the strings that are left. After the imports of
    torch and megatron the first such time doubles it: 3.8 MB, at some moment in each life's first minutes. Later times
    change nothing.
    """
    for number in range(STRINGS):
        sys.intern(f"passing string {number}")
