"""Which saved param group a live one gets, by members and by settings."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.state.group_fields import FIELDS, Option, write_group
from mcore_ckpt.state.group_matching import LiveGroup, SavedGroup, check_equal, joined, live_groups, match
from mcore_ckpt.state.param_groups import Schedules, find_counterparts

PLAIN: dict[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False}
PLAIN |= {"default_config": True, "max_lr": 0.1, "min_lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "lr": 0.05}


def group(**fields: Any) -> dict[str, Any]:
    own = {"default_config": False} if "max_lr" in fields else {}
    return {**PLAIN, **own, **fields}


def found(
    live: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]], members: Sequence[set[int]] | None = None
) -> list[int | None]:
    """The number of the saved group for each live group. `members`: the saved groups that have each one's members."""
    groups = live_groups(live)
    if members is not None:
        groups = [replace(g, found_in=frozenset(m), has_members=True) for g, m in zip(groups, members, strict=True)]
    else:
        groups = [replace(g, has_members=True) for g in groups]
    numbers = match(groups, [SavedGroup(n, fields) for n, fields in enumerate(saved)], members is not None)
    return [numbers[group.key] for group in groups]


D, WD0, A, B = group(), group(wd_mult=0.0), group(max_lr=0.01), group(max_lr=0.02)
EXPERT = group(is_expert_parallel=True)


def of_0_15(**fields: Any) -> dict[str, Any]:
    return {key: value for key, value in PLAIN.items() if key != "default_config"} | fields


@pytest.mark.parametrize(
    ("live", "saved", "members", "wanted"),
    [
        # The same parameters are the same group, whatever has changed, and wherever it stands.
        ([D, B, group(max_lr=0.05)], [D, A, B], [{0}, {2}, {1}], [0, 2, 1]),
        ([group(wd_mult=0.5), group(betas=(0.5, 0.6))], [D, WD0], [{1}, {0}], [1, 0]),
        ([D, D], [group(eps=1e-3), group(eps=1e-4)], [{1}, {0}], [1, 0]),
        # A group was divided: the part that is as it was, or that has its structure, goes on as it.
        ([D, A], [D], [{0}, {0}], [0, None]),
        ([group(), group(max_lr=0.01)], [D | {"max_lr": 0.5}], [{0}, {0}], [0, None]),
        # Merged: the settings say as which it goes on.
        ([D], [D, A], [{0, 1}], [0]),
        ([D | {"max_lr": 0.5}], [D, A], [{0, 1}], [0]),
        # A parameter has moved to another group.
        ([D, WD0], [D, WD0], [{0, 1}, {1}], [0, 1]),
        # Nothing says as which it goes on.
        ([group(wd_mult=0.5)], [D, WD0], [{0, 1}], [None]),
        ([group(max_lr=0.3), group(max_lr=0.4)], [A], [{0}, {0}], [None, None]),
        # It was divided while the run's betas changed, which are the checkpoint's anyway.
        ([D | {"betas": (0.5, 0.6)}, D | {"betas": (0.5, 0.6), "end_wd": 0.5}], [D], [{0}, {0}], [0, None]),
        # Experts get a group of their own with expert parallelism, and lose it without.
        ([D, EXPERT], [D], [{0}, {0}], [0, 0]),
        ([D], [D, EXPERT], [{0, 1}], [0]),
        ([D], [D, EXPERT | {"eps": 1e-3}], [{0, 1}], [0]),
        ([group(eps=1e-5)], [D, EXPERT | {"eps": 1e-3}], [{0, 1}], [None]),
    ],
)
def test_by_members(
    live: list[dict[str, Any]], saved: list[dict[str, Any]], members: list[set[int]], wanted: list[int | None]
) -> None:
    assert found(live, saved, members) == wanted


@pytest.mark.parametrize(
    ("live", "saved", "wanted"),
    [
        ([D, B, A], [D, A, B], [0, 2, 1]),
        # All rates have changed: the structure still tells the groups apart.
        ([group() | {"max_lr": 0.5}, WD0 | {"max_lr": 0.5}], [WD0, D], [1, 0]),
        ([D | {"max_lr": 0.5}, A], [A, D], [1, 0]),
        # Each saved group goes on as another one, so this one is new.
        ([D, A], [D], [0, None]),
        ([D, WD0, A], [D, WD0], [0, 1, None]),
        # Of 0.15, which marks the groups that have `decoupled_lr`, and names no configuration.
        ([D, WD0, A], [of_0_15(), of_0_15(wd_mult=0.0), of_0_15(is_decoupled_lr=True, max_lr=0.01)], [0, 1, 2]),
        # 0 and 0.0 are the same: they must not be new because another group is exact.
        ([D | {"min_lr": 0}, A], [A, D], [1, 0]),
        ([group(start_wd=1), group(start_wd=2)], [group(start_wd=2.0), group(start_wd=1.0)], [1, 0]),
        ([D, A, B, group(max_lr=0.07)], [D, A, B], [0, 1, 2, None]),
        ([D, EXPERT], [D], [0, 0]),
        # Of ms-swift 4.2, which has no `lr_mult`; of NeMo; and by the rates of a torch scheduler.
        ([D], [{key: value for key, value in D.items() if key != "lr_mult"}], [0]),
        ([D], [{f"pre_{key}" if "mult" in key else key: value for key, value in D.items()}], [0]),
        ([{"lr": 0.1}, {"lr": 0.2}], [{"lr": 0.2}, {"lr": 0.1}], [1, 0]),
    ],
)
def test_by_settings(live: list[dict[str, Any]], saved: list[dict[str, Any]], wanted: list[int | None]) -> None:
    assert found(live, saved) == wanted


@pytest.mark.parametrize(
    ("live", "saved"),
    [
        ([D, group(max_lr=0.05), B], [D, A, B]),  # 0.05 may be what 0.01 was, or new
        ([group(max_lr=0.05)], [A, B]),
        ([D], [D | {"mark": 1}, D | {"mark": 2}]),
        ([group(wd_mult=0.5)], [D]),
        ([D], []),
        ([{"lr": 0.3}], [{"lr": 0.2}, {"lr": 0.1}]),
        ([group(max_lr=0.3), group(max_lr=0.4)], [A]),
    ],
)
def test_what_settings_leave_open_is_refused(live: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    with pytest.raises(CheckpointMismatchError, match="counterparts among the"):
        found(live, saved)


FIELD_VALUES = {
    "wd_mult": [0.0, 1.0],
    "max_lr": [0.01, 0.02, float("nan")],
    "default_config": [True, False],
    "betas": [(0.9, 0.95), (0.9, 0.99)],
    "eps": [1e-8, 1e-5],
    "start_wd": [None, 0.1],
    "is_expert_parallel": [False, True],
}
GROUPS = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FIELD_VALUES.items()})


@given(st.lists(GROUPS, min_size=1, max_size=5), st.data())
def test_the_same_parameters_are_the_same_group(saved: list[dict[str, Any]], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(saved))))
    live = data.draw(st.lists(GROUPS, min_size=len(saved), max_size=len(saved)))
    assert found(live, saved, [{number} for number in order]) == list(order)


@given(st.lists(GROUPS, min_size=1, max_size=5, unique_by=repr), st.data())
def test_equal_settings_are_found_in_any_order(saved: list[dict[str, Any]], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(saved))))
    for place, number in zip(order, found([saved[n] for n in order], saved), strict=True):
        assert number is not None
        without = [{k: repr(v) for k, v in saved[n].items() if k != "is_expert_parallel"} for n in (place, number)]
        assert without[0] == without[1]


@given(st.lists(GROUPS, min_size=1, max_size=4), st.lists(GROUPS, min_size=1, max_size=4), st.data())
def test_a_counterpart_never_depends_on_the_order(
    live: list[dict[str, Any]], saved: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Nor are values of another structure ever taken by settings alone."""
    members = data.draw(
        st.none() | st.lists(st.sets(st.integers(0, len(saved) - 1)), min_size=len(live), max_size=len(live))
    )

    def outcome(live_order: Sequence[int], saved_order: Sequence[int]) -> Any:
        moved = None if members is None else [{saved_order.index(n) for n in members[i]} for i in live_order]
        try:
            numbers = found([live[i] for i in live_order], [saved[n] for n in saved_order], moved)
        except CheckpointMismatchError:
            return "refused"
        values = [None if n is None else repr(comparable(saved[saved_order[n]])) for n in numbers]
        return sorted(zip((repr(live[i]) for i in live_order), map(str, values), strict=True))

    every = [
        outcome(*orders)
        for orders in itertools.product(
            (range(len(live)), range(len(live) - 1, -1, -1)), (range(len(saved)), range(len(saved) - 1, -1, -1))
        )
    ]
    if len({repr(group) for group in live}) == len(live):
        assert all(each == every[0] for each in every)


def comparable(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in sorted(group) if key != "is_expert_parallel" and group[key] is not None}


def test_ranks_with_other_orders_and_members_agree() -> None:
    """ms-swift lists a rank's own groups first."""
    ranks = [[D, A], [A, D]]
    known = [live_groups(groups) for groups in ranks]
    known[0][1] = replace(known[0][1], found_in=frozenset({3}), has_members=True, member="b")
    known[1][0] = replace(known[1][0], found_in=frozenset({5}), has_members=True, member="a")
    together = {group.key: group for group in joined(known)}
    assert (together[known[0][1].key].found_in, together[known[0][1].key].member) == (frozenset({3, 5}), "a")
    assert not together[known[0][0].key].has_members
    assert len({group.key for group in live_groups([D, D])}) == 2


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("run", {"max_lr": 0.5, "lr": 0.4, "betas": (0.1, 0.2), "is_expert_parallel": True, "end_wd": 0.7, "eps": 1.0}),
        ("checkpoint", {"max_lr": 0.1, "lr": 0.05, "betas": (0.1, 0.2), "is_expert_parallel": True, "eps": 1.0}),
    ],
)
def test_whose_value_counts(option: Option, wanted: dict[str, Any]) -> None:
    live = {"max_lr": 0.5, "lr": 0.4, "betas": (0.3, 0.4), "is_expert_parallel": True, "end_wd": 0.7, "fused": True}
    live |= {"lr_mult": 0.5, "wd_mult": 0.5}
    saved = {"max_lr": 0.1, "lr": 0.05, "betas": (0.1, 0.2), "is_expert_parallel": False, "fused": False, "eps": 1.0}
    group = dict(live)
    write_group(group, saved | {"pre_wd_mult": 0.25}, option, ())
    multipliers = {"lr_mult": 0.5, "wd_mult": 0.5} if option == "run" else {"lr_mult": 1.0, "wd_mult": 0.25}
    assert group == wanted | multipliers | {"fused": True}


def test_a_rate_in_a_tensor_stays_in_it() -> None:
    """A captured graph reads it there (`optimizer_cuda_graph`)."""
    rate = torch.tensor(0.5)
    live = {"lr": rate, "eps": 1e-8}
    write_group(live, {"lr": 0.25, "eps": torch.tensor(1.0)}, "checkpoint", ())
    assert live["lr"] is rate
    assert (rate.item(), live["eps"]) == (0.25, 1.0)
    write_group(live, {"lr": torch.tensor(0.125)}, "checkpoint", ())
    assert (live["lr"] is rate, rate.item()) == (True, 0.125)


def test_without_an_option_schedules_must_be_equal() -> None:
    def check(live: dict[str, Any], saved: dict[str, Any]) -> None:
        (group,) = live_groups([live])
        check_equal([group], {0: SavedGroup(0, saved)}, {group.key: 0}, {"end_wd": 0.1}, {"end_wd": 0.1})

    check(D | {"end_wd": 0.1}, D)  # as the scheduler has it
    check(D | {"min_lr": 0, "max_lr": 1}, D | {"min_lr": 0.0, "max_lr": 1.0, "is_decoupled_lr": True})
    check(D, {key: value for key, value in D.items() if key != "lr_mult"} | {"betas": (0.1, 0.2)})
    for changed in ({"end_wd": 0.2}, {"max_lr": 0.2}, {"wd_mult": 0.0}):
        with pytest.raises(CheckpointMismatchError, match=f"{min(changed)}: wanted .*: use the same schedule"):
            check(D | changed, D)


@pytest.mark.parametrize(
    ("live", "saved", "members", "of_moments", "kept"),
    [
        # Several became one.
        (A, [D, WD0], {0, 1}, 0, "whose parameters were in 2 groups with another default_config, max_lr, wd_mult"),
        (group(wd_mult=0.5), [D, WD0], {0, 1}, 0, "whose parameters were in 2 groups with another wd_mult"),
        (group(wd_mult=0.5), [D, WD0 | {"eps": 1e-3}], {0, 1}, None, "in 2 groups with another wd_mult"),
        (D, [D | {"lr": 0.3}, D | {"lr": 0.4}], {0, 1}, 0, "in 2 groups that its settings do not tell apart"),
        (A, [D], set(), None, "of w (default_config False, max_lr 0.01, min_lr 0.0)"),
    ],
)
def test_moments_keep_the_settings_that_they_were_made_with(
    live: dict[str, Any], saved: list[dict[str, Any]], members: set[int], of_moments: int | None, kept: str
) -> None:
    """Even if the group goes on as no saved one."""
    (group,) = live_groups([live | {"betas": (0.1, 0.2)}])
    group = replace(group, has_members=True, member="w", found_in=frozenset(members))
    groups = [SavedGroup(number, fields) for number, fields in enumerate(saved)]
    found = find_counterparts([group], groups, True, Schedules("checkpoint", {}, {}))
    assert found.numbers == {group.key: None}
    assert found.of_moments.get(group.key) == of_moments
    assert found.changes.kept[0].endswith(kept)
    told = "betas [0.9, 0.95] (the run asked for [0.1, 0.2])"
    assert [text for text in found.changes.replaced if told in text] == [*found.changes.replaced]
    assert len(found.changes.replaced) == (of_moments is not None)


def test_the_documentation_has_all_fields() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "resume.md").read_text()
    counts = {
        "structure": "as the schedule",
        "schedule": "as the schedule",
        "rate": "as the schedule",
        "optimizer": "the checkpoint's",
        "class": "the run's",
        "mark": "the run's",
    }
    for name, field in FIELDS.items():
        default = "" if field.default is None else f"`{field.default}`"
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert row.endswith(f" | {counts[field.rule]} | {default} |"), name


def test_live_groups_say_what_a_user_can_set() -> None:
    (group,) = live_groups([A | {"start_wd": 0.2}])
    assert isinstance(group, LiveGroup)
    text = replace(group, member="embedding.weight").describe()
    assert text == "of embedding.weight (default_config False, max_lr 0.01, min_lr 0.0, start_wd 0.2)"
