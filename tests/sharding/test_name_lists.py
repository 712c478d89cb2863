"""Short lists of names: they stand for the names that they were made of, and for no other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.sharding.name_lists import NameLists, OrderedNames, fold, join
from mcore_ckpt.sharding.names import natural_order

NAMES = st.one_of(
    st.builds("decoder.layers.{}.mlp.experts.linear_fc{}.weight{}".format, *[st.integers(0, 12)] * 3),
    st.builds("decoder.layers.{}.input_layernorm.weight".format, st.integers(0, 12)),
    st.sampled_from(["embedding.weight", "a[0].w", "=b", "x.007.w", f"y.{10**12}.w", "1", "", "8.9", "layers.[1-2].w"]),
    st.text("01.[-=,a", max_size=8),
)


@given(st.lists(st.sets(NAMES, max_size=30), max_size=4), NAMES)
def test_each_name_is_found_in_its_lists_and_in_no_other(groups: list[set[str]], other: str) -> None:
    found = NameLists(map(fold, groups))
    for name in {other}.union(*groups):
        assert found.lists_with(name) == {number for number, names in enumerate(groups) if name in names}


@given(st.lists(st.lists(NAMES, max_size=20), max_size=4))
def test_what_several_ranks_have_folded_is_what_one_would_have(by_rank: list[list[str]]) -> None:
    assert join(map(fold, by_rank)) == fold(name for names in by_rank for name in reversed(names))


@given(st.lists(st.lists(NAMES, max_size=20), max_size=4))
def test_folded_names_have_the_places_of_the_names(by_rank: list[list[str]]) -> None:
    lists = list(map(fold, by_rank))
    ordered = OrderedNames(lists)
    wanted = sorted(set().union(*by_rank), key=natural_order)
    assert list(ordered.names) == wanted
    for names, entries in zip(by_rank, lists, strict=True):
        assert sorted(ordered.positions_of(entries)) == sorted(map(wanted.index, set(names)))


def test_a_name_that_is_told_in_two_ways_is_one_name() -> None:
    ordered = OrderedNames([["=head.w"], ["head.w"]])
    assert ordered.names == ("head.w",)
    assert set(ordered.positions_of(["=head.w", "head.w"])) == {0}


def test_a_large_model_is_a_few_lines() -> None:
    names = [f"layers.{n}.experts.fc{k}.weight{e}" for n in range(61) for k in (1, 2) for e in range(64)]
    assert fold(names) == ["layers.[0-60].experts.fc[1-2].weight[0-63]"]
    assert fold(names[:-1]) == [
        "layers.60.experts.fc1.weight[0-63]",
        "layers.60.experts.fc2.weight[0-62]",
        "layers.[0-59].experts.fc[1-2].weight[0-63]",
    ]


@pytest.mark.parametrize("entry", ["w[1-]", "w[,]", "w[-]", 3, None])
def test_another_form_is_refused(entry: object) -> None:
    with pytest.raises(ValueError, match=r"range|name"):
        NameLists([[entry]])  # type: ignore[list-item]


@pytest.mark.parametrize("entries", [["w[0-999999999]"], ["w[1-].x"], [f"a{n}.[0-9999].[0-9999]" for n in range(9)]])
def test_a_list_that_stands_for_too_many_names_is_refused(entries: list[str]) -> None:
    for read in (join, OrderedNames):
        with pytest.raises(ValueError, match=r"stand for \d+ names|no range of numbers"):
            read([entries])


def test_a_range_costs_no_memory_whatever_it_says() -> None:
    assert NameLists([["w[0-999999999].[0-999999999]"]]).lists_with("w5.6") == {0}
