"""Checks the options that `diff` and `test` share, and shows the numbers that both commands report."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mcore_ckpt.cli.arguments import check_patterns
from mcore_ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.formats import TensorInfo

NUMBERS = ("differing>", "max abs>", "max rel>")  # the headings of `numbers_of`


def check_comparison(args: argparse.Namespace) -> None:
    """Raises InvalidArgumentError unless `--atol`, `--rtol`, `--most` and `--ignore` can be used."""
    if not (0 <= args.atol < math.inf and 0 <= args.rtol < math.inf):
        raise InvalidArgumentError(f"--atol {args.atol} --rtol {args.rtol}: use finite numbers of 0 or more")
    if args.most < 0:
        raise InvalidArgumentError(f"--most {args.most}: use 0 or more")
    check_patterns("--ignore", args.ignore)


def numbers_of(differing: str, max_abs: float, max_rel: float) -> list[str]:
    """Returns the cells below NUMBERS: how many elements differ, and the largest differences (an empty cell for 0)."""
    return [differing, *(f"{amount:.3g}" if amount else "" for amount in (max_abs, max_rel))]


def numbers_in_line(numbers: Iterable[str]) -> str:
    """Returns the cells of `numbers_of` as text, each after its heading."""
    named = zip(NUMBERS, numbers, strict=True)
    return "".join(f"  {heading.removesuffix('>')} {number}" for heading, number in named if number)


def info_as_json(info: TensorInfo | None) -> dict[str, Any] | None:
    """Returns dtype and shape of a tensor as JSON values; None for no tensor."""
    return None if info is None else {"shape": list(info.shape), "dtype": info.dtype_name}
