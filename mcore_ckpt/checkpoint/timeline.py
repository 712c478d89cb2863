"""Describes when each rank did each part of a save. The manifest has it as `save_timeline`, see docs/format.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import typed_json
from mcore_ckpt.io.typed_json import Natural

# A start and an end, in microseconds.
Span = tuple[int, int]
# The starts and the ends of one part of a save, by world rank.
Spans = tuple[tuple[int, ...], tuple[int, ...]]

_PARTS = ("plan", "copy", "write")
_Numbers = tuple[Natural, ...]


@dataclass(frozen=True)
class SaveTimeline:
    """The times of one save, in microseconds since each rank's own call of `save`.

    Attributes:
        nbytes: how many bytes each rank wrote, without its part of the HuggingFace model.
        plan, copy, write: when each rank did this part of the save.
        commit: on rank 0, from its last byte until it had made the manifest. The manifest cannot hold what comes
            after: writing it, the syncs, and the rename.
        export: when each rank exported its part of the HuggingFace model; None without `hf_model`.
        stall: how long `save` held the training up on each rank; None if until the commit.
    """

    nbytes: tuple[int, ...]
    plan: Spans
    copy: Spans
    write: Spans
    commit: Span
    export: Spans | None = None
    stall: tuple[int, ...] | None = None


class _Lists(msgspec.Struct, omit_defaults=True):
    """A timeline as the manifest spells it."""

    bytes: _Numbers
    commit: tuple[Natural, Natural]
    copy: tuple[_Numbers, _Numbers]
    plan: tuple[_Numbers, _Numbers]
    write: tuple[_Numbers, _Numbers]
    export: tuple[_Numbers, _Numbers] | None = None
    stall: _Numbers | None = None


_DECODER = msgspec.json.Decoder(_Lists)


def encoded_timeline(timeline: SaveTimeline) -> dict[str, Any]:
    """Returns the timeline as JSON values: a few lists of numbers, which stay small for thousands of ranks."""
    record: dict[str, Any] = {part: getattr(timeline, part) for part in (*_PARTS, "commit")}
    optional = {"export": timeline.export, "stall": timeline.stall}
    return record | {"bytes": timeline.nbytes} | {name: item for name, item in optional.items() if item is not None}


def decode_timeline(text: bytes, world_size: int) -> SaveTimeline:
    """Decodes and checks a timeline. Members that it does not know are ignored.

    Raises FieldError if a list does not have one number for each rank.
    """
    found = typed_json.parse_exactly(text, _DECODER)
    columns = (found.bytes, found.stall, *found.plan, *found.copy, *found.write, *(found.export or ()))
    for column in columns:
        if column is not None and len(column) != world_size:
            raise fields.FieldError(f"the save's timeline has {len(column)} numbers for {world_size} ranks")
    return SaveTimeline(found.bytes, found.plan, found.copy, found.write, found.commit, found.export, found.stall)
