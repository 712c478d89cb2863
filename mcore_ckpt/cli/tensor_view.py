"""Shows one tensor of a checkpoint, for `mcore-ckpt inspect --tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.amounts import size_text
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import is_terminal
from mcore_ckpt.cli.tables import table_of

if TYPE_CHECKING:
    from mcore_ckpt.tools.examine.tensor_details import KindDetails, StoredPart, TensorDetails, Values

# The most boxes to show of one part. A flat range of a tensor with n axes consists of up to 2n - 1 boxes.
_MOST_BOXES = 3
_FIELDS = ("count", "zeros", "nans", "infs", "minimum", "maximum", "mean", "std", "norm")


def read_tensor(role_dirs: Sequence[Path], name: str, quiet: bool) -> dict[Path, TensorDetails]:
    """Reads a tensor in each role that has it, with a progress bar unless `quiet`.

    Raises InvalidArgumentError if no role has the tensor. The message suggests similar names of tensors in the first
    role.
    """
    from mcore_ckpt.tools.examine.tensor_details import describe_tensor, has_tensor

    chosen = [folder for folder in role_dirs if has_tensor(folder, name)] or role_dirs[:1]
    with progress_of_bytes(quiet) as bar:
        return {folder: describe_tensor(folder, name, progress_in(bar, name)) for folder in chosen}


def show_tensor(console: Console, role_dir: Path, tensor: TensorDetails) -> None:
    """Shows a tensor: on a terminal in tables, otherwise in lines that begin with the kind of the shards."""
    console.print(f"{role_dir}: tensor {tensor.name}", style="bold")
    if is_terminal():
        console.print(table_of(console, ("kind", "dtype", "shape", *_headings()), [_row(of) for of in tensor.kinds]))
        console.print()
        rows = [_part_row(of, part) for of in tensor.kinds for part in of.parts]
        console.print(table_of(console, ("kind", "rank>", "place", "part", "file", "offset>", "size>"), rows))
        return
    for of in tensor.kinds:
        facts = f"the same bytes as {of.same_as}" if of.same_as else _facts(of.values)
        console.print(f"{of.kind}  {of.dtype} {list(of.shape)}  {facts}".rstrip())
        for part in of.parts:
            where = f"{part.file}  bytes [{part.offset}, {part.offset + part.nbytes})"
            console.print(f"{of.kind}  rank {part.rank} ({_place(part)})  {_boxes(of, part)}  {where}")


def _headings() -> list[str]:
    names = {"minimum": "min", "maximum": "max", "nans": "NaN", "infs": "Inf"}
    return [f"{names.get(field, field)}>" for field in _FIELDS]


def _row(of: KindDetails) -> list[str]:
    shape = "x".join(map(str, of.shape)) or "one element"
    if of.values is None:
        return [of.kind, of.dtype, shape, f"as {of.same_as}" if of.same_as else "", *[""] * (len(_FIELDS) - 1)]
    return [of.kind, of.dtype, shape, *(_number(getattr(of.values, field)) for field in _FIELDS)]


def _part_row(of: KindDetails, part: StoredPart) -> list[str]:
    file, offset, size = part.file, str(part.offset), size_text(part.nbytes)
    return [of.kind, str(part.rank), _place(part), _boxes(of, part), file, offset, size]


def _facts(values: Values | None) -> str:
    if values is None:
        return ""
    names = (heading.removesuffix(">") for heading in _headings())
    found = (_number(getattr(values, field)) for field in _FIELDS)
    return "  ".join(f"{name} {number}" for name, number in zip(names, found, strict=True))


def _number(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.6g}"


def _place(part: StoredPart) -> str:
    at = part.coordinates
    experts = f" ep{at.ep}" if at.ep else ""
    return f"pp{at.pp} tp{at.tp} cp{at.cp} dp{at.dp}{experts}"


def _boxes(of: KindDetails, part: StoredPart) -> str:
    """Describes a part as slices of the global tensor, such as [0:256, 0:64]."""
    boxes = part.boxes
    if len(boxes) == 1 and boxes[0].shape == of.shape:
        return "all"
    shown = [
        "[" + ", ".join(f"{at}:{at + n}" for at, n in zip(box.offset, box.shape, strict=True)) + "]"
        for box in boxes[:_MOST_BOXES]
    ]
    more = f" and {len(boxes) - _MOST_BOXES} more" if len(boxes) > _MOST_BOXES else ""
    return (" + ".join(shown) or "nothing") + more


def tensor_as_json(tensor: TensorDetails | None) -> dict[str, Any] | None:
    """Returns the details of a tensor as JSON values; None for None."""
    if tensor is None:
        return None
    return {
        "name": tensor.name,
        "kinds": [
            {
                "kind": of.kind,
                "dtype": of.dtype,
                "shape": list(of.shape),
                "same_as": of.same_as,
                "values": None if of.values is None else asdict(of.values),
                "parts": [
                    {
                        "rank": part.rank,
                        "coordinates": asdict(part.coordinates),
                        "file": part.file,
                        "offset": part.offset,
                        "bytes": part.nbytes,
                        "boxes": [{"offset": list(box.offset), "shape": list(box.shape)} for box in part.boxes],
                    }
                    for part in of.parts
                ],
            }
            for of in tensor.kinds
        ],
    }
