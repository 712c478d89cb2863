"""JSON that is decoded to stated types, piece by piece, says what it says as a whole, and each lie is found."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.io import typed_json
from mcore_ckpt.io.json_fields import FieldError
from mcore_ckpt.io.typed_json import LongList, LongObject, Natural


class Entry(msgspec.Struct):
    first: Natural
    name: str
    of: tuple[Natural, ...] = ()


LIST: LongList[Entry] = LongList(Entry, b'},{"first":')
NUMBERS: LongList[tuple[int, tuple[int, ...]]] = LongList(tuple[Natural, tuple[Natural, ...]], b"]],[")
OBJECT: LongObject[str] = LongObject(str, b'","')
# Text that looks like the end of a value and the beginning of another one.
texts = st.text(st.sampled_from(list('ab"},{[]:\\é\U0001f600')), max_size=12) | st.sampled_from(
    ['},{"first":', '","', "]],["]
)
entries = st.builds(Entry, st.integers(0, 2**62), texts, st.lists(st.integers(0, 300), max_size=3).map(tuple))


def spelled(value: Any) -> bytes:
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":"), ensure_ascii=False).encode()


def in_the_midst(text: bytes) -> tuple[bytes, tuple[int, int]]:
    return b'{"all":' + text + b',"more":[]}', (7, 7 + len(text))


@settings(deadline=None)
@given(st.lists(entries, max_size=8), st.integers(1, 60))
def test_a_list_in_pieces_is_the_whole_list(wanted: list[Entry], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typed_json, "_PIECE", piece)
        assert list(LIST.read(*in_the_midst(spelled(wanted)))) == wanted


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 99), st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple)), max_size=9)
)
def test_a_list_of_numbers_in_pieces(wanted: list[tuple[int, tuple[int, ...]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typed_json, "_PIECE", 5)
        assert list(NUMBERS.read(*in_the_midst(spelled(wanted)))) == wanted


@settings(deadline=None)
@given(st.dictionaries(texts, texts, max_size=8), st.integers(1, 60))
def test_an_object_in_pieces_is_the_whole_object_or_refused(wanted: dict[str, str], piece: int) -> None:
    """A string that is nothing but a comma looks like the end of one and the beginning of another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typed_json, "_PIECE", piece)
        try:
            found = dict(OBJECT.read(*in_the_midst(spelled(wanted))))
        except FieldError:
            assert "," in {*wanted, *wanted.values()}
        else:
            assert found == wanted


@settings(deadline=None)
@given(st.dictionaries(texts, st.integers() | texts | st.lists(texts), max_size=5))
def test_the_places_of_members(wanted: dict[str, Any]) -> None:
    data = spelled(wanted)
    places = typed_json.members(data)
    if places is None:
        assert not wanted or any(json.dumps(name, ensure_ascii=False)[1:-1] != name for name in wanted)
    else:
        assert {name: json.loads(data[slice(*place)]) for name, place in places.items()} == wanted


@pytest.mark.parametrize(
    "text",
    [
        '[{"first":1,"first":2,"name":"a"}]',
        '[{"first":1,"name":"a"},{"first":2,"name":"a","name":"b"}]',
        '[{"first":1,"name":"a","more":{"x":1,"x":2}}]',
        '[{"first":-1,"name":"a"}]',
        '[{"first":1.0,"name":"a"}]',
        '[{"first":true,"name":"a"}]',
        '[{"first":4611686018427387905,"name":"a"}]',
        '[{"name":"a"}]',
        '[{"first":1,"name":"\\ud800"}]',
        '[{"first":1,"name":"a"},]',
        '[{"first":1,"name":"a"}',
        "{}",
        "null",
        "[[]]",
        '["a"]',
        "[NaN]",
    ],
)
def test_what_lies_is_refused(text: str) -> None:
    with pytest.raises(FieldError):
        list(LIST.read(text.encode(), (0, len(text))))


def test_unknown_members_are_passed_over() -> None:
    text = b'[{"first":1,"more":[{"x":1}],"name":"a"},{"first":2,"name":"b"}]'
    assert list(LIST.read(text, (0, len(text)))) == [Entry(1, "a"), Entry(2, "b")]


@pytest.mark.parametrize("text", ['{"a":1,"a":2}', '{"a": 1}', "[1]", "", '{"a":1}x', "{" + '"a":' * 400_000, "{}"])
def test_no_places_of_what_is_not_as_short_as_can_be(text: str) -> None:
    assert typed_json.members(text.encode()) is None
