"""Finds the differences of two tensors, or of two plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A list of numbers is shown as one value. For a list with more numbers than this, such as the state of a generator,
# only the count is shown.
_MOST_ITEMS = 16
_SHOWN = 60


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference of a value from the reference: at most `atol + rtol * |reference|`.

    If `atol` and `rtol` are 0, every bit must be equal. If `any_dtype` is True, tensors of different dtypes count as
    the same if their values are the same.
    """

    atol: float = 0.0
    rtol: float = 0.0
    any_dtype: bool = False

    @property
    def is_exact(self) -> bool:
        return self.atol == 0 and self.rtol == 0

    def allows(self, left: torch.dtype, right: torch.dtype) -> bool:
        """True if tensors of these dtypes can count as the same."""
        return self.any_dtype or left == right


EXACT = Tolerance()


class Differences:
    """The differences between two tensors, collected from batches of elements.

    Attributes:
        count: how many elements differ by more than the tolerance.
        max_abs, max_rel: the largest absolute difference, and the largest difference relative to the reference.
    """

    def __init__(self) -> None:
        self.count = 0
        self.max_abs = 0.0
        self.max_rel = 0.0

    def add(self, left: torch.Tensor, right: torch.Tensor, tolerance: Tolerance) -> None:
        """Adds the differences between two flat tensors of the same length. `right` is the reference."""
        if left.dtype == right.dtype:
            # Comparing bits is faster than comparing values. Bits also distinguish -0.0 from 0.0, and show that a NaN
            # equals itself.
            bits = _bits(left) != _bits(right)
            if not bits.any():
                return
            left, right = left[bits], right[bits]
        ours, wanted = left.to(torch.float64), right.to(torch.float64)
        difference = (ours - wanted).abs()
        # The difference of two equal infinities is NaN, but counts as 0. The difference of two NaNs counts as 0, too.
        difference[(ours == wanted) | (ours.isnan() & wanted.isnan())] = 0.0
        difference.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        relative = torch.where(difference == 0, 0.0, difference / wanted.abs().nan_to_num(nan=0.0))
        self.max_abs = max(self.max_abs, float(difference.max()) if len(difference) else 0.0)
        self.max_rel = max(self.max_rel, float(relative.nan_to_num(nan=torch.inf).max()) if len(relative) else 0.0)
        if not tolerance.is_exact:
            allowed = tolerance.atol + tolerance.rtol * wanted.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            self.count += int((difference > allowed).sum())
        elif left.dtype == right.dtype:
            self.count += len(left)
        else:
            self.count += int((difference > 0).sum())


def finite_or_none(number: float) -> float | None:
    """Returns the number, or None if it is infinite, because JSON has no infinity."""
    return number if number < float("inf") else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_WORDS[tensor.dtype.itemsize])


@dataclass(frozen=True)
class DifferentValue:
    """A plain value that differs: its place, such as "optimizers[0].param_groups[1].lr", and the two values as text.

    A text is None if the value is missing on that side.
    """

    name: str
    left: str | None
    right: str | None


def different_values(left: Any, right: Any, name: str) -> Iterator[DifferentValue]:
    """Yields the differences between two plain values, by name.

    Example:
        >>> list(different_values({"lr": 1.0, "eps": 0.5}, {"lr": 2.0, "eps": 0.5}, "group"))
        [DifferentValue(name='group.lr', left='1.0', right='2.0')]
    """
    ours, theirs = dict(_leaves(left, name)), dict(_leaves(right, name))
    for place in dict.fromkeys((*ours, *theirs)):
        if place not in ours or place not in theirs or not _is_same(ours[place], theirs[place]):
            left_text, right_text = (_shown(each[place]) if place in each else None for each in (ours, theirs))
            yield DifferentValue(place, left_text, right_text)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and value and not _is_run_of_numbers(value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{name}[{number}]")
    else:
        yield name, value


def _is_run_of_numbers(value: list[Any] | tuple[Any, ...]) -> bool:
    return all(isinstance(item, int | float) for item in value)


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        ours, theirs = (each.contiguous().view(-1).view(torch.uint8) for each in (left, right))
        return left.dtype == right.dtype and left.shape == right.shape and ours.equal(theirs)
    # NaN is not equal to itself, but the texts of two NaNs are equal, so compare the texts, too.
    return type(left) is type(right) and (left == right or repr(left) == repr(right))


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, list | tuple) and len(value) > _MOST_ITEMS:
        return f"{len(value)} values"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
