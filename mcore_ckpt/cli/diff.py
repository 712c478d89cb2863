"""`mcore-ckpt diff`: shows what differs between two checkpoints, which may have different layouts."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.amounts import size_text
from mcore_ckpt.cli.arguments import add_ignore, add_json, expanded_path, taken
from mcore_ckpt.cli.comparisons import NUMBERS, check_comparison, info_as_json, numbers_in_line, numbers_of
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import is_terminal, result_console, show_result
from mcore_ckpt.cli.tables import table_of

if TYPE_CHECKING:
    from mcore_ckpt.tools.examine.diff import Diff, DifferentTensor, RoleDiff

HELP = "show what differs between two checkpoints"
DESCRIPTION = """\
Compares two checkpoints of this package, bit for bit unless tolerances are given: weights and optimizer state, and the
other values by name (steps, param groups, LR scheduler, random states, extra state). The parallel layouts may differ.
The exit status is 0 if nothing differs, 1 if something differs, and 2 for unusable arguments, as with diff(1). Use
`mcore-ckpt test` for HuggingFace models."""

EXAMPLES = (
    "diff checkpoints/global_steps_90 checkpoints/global_steps_100",
    'diff checkpoints resharded --ignore "output_layer.*" --json',
    "diff checkpoints resharded --atol 1e-6 --rtol 1e-3",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        text = "folder of a role, of a step, or of the steps (their newest complete one)"
        parser.add_argument(name, type=expanded_path, metavar=name.upper(), help=text)
    parser.add_argument("--atol", type=float, default=0.0, metavar="X", help="allowed absolute difference of a value")
    parser.add_argument(
        "--rtol", type=float, default=0.0, metavar="X", help="allowed difference relative to B's value, added to --atol"
    )
    parser.add_argument("--any-dtype", action="store_true", help="compare only values, and accept other dtypes")
    add_ignore(parser)
    parser.add_argument("--most", type=int, default=20, metavar="N", help="show at most N tensors and N values (20)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compares two checkpoints. Returns 0 if nothing differs, otherwise 1."""
    check_comparison(args)
    left, right = (taken(path, "diff") for path in (args.a, args.b))
    from mcore_ckpt.tools.examine.diff import diff
    from mcore_ckpt.tools.examine.differences import Tolerance

    tolerance = Tolerance(args.atol, args.rtol, args.any_dtype)
    with progress_of_bytes(args.json) as bar:
        found = diff(left, right, tolerance, args.ignore, progress_in(bar, "diff"))
    show_result(found, as_json, partial(_show, most=args.most), args.json)
    return 0 if found.is_same else 1


def _show(found: Diff, most: int) -> None:
    console = result_console()
    for letter, roles in (("A", found.only_left), ("B", found.only_right)):
        for role in roles:
            console.print(f"only in {letter}  role {role}", style="red")
    for role_diff in found.roles:
        _show_role(console, role_diff, most)
    nbytes = sum(role.nbytes for role in found.roles)
    console.print(f"read {size_text(nbytes)} of each checkpoint in {found.seconds:.1f} s")


def _show_role(console: Console, role: RoleDiff, most: int) -> None:
    verdict = "the same" if role.is_same else f"{len(role.tensors)} tensors and {len(role.values)} values differ"
    console.print(f"A {role.left}, B {role.right}: {verdict}; {role.compared} tensors compared", style="bold")
    for note in role.notes:
        console.print(f"note  {note}")
    tensors = [_row(tensor) for tensor in role.tensors[:most]]
    values = [[value.name, _side(value.left), _side(value.right)] for value in role.values[:most]]
    if is_terminal():
        headings = ("tensor", "kind", "problem", "A", "B", *NUMBERS)
        for heads, rows in ((headings, tensors), (("value", "A", "B"), values)):
            if rows:
                console.print(table_of(console, heads, rows))
    else:
        for name, kind, problem, left, right, *numbers in tensors:
            console.print(f"{problem}  {name} ({kind})  A {left}  B {right}{numbers_in_line(numbers)}")
        for name, left, right in values:
            console.print(f"state  {name}  A {left}  B {right}")
    for rows, all_of, what in ((tensors, role.tensors, "tensors"), (values, role.values, "values")):
        if len(rows) < len(all_of):
            console.print(f"and {len(all_of) - len(rows)} more {what} (--most)")


def _row(tensor: DifferentTensor) -> list[str]:
    differing = f"{tensor.differing} of {tensor.numel}" if tensor.differing else ""
    numbers = numbers_of(differing, tensor.max_abs, tensor.max_rel)
    return [tensor.name, tensor.kind, tensor.problem, *tensor.sides, *numbers]


def _side(value: str | None) -> str:
    return "-" if value is None else value


def as_json(found: Diff) -> dict[str, Any]:
    """Returns the result as JSON values. JSON has no infinity, so infinity becomes null."""
    from mcore_ckpt.tools.examine.differences import finite_or_none

    return {
        "same": found.is_same,
        "only_a": list(found.only_left),
        "only_b": list(found.only_right),
        "seconds": found.seconds,
        "roles": [
            {
                "a": str(role.left),
                "b": str(role.right),
                "same": role.is_same,
                "compared": role.compared,
                "bytes": role.nbytes,
                "notes": list(role.notes),
                "tensors": [
                    {
                        "name": tensor.name,
                        "kind": tensor.kind,
                        "problem": tensor.problem,
                        "a": info_as_json(tensor.left),
                        "b": info_as_json(tensor.right),
                        "elements": tensor.numel,
                        "differing": tensor.differing,
                        "max_abs": finite_or_none(tensor.max_abs),
                        "max_rel": finite_or_none(tensor.max_rel),
                    }
                    for tensor in role.tensors
                ],
                "values": [{"name": value.name, "a": value.left, "b": value.right} for value in role.values],
            }
            for role in found.roles
        ],
    }
