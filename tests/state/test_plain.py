"""Small state as plain values: what comes out opens under weights_only=True, what cannot is refused by its name."""

import io
import re
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.checkpoint.plain_files import pickle_plain, pickle_unchecked
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.state.plain import to_plain

Point = namedtuple("Point", "x y")


class Colour(IntEnum):
    RED = 1


def reopened(value: Any) -> Any:
    return torch.load(io.BytesIO(pickle_plain({"value": to_plain(value, "extra")})), weights_only=True)["value"]


atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(min_size=1, max_size=5)
)
keys = atoms | st.tuples(atoms, atoms)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal and of the same types all the way down: 1, 1.0 and True are equal to `==`."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a.items(), b.items()))
    return bool(a == b)


@settings(deadline=None)
@given(values)
def test_plain_values_come_back_as_they_are(value: Any) -> None:
    assert same(to_plain(value, "extra"), value)
    assert same(reopened(value), value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(-3), -3),
        (np.uint8(7), 7),
        (np.bool_(True), True),
        (np.str_("ä"), "ä"),
        (np.complex64(1j), 1j),
        (OrderedDict(b=np.int32(1), a=2), OrderedDict(b=1, a=2)),
        ({np.int64(5): np.float32(2)}, {5: 2.0}),
        ([(np.float64(1.5),)], [(1.5,)]),
    ],
)
def test_what_has_a_plain_form_gets_it(value: Any, expected: Any) -> None:
    assert same(to_plain(value, "extra"), expected)
    assert same(reopened(value), expected)


def test_tensors_are_copies_without_their_past() -> None:
    base = torch.arange(1000.0)
    leaf = torch.nn.Parameter(base[10:14])
    plain = to_plain({"t": leaf, "view": base[::100]}, "extra")
    assert type(plain["t"]) is torch.Tensor
    assert not plain["t"].requires_grad
    assert plain["t"].untyped_storage().nbytes() == 16, "it would be saved with all of its base"
    assert plain["view"].is_contiguous()
    base.zero_()
    assert plain["t"].tolist() == [10, 11, 12, 13]
    assert plain["view"].tolist() == list(range(0, 1000, 100))


def test_a_generator_becomes_its_state() -> None:
    generator = torch.Generator().manual_seed(4)
    plain = to_plain(generator, "extra")
    drawn = torch.rand(3, generator=generator)
    assert torch.rand(3, generator=torch.Generator().set_state(plain)).equal(drawn)


@pytest.mark.parametrize(
    ("value", "field", "cls"),
    [
        ({"a": [1, Fraction(1, 2)]}, "extra['a'][1]", "fractions.Fraction"),
        ({"a": Point(1, 2)}, "extra['a']", "Point"),
        ((Colour.RED,), "extra[0]", "Colour"),
        ({"f": print}, "extra['f']", "builtin_function_or_method"),
        ({"d": torch.float32}, "extra['d']", "torch.dtype"),
        ({Fraction(1): 1}, "a key of extra", "fractions.Fraction"),
        ([np.array([object()])], "extra[0]", "numpy.ndarray"),
        ([np.zeros(2)], "extra[0]", "numpy.ndarray"),
        ({"s": slice(1, 9)}, "extra['s']", "slice"),
        ([torch.Size((2, 3))], "extra[0]", "torch.Size"),
        ([np.datetime64("2026-01-01")], "extra[0]", "numpy.datetime64"),
        ([np.longdouble(1)], "extra[0]", "numpy.longdouble"),
        # torch's safe unpickler knows neither, whatever the pickle protocol.
        ([frozenset([1])], "extra[0]", "frozenset"),
        ([b""], "extra[0]", "bytes"),
        # They would come back as dicts.
        ({"x": defaultdict(list)}, "extra['x']", "collections.defaultdict"),
        ({"x": Counter("ab")}, "extra['x']", "collections.Counter"),
    ],
)
def test_the_rest_is_refused_by_field_and_class(value: Any, field: str, cls: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{re.escape(field)} is .*{re.escape(cls)}"):
        to_plain(value, "extra")


@pytest.mark.parametrize("value", [Counter("aab"), torch.device("cpu"), torch.eye(2).to_sparse()])
def test_what_torch_opens_but_a_load_would_refuse_is_not_written(value: Any) -> None:
    torch.load(io.BytesIO(pickle_unchecked({"value": value})), weights_only=True)
    with pytest.raises(ValueError, match="does not belong in such a file"):
        pickle_plain({"value": value})
