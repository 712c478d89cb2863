"""The saved param groups of a run's groups: what each rank knows of them, and what rank 0 decides for all."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.load.group_plan import GroupPlan, PartGroups, plan_groups
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.group_matching import LiveGroup
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.param_groups import SavedPart, Schedules, group_keys, match_parts
from mcore_ckpt.state.shards import ParameterState
from tests.support.stored_tensors import OPTIMIZER_FILE, checkpoint, locator_of, shard

NAMES = ("decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight", "output_layer.weight")
OF_RUN = Schedules("run", {}, {})


def adam(groups: Sequence[Mapping[str, Any]]) -> OptimizerPart:
    """A part with one parameter for each name of a group."""
    inner = torch.optim.Adam(
        [{**group, "params": [torch.nn.Parameter(torch.zeros(2)) for _ in group["params"]]} for group in groups]
    )
    return OptimizerPart(SimpleNamespace(optimizer=inner), inner)


def states_of(groups: Sequence[Mapping[str, Any]], part: OptimizerPart) -> list[ParameterState]:
    """The states of the parameters that this rank owns, in the order of the groups."""
    found = []
    for number, (group, live) in enumerate(zip(groups, part.param_groups, strict=True)):
        for name, tensor in zip(group["params"], live["params"], strict=True):
            found.append(
                ParameterState(name, Region.whole((2,)), tensor, tensor, True, False, False, number, moments={})
            )
    return found


def saved_as(groups: Sequence[Mapping[str, Any]], with_members: bool = True) -> dict[str, Any]:
    """An optimizer as `common.pt` has it."""
    fields = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    members = {"members": [list(group["params"]) for group in groups]} if with_members else {}
    return {"kind": "Adam", "param_groups": fields, "step": 3.0, "grad_scaler": None, **members}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "actor"
    return checkpoint(folder, {OPTIMIZER_FILE: [shard(name, torch.zeros(2), "param") for name in NAMES]})


def planned(
    stored: Path,
    saved: Sequence[Mapping[str, Any]],
    live: Sequence[Mapping[str, Any]],
    schedules: Schedules = OF_RUN,
    with_members: bool = True,
    owned: Sequence[str] = NAMES,
) -> tuple[GroupPlan, tuple[SavedPart, ...]]:
    """One rank's plan, which owns state of `owned` alone."""
    part = adam(live)
    optimizers = [saved_as(saved, with_members)]
    found = match_parts([part], optimizers)
    states = [state for state in states_of(live, part) if state.name in owned]
    keys = group_keys([part])
    return plan_groups(optimizers, [part], keys, [states], found, locator_of(stored), schedules), found


def groups(*members: Sequence[str], **fields: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"params": list(names), "lr": 0.1, **{key: values[number] for key, values in fields.items()}}
        for number, names in enumerate(members)
    ]


A, B, C = NAMES


def test_groups_are_found_by_their_members_wherever_they_are_in_the_list(stored: Path) -> None:
    saved = groups([A], [B, C], weight_decay=[0.0, 0.1])
    live = groups([C, B], [A], weight_decay=[0.5, 0.6])
    plan, parts = planned(stored, saved, live)
    outcome = plan.decide([plan.to_record()])
    (complete,) = plan.complete(parts, outcome)
    assert complete.numbers == [1, 0]
    assert complete.param_groups is not None
    assert [group and group["weight_decay"] for group in complete.param_groups] == [0.1, 0.0]
    assert outcome["kept"] == []


def test_what_ranks_know_of_a_group_counts_together(stored: Path) -> None:
    """One rank owns state of a part of its members, and another one of the rest, which were in another group."""
    saved = groups([A], [B], [C], wd_mult=[1.0, 0.5, 0.0])
    live = groups([A, B], [C], wd_mult=[0.5, 0.0])
    here, parts = planned(stored, saved, live, owned=[A, C])
    there, _ = planned(stored, saved, live, owned=[B])
    alone = here.decide([here.to_record()])
    assert here.complete(parts, alone)[0].numbers == [0, 2]
    for records in ([here, there], [there, here]):
        outcome = here.decide([plan.to_record() for plan in records])
        assert here.complete(parts, outcome)[0].numbers == [1, 2]
        assert here.complete(parts, outcome) == there.complete(parts, outcome)


def test_a_group_of_several_ones_with_other_rates_keeps_the_runs(stored: Path) -> None:
    saved = groups([A], [B], [C], wd_mult=[1.0, 0.5, 0.0])
    live = groups([A, B], [C], wd_mult=[2.0, 0.0])
    plan, parts = planned(stored, saved, live)
    outcome = plan.decide([plan.to_record()])
    (complete,) = plan.complete(parts, outcome)
    assert complete.numbers == [None, 2]
    assert complete.param_groups is not None
    assert complete.param_groups[0] is None
    assert len(outcome["kept"]) == 1
    assert f"of {A}" in outcome["kept"][0]
    assert "whose parameters were in 2 groups" in outcome["kept"][0]
    # The moments were made with the same settings of the optimizer, so those count even so.
    assert complete.of_moments[0] is not None


def test_a_changed_schedule_is_refused_where_both_must_be_equal(stored: Path) -> None:
    saved, live = groups([A, B], [C], max_lr=[1.0, 2.0]), groups([A, B], [C], max_lr=[1.0, 3.0])
    plan, _ = planned(stored, saved, live, Schedules("equal", {}, {}))
    words = rf"the param group of {C} .*: max_lr: wanted 3\.0, found 2\.0: use the same schedule"
    with pytest.raises(CheckpointMismatchError, match=words):
        plan.decide([plan.to_record()])
    for option in ("run", "checkpoint"):
        plan, _ = planned(stored, saved, live, Schedules(option, {}, {}))
        assert plan.parts[0] is not None
        assert plan.decide([plan.to_record()])["numbers"] == [{key: n for n, key in enumerate(plan.parts[0].keys)}]


def test_groups_without_known_members_must_be_told_apart_by_their_settings(stored: Path) -> None:
    saved = groups([A], [B], [C], wd_mult=[1.0, 0.5, 0.0])
    plan, parts = planned(stored, saved, groups([A], [B], [C], wd_mult=[0.0, 1.0, 0.5]), with_members=False)
    assert plan.complete(parts, plan.decide([plan.to_record()]))[0].numbers == [2, 0, 1]
    plan, _ = planned(stored, saved, groups([A], [B], [C], wd_mult=[0.0, 1.0, 0.7]), with_members=False)
    with pytest.raises(CheckpointMismatchError, match=r"wd_mult 0\.7\) has 0 counterparts among the 3 saved groups"):
        plan.decide([plan.to_record()])


def test_parts_that_take_no_groups_are_left_out(stored: Path) -> None:
    """Those without parameters, and those that start anew."""
    live = groups([A])
    part, empty = adam(live), OptimizerPart(SimpleNamespace(optimizer=None), None)
    saved = (SavedPart((), 1, None, candidates=(0,)), SavedPart((), None, None))
    keys = [group_keys([part])[0], ()]
    states = [states_of(live, part), []]
    plan = plan_groups([saved_as(live)], [part, empty], keys, states, saved, locator_of(stored), OF_RUN)
    assert [each is None for each in plan.parts] == [False, True]
    anew = (SavedPart(None, None, None, starts_anew=True), saved[1])
    plan = plan_groups([saved_as(live)], [part, empty], keys, states, anew, locator_of(stored), OF_RUN)
    assert plan.parts == (None, None)
    outcome = plan.decide([plan.to_record(), plan.to_record()])
    assert outcome["numbers"] == [{}, {}]
    assert plan.complete(anew, outcome) == anew


def test_without_members_only_groups_of_matched_parts_are_candidates(stored: Path) -> None:
    """With members, all groups of the same kind of optimizer are."""
    saved = [{**saved_as(groups([A])), "kind": "Muon"}, saved_as(groups([B]))]
    live = groups([A], [B])
    part = adam(live)
    arguments = ([part], group_keys([part]), [states_of(live, part)], match_parts([part], saved))
    plan = plan_groups(saved, *arguments, locator_of(stored), OF_RUN)
    assert plan.parts[0] is not None
    assert plan.parts[0].candidates == (1,)
    assert [sorted(group.found_in) for group in plan.parts[0].live] == [[], [1]]
    for state in saved:
        del state["members"]
    plan = plan_groups(saved, *arguments, locator_of(stored), OF_RUN)
    assert plan.parts[0] is not None
    assert plan.parts[0].candidates == arguments[3][0].candidates == (1,)
    assert not any(group.found_in for group in plan.parts[0].live)


def test_a_group_may_come_from_another_part_of_the_same_kind(stored: Path) -> None:
    """Of a chain of two, in which parameters have moved from one to the other."""
    saved = [saved_as(groups([A])), saved_as(groups([B]))]
    live = [groups([B]), groups([A])]
    parts = [adam(each) for each in live]
    states = [states_of(each, part) for each, part in zip(live, parts, strict=True)]
    found = match_parts(parts, saved)
    assert [state.candidates for state in found] == [(0,), (1,)]
    plan = plan_groups(saved, parts, group_keys(parts), states, found, locator_of(stored), OF_RUN)
    outcome = plan.decide([plan.to_record()])
    assert [state.numbers for state in plan.complete(found, outcome)] == [[1], [0]]


def test_a_group_is_never_taken_from_another_kind_of_optimizer(stored: Path) -> None:
    """Although its settings are the same, and nothing else is known."""
    saved = [{**saved_as(groups([A]), with_members=False), "kind": "Muon"}, saved_as(groups([B]), with_members=False)]
    live = groups([A])
    part = adam(live)
    found = match_parts([part], saved)
    plan = plan_groups(saved, [part], group_keys([part]), [states_of(live, part)], found, locator_of(stored), OF_RUN)
    assert plan.complete(found, plan.decide([plan.to_record()]))[0].numbers == [1]


def test_members_are_known_by_their_names_in_the_checkpoint(tmp_path: Path) -> None:
    """Which may be synonyms of the live ones."""
    stored_name = "decoder.layers.0.input_layernorm.weight"
    live_name = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    folder = checkpoint(tmp_path / "actor", {OPTIMIZER_FILE: [shard(stored_name, torch.zeros(2), "param")]})
    plan, _ = planned(folder, groups([stored_name]), groups([live_name]), owned=[live_name])
    assert plan.parts[0] is not None
    assert [sorted(group.found_in) for group in plan.parts[0].live] == [[0]]
    assert plan.parts[0].live[0].member == live_name


def test_damaged_members_are_refused(stored: Path) -> None:
    saved = saved_as(groups([A], [B]))
    saved["members"] = saved["members"][:1]
    part = adam(groups([A], [B]))
    with pytest.raises(CheckpointCorruptError, match=r"members of param groups: 1 lists for 2 groups"):
        plan_groups([saved], [part], [()], [[]], match_parts([part], [saved]), locator_of(stored), OF_RUN)


live_group = st.builds(
    LiveGroup,
    key=st.text(max_size=5),
    settings=st.dictionaries(
        st.sampled_from(["max_lr", "min_lr", "eps", "betas"]),
        st.floats() | st.just(math.inf) | st.lists(st.floats(), max_size=2),
        max_size=3,
    ),
    is_of_experts=st.booleans(),
    found_in=st.frozensets(st.integers(0, 9), max_size=4),
    has_members=st.booleans(),
    member=st.text(max_size=5),
)


@given(st.lists(live_group, max_size=3), st.lists(st.integers(0, 9), max_size=4))
def test_what_a_rank_sends_arrives_as_it_was(live: list[LiveGroup], candidates: list[int]) -> None:
    """In strict JSON, although a rate may be infinite or no number."""
    groups = PartGroups(tuple(live), tuple(candidates))
    text = json.dumps(groups.to_record(), allow_nan=False)
    found = PartGroups.from_record(json.loads(text))
    assert found.candidates == groups.candidates
    # A NaN is not equal to itself.
    assert [repr(group.settings) for group in found.live] == [repr(group.settings) for group in live]
    assert [replace(group, settings={}) for group in found.live] == [replace(group, settings={}) for group in live]
