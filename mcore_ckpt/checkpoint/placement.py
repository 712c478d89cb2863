"""Records which nodes have each file of a checkpoint in the fast tier.

The record is a field of the checkpoint's manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import typed_json
from mcore_ckpt.io.typed_json import LongList, Natural

# An entry of `files` says how many successive files are on the same nodes, and lists the numbers of these nodes.
_RUNS: LongList[tuple[int, tuple[int, ...]]] = LongList(tuple[Natural, tuple[Natural, ...]], b"]],[")
_COUNT: msgspec.json.Decoder[int] = msgspec.json.Decoder(Natural)


@dataclass(frozen=True)
class Placement:
    """The nodes that have, or will get, each file of a checkpoint.

    Attributes:
        nodes: the names of the nodes that saved. A node's number is its position in this tuple.
        by_file: for each file, in the manifest's order, the numbers of the nodes that have the file. The first of these
            nodes has written the file. The other nodes have written the same bytes, or get a copy while the training
            goes on.
        save_count: how many saves into the fast tier the training has begun, including the save of this checkpoint.
    """

    nodes: tuple[str, ...]
    by_file: tuple[tuple[int, ...], ...]
    save_count: int = 0

    def files_on(self, node: int) -> list[int]:
        """Returns the positions of the files that a node has or will get."""
        return [position for position, nodes in enumerate(self.by_file) if node in nodes]


def encoded(placement: Placement) -> dict[str, Any]:
    """Returns the placement as JSON values. Successive files that are on the same nodes share an entry."""
    runs = [[sum(1 for _ in same), list(nodes)] for nodes, same in groupby(placement.by_file)]
    return {"nodes": list(placement.nodes), "files": runs, "save_count": placement.save_count}


def decode(text: bytes, files: int) -> Placement:
    """Reads and checks the placement of a manifest with `files` files. Raises FieldError."""
    places = typed_json.members(text)
    if places is None or not {"nodes", "files", "save_count"} <= places.keys():
        raise fields.FieldError("placement is not an object of nodes, files and save_count, or has one of them twice")
    nodes = typed_json.read_names(text, places["nodes"], "nodes")
    save_count = typed_json.parse(text[slice(*places["save_count"])], _COUNT)
    by_file = tuple(_by_file(_RUNS.read(text, places["files"]), len(nodes), files))
    if len(by_file) != files:
        raise fields.FieldError(f"placement lists the nodes of {len(by_file)} files, but there are {files}")
    return Placement(nodes, by_file, save_count)


def _by_file(runs: Iterable[tuple[int, tuple[int, ...]]], nodes: int, files: int) -> Iterator[tuple[int, ...]]:
    left = files
    same: dict[tuple[int, ...], tuple[int, ...]] = {}
    for count, numbers in runs:
        if not 0 < count <= left or not numbers or len(set(numbers)) < len(numbers) or max(numbers) >= nodes:
            entry = fields.shown([count, list(numbers)])
            raise fields.FieldError(
                f"placement: the entry {entry} is wrong: an entry must count 1 or more of the {left} files left, and "
                f"list 1 or more node numbers below {nodes}, each once"
            )
        left -= count
        yield from (same.setdefault(numbers, numbers),) * count
