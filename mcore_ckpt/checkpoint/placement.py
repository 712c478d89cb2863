"""Records which nodes have each file of a checkpoint in the fast tier. It is a part of the manifest there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mcore_ckpt.io import json_fields as fields


@dataclass(frozen=True)
class Placement:
    """The nodes that have, or will get, each file of a checkpoint.

    Attributes:
        nodes: the names of the nodes that saved. A node's number is its position here.
        by_file: for each file of the manifest, in the same order, the numbers of the nodes that have it. The first one
            has written it; the others have written the same bytes, or get a copy beside the training.
        save_count: how many saves into the fast tier the training has begun, this one included.
    """

    nodes: tuple[str, ...]
    by_file: tuple[tuple[int, ...], ...]
    save_count: int = 0

    def files_on(self, node: int) -> list[int]:
        """Returns the positions of the files that a node has or will get."""
        return [position for position, nodes in enumerate(self.by_file) if node in nodes]


def encoded(placement: Placement) -> dict[str, Any]:
    """Returns the placement as JSON values. Files that follow each other and are on the same nodes share an entry."""
    runs = [[sum(1 for _ in same), list(nodes)] for nodes, same in groupby(placement.by_file)]
    return {"nodes": list(placement.nodes), "files": runs, "save_count": placement.save_count}


def decode(item: Any, files: int) -> Placement:
    """Reads and checks the placement of a manifest with so many files. Raises FieldError."""
    record = fields.as_dict(item, "placement")
    nodes = fields.get_names(record, "nodes")
    by_file = tuple(_by_file(fields.get_list(record, "files"), len(nodes), files))
    if len(by_file) != files:
        raise fields.FieldError(f"placement lists the nodes of {len(by_file)} files, but there are {files}")
    return Placement(nodes, by_file, fields.get_int(record, "save_count"))


def _by_file(runs: Sequence[Any], nodes: int, files: int) -> Iterator[tuple[int, ...]]:
    left = files
    for run in runs:
        if not isinstance(run, list) or len(run) != 2 or not isinstance(run[1], list):
            raise fields.FieldError("placement has an entry that is not a count and a list of nodes")
        (count,), numbers = fields.as_ints(run[:1], "placement"), fields.as_ints(run[1], "placement")
        if not 0 < count <= left or not numbers or len(set(numbers)) < len(numbers) or max(numbers) >= nodes:
            raise fields.FieldError(f"placement has the entry {fields.shown(run)}, but {left} files and {nodes} nodes")
        left -= count
        yield from (tuple(numbers),) * count
