"""What a trainer hands over comes back with its types, or is refused by its field."""

import re
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.checkpoint.plain_files import pickle_plain
from mcore_ckpt.checkpoint.pt_values import decode_pt
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.state.typed_values import TYPE, from_stored, to_stored

Point = namedtuple("Point", "x y")


class Colour(IntEnum):
    RED = 1


def reopened(value: Any) -> Any:
    """Returns a value as a load returns it. `pickle_plain` also opens the file with torch (weights_only)."""
    return from_stored(decode_pt(pickle_plain({"value": to_stored(value, "extra")})))["value"]


def same(a: Any, b: Any) -> bool:
    """True if two values are equal and have the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.equal(b)
    if isinstance(a, (list, tuple, deque)):
        ends = not isinstance(a, deque) or a.maxlen == b.maxlen
        return ends and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        factories = not isinstance(a, defaultdict) or a.default_factory is b.default_factory
        return factories and len(a) == len(b) and all(map(same, a.items(), b.items()))
    if isinstance(a, (set, frozenset)):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    return bool(a == b)


atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.integers(-5, 5).map(np.int64)
    | st.floats(allow_nan=False).map(np.float64)
)
keys = atoms | st.tuples(atoms, st.tuples(atoms)) | st.just(TYPE)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    mappings = st.dictionaries(keys, inner, max_size=3)
    return (
        lists
        | lists.map(tuple)
        | lists.map(deque)
        | mappings
        | mappings.map(OrderedDict)
        | mappings.map(lambda items: defaultdict(list, items))
        | st.sets(keys, max_size=3)
        | st.sets(keys, max_size=3).map(frozenset)
        | st.builds(slice, inner, inner, inner)
    )


@settings(deadline=None, max_examples=150)
@given(st.recursive(atoms, containers, max_leaves=8))
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(reopened(value), value)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        bytearray(b"ab"),
        bytearray(),
        deque([1, deque([2])], maxlen=3),
        Counter("abca"),
        defaultdict(None, {1: 2}),
        defaultdict(int, {np.int64(1): [np.float32(2)]}),
        torch.Size((2, 3)),
        slice(1, None, np.int64(2)),
        np.arange(6.0).reshape(2, 3).T,
        np.arange(4, dtype=">i4"),
        np.array(3, dtype=np.uint64),
        np.zeros((0, 4), np.float16),
        np.array(["text", "ä"]),
        np.array(["2026-01-01", "NaT"], "datetime64[ns]"),
        np.bool_(True),
        np.str_("ä"),
        np.str_("id\0"),
        np.bytes_(b"id\0"),
        np.str_(""),
        np.bytes_(b""),
        {np.str_("id\0"): 1, np.bytes_(b"id\0"): 2, np.str_(""): 3, b"": 4},
        {tuple(range(62)): {tuple(range(63))}},
        (1 << 2039) - 1,
        {TYPE: "deque"},
        {"tensor": torch.arange(3.0)[::2], "empty": torch.empty(0, 3)},
    ],
    ids=repr,
)
def test_types_that_torch_does_not_open_come_back(value: Any) -> None:
    assert same(reopened(value), value)


def test_a_generator_draws_what_it_would_have_drawn() -> None:
    generator = torch.Generator().manual_seed(4)
    restored = reopened({"g": generator})["g"]
    assert torch.rand(3, generator=restored).equal(torch.rand(3, generator=generator))


def test_tensors_are_copies_and_arrays_can_be_written() -> None:
    base, array = torch.arange(100.0), np.arange(3)
    stored = to_stored({"view": torch.nn.Parameter(base)[10:12], "array": array}, "extra")
    base.zero_()
    array[:] = 0
    assert stored["view"].tolist() == [10, 11]
    assert stored["view"].untyped_storage().nbytes() == 8, "it would be saved with all of its base"
    restored = from_stored(stored)["array"]
    restored += 1
    assert restored.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ({"a": [1, Fraction(1, 2)]}, "extra['a'][1]", "fractions.Fraction"),
        ([Fraction(1, 2)], "extra[0]", "use numbers, strings, bytes, tensors, NumPy's numbers, texts and times, and"),
        ({Fraction(1, 2): 1}, "a key of extra", "use numbers of at most 2039 bits, strings, bytes, or tuples"),
        ({"a": Point(1, 2)}, "extra['a']", "Point"),
        ((Colour.RED,), "extra[0]", "Colour"),
        ({"f": print}, "extra['f']", "builtin_function_or_method"),
        ({"d": torch.float32}, "extra['d']", "torch.dtype"),
        ({Fraction(1): 1}, "a key of extra", "fractions.Fraction"),
        ({(1, frozenset()): 1}, "a key of extra", "tuple"),
        ({"m": UserDict()}, "extra['m']", "UserDict"),
        ({"d": defaultdict(lambda: 1)}, "extra['d']", "defaultdict"),
        ([np.array([object()])], "extra[0]", "numpy.ndarray"),
        ([np.zeros(2, "i4,f8")], "extra[0]", "numpy.ndarray"),
        ([np.ma.masked_array([1])], "extra[0]", "MaskedArray"),
        ([np.longdouble(1)], "extra[0]", "numpy.longdouble"),
        ([torch.zeros(2).to_sparse()], "extra[0]", "torch.sparse_coo"),
        ([torch.zeros(2, device="meta")], "extra[0]", "meta"),
        # Readers would refuse these, and a save in the background would find it too late.
        ([1 << 2039], "extra[0]", "int of 2040 bits"),
        ({1 << 2039: 1}, "a key of extra", "int, which readers"),
        ([{tuple(range(64)): 1}], "a key of extra[0]", "fewer than 64"),
        ([{tuple(range(64))}], "a key of extra[0]", "fewer than 64"),
        ([torch.zeros(2, dtype=torch.uint8).view(torch.bits8)], "extra[0]", "torch.bits8"),
        ([torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)], "extra[0]", "torch.qint8"),
        ({"n": torch.nested.nested_tensor([torch.ones(2)], layout=torch.strided)}, "extra['n']", "nested"),
        (UserDict(), "extra", "UserDict"),
    ],
)
def test_the_rest_is_refused_by_field_and_type(value: Any, field: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{re.escape(field)} is .*{re.escape(words)}"):
        to_stored(value, "extra")


def test_a_value_in_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnsupportedError, match="contains itself"):
        to_stored(value, "extra")


def test_containers_that_contain_each_other_again_and_again_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save would never end."""
    monkeypatch.setattr("mcore_ckpt.state.typed_values._MOST_REPEATED", 5000)
    value: Any = [1]
    for _ in range(30):
        value = [value, value]
    with pytest.raises(UnsupportedError, match=r"^extra(\[\d\])+ is in containers that are shared"):
        to_stored(value, "extra")
    assert same(reopened([[1, (2, 3)]] * 3), [[1, (2, 3)]] * 3)


@pytest.mark.parametrize(
    "value", [{"a": 1}, OrderedDict(a=1), defaultdict(int, a=1), Counter("aa"), {(1, b""): 1}, {TYPE: 1}], ids=repr
)
def test_the_outermost_mapping_keeps_its_type(value: Any) -> None:
    assert same(from_stored(decode_pt(pickle_plain(to_stored(value, "extra")))), value)


def test_the_deepest_value_that_is_stored_can_be_read() -> None:
    value: Any = 0
    for _ in range(48):
        value = deque([value])
    assert same(reopened(value), value)


@pytest.mark.parametrize(
    "stored",
    [
        {TYPE: "os.system", "items": ["x"]},
        {TYPE: "numpy.ndarray", "dtype": "O", "shape": [1], "data": torch.zeros(8, dtype=torch.uint8)},
        {TYPE: "numpy.ndarray", "dtype": "<i8", "shape": [1 << 40], "data": torch.zeros(8, dtype=torch.uint8)},
        {TYPE: "numpy.ndarray", "dtype": "<i8", "shape": [2], "data": None},
        {TYPE: "defaultdict", "keys": [], "values": [], "factory": "eval"},
        {TYPE: "dict", "keys": [1], "values": []},
        {TYPE: "deque", "items": [], "maxlen": "x"},
        {TYPE: "set", "items": [[1]]},
        {TYPE: "torch.Generator", "state": torch.zeros(3, dtype=torch.uint8)},
        [{TYPE: "bytearray", "data": shared} for shared in [torch.zeros(9, dtype=torch.uint8)] for _ in range(2)],
    ],
)
def test_hostile_values_are_refused(stored: Any) -> None:
    with pytest.raises(ValueError, match=r"type|dtype|fit together|share|pickle"):
        from_stored([stored])
