"""Checks the options of the commands that compare tensors: `diff` and `test`."""

from __future__ import annotations

import argparse
import math

from mcore_ckpt.cli.arguments import check_patterns
from mcore_ckpt.errors import InvalidArgumentError


def check_comparison(args: argparse.Namespace) -> None:
    """Raises InvalidArgumentError unless `--atol`, `--rtol`, `--most` and `--ignore` can be used."""
    if not (0 <= args.atol < math.inf and 0 <= args.rtol < math.inf):
        raise InvalidArgumentError(f"--atol {args.atol} --rtol {args.rtol}: use finite numbers of 0 or more")
    if args.most < 0:
        raise InvalidArgumentError(f"--most {args.most}: use 0 or more")
    check_patterns("--ignore", args.ignore)
