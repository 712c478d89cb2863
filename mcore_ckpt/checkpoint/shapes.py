"""Checks shapes from files that may be forged, before torch computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

# torch's own limit on the number of axes.
_MOST_AXES = 64
# The limit for the number of elements and for strides. With this limit, all positions fit into 64 bits.
MOST_ELEMENTS = 2**62


def is_possible_shape(shape: Sequence[int]) -> bool:
    """Returns True if a tensor can have this shape. The lengths must not be negative.

    An axis of length 0 does not make a shape small, because torch still multiplies the lengths of all other axes.

    Example:
        >>> is_possible_shape((0, 3)), is_possible_shape((0, 2**40, 2**40)), is_possible_shape((1,) * 65)
        (True, False, False)
    """
    return len(shape) <= _MOST_AXES and prod(length or 1 for length in shape) <= MOST_ELEMENTS
