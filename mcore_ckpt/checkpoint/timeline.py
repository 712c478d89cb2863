"""Describes when each rank did each part of a save. The manifest has it as `save_timeline`, see docs/format.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.io import json_fields as fields

# A start and an end, in microseconds.
Span = tuple[int, int]
# The starts and the ends of one part of a save, by world rank.
Spans = tuple[tuple[int, ...], tuple[int, ...]]

_PARTS = ("plan", "copy", "write")


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


def encoded_timeline(timeline: SaveTimeline) -> dict[str, Any]:
    """Returns the timeline as JSON values: a few lists of numbers, which stay small for thousands of ranks."""
    record: dict[str, Any] = {part: getattr(timeline, part) for part in (*_PARTS, "commit")}
    optional = {"export": timeline.export, "stall": timeline.stall}
    return record | {"bytes": timeline.nbytes} | {name: item for name, item in optional.items() if item is not None}


def decode_timeline(item: Any, world_size: int) -> SaveTimeline:
    """Decodes and checks a timeline. Members that it does not know are ignored.

    Raises FieldError if a list does not have one number for each rank.
    """
    record = fields.as_dict(item, "save_timeline")
    plan, copy, write = (_spans(record, part, world_size) for part in _PARTS)
    start, end = _numbers(record.get("commit"), "commit", 2)
    return SaveTimeline(
        nbytes=_numbers(record.get("bytes"), "bytes", world_size),
        plan=plan,
        copy=copy,
        write=write,
        commit=(start, end),
        export=_spans(record, "export", world_size) if "export" in record else None,
        stall=_numbers(record["stall"], "stall", world_size) if "stall" in record else None,
    )


def _spans(record: Mapping[str, Any], part: str, world_size: int) -> Spans:
    columns = fields.get_list(record, part)
    if len(columns) != 2:
        raise fields.FieldError(f"{part!r} has {len(columns)} lists, not the starts and the ends")
    return _numbers(columns[0], part, world_size), _numbers(columns[1], part, world_size)


def _numbers(items: Any, part: str, count: int) -> tuple[int, ...]:
    numbers = fields.as_ints(items, part)
    if len(numbers) != count:
        raise fields.FieldError(f"{part!r} of the save's timeline has {len(numbers)} numbers, not {count}")
    return numbers
