"""Describes when each rank was in each phase of a save.

The timeline is the member `save_timeline` of the manifest (docs/format.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import typed_json
from mcore_ckpt.io.typed_json import Natural

# A start and an end, in microseconds.
Span = tuple[int, int]
# The starts and the ends of one phase of a save, by world rank.
Spans = tuple[Sequence[int], Sequence[int]]

_PARTS = ("plan", "copy", "write")


@dataclass(frozen=True)
class SaveTimeline:
    """The times of one save, in microseconds since each rank's own call of `save`.

    Attributes:
        nbytes: how many bytes each rank wrote, without its part of the HuggingFace model.
        plan, copy, write: when each rank was in this phase of the save.
        commit: the time from rank 0's last written byte until rank 0 had made the manifest. The manifest cannot contain
            the times of the work that follows in a commit: writing the manifest, the syncs and the rename.
        export: when each rank exported its part of the HuggingFace model; None without `hf_model`.
        stall: how long `save` held the training up on each rank; None if `save` held the training up until the commit.
    """

    nbytes: Sequence[int]
    plan: Spans
    copy: Spans
    write: Spans
    commit: Span
    export: Spans | None = None
    stall: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Packs the numbers of all ranks, which would otherwise take five times the memory."""
        for name in ("nbytes", "stall"):
            object.__setattr__(self, name, _packed(getattr(self, name)))
        for name in (*_PARTS, "export"):
            spans = getattr(self, name)
            object.__setattr__(self, name, spans and tuple(map(_packed, spans)))


def _packed(numbers: Sequence[int] | None) -> array[int] | None:
    return numbers if numbers is None or isinstance(numbers, array) else array("q", numbers)


class _Lists(msgspec.Struct, omit_defaults=True):
    """A timeline as the manifest spells it."""

    bytes: msgspec.Raw
    commit: tuple[Natural, Natural]
    copy: tuple[msgspec.Raw, msgspec.Raw]
    plan: tuple[msgspec.Raw, msgspec.Raw]
    write: tuple[msgspec.Raw, msgspec.Raw]
    export: tuple[msgspec.Raw, msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET
    stall: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_DECODER = msgspec.json.Decoder(_Lists)


def encoded_timeline(timeline: SaveTimeline) -> dict[str, Any]:
    """Returns the timeline as JSON values: a few lists of numbers, which stay small for thousands of ranks."""
    columns = {"bytes": timeline.nbytes, "stall": timeline.stall}
    spans = {part: getattr(timeline, part) for part in (*_PARTS, "export")}
    return {
        "commit": timeline.commit,
        **{name: list(numbers) for name, numbers in columns.items() if numbers is not None},
        **{name: [list(numbers) for numbers in part] for name, part in spans.items() if part is not None},
    }


def decode_timeline(text: bytes, world_size: int) -> SaveTimeline:
    """Decodes a timeline. Raises FieldError if a list does not have one number per rank. Ignores unknown members."""
    found = typed_json.parse_exactly(text, _DECODER)
    return SaveTimeline(
        nbytes=_column(found.bytes, world_size),
        plan=_columns(found.plan, world_size),
        copy=_columns(found.copy, world_size),
        write=_columns(found.write, world_size),
        commit=found.commit,
        export=None if found.export is msgspec.UNSET else _columns(found.export, world_size),
        stall=None if found.stall is msgspec.UNSET else _column(found.stall, world_size),
    )


def _columns(texts: tuple[msgspec.Raw, msgspec.Raw], count: int) -> Spans:
    return _column(texts[0], count), _column(texts[1], count)


def _column(text: msgspec.Raw, count: int) -> array[int]:
    numbers = bytes(memoryview(text))
    found = numbers.count(b",") + 1
    if found != count:  # checked first, because decoding takes memory for each number
        raise fields.FieldError(f"the save's timeline has {found} numbers for {count} ranks")
    return array("q", typed_json.NATURALS.read(numbers, (0, len(numbers))))
