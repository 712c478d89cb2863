"""Steps and groups of optimizers that count per group (transformer-engine) and per parameter (torch)."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.group_fields import Option
from mcore_ckpt.state.optimizer import read_optimizer
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import OptimizerPart, read_step, steps_in_groups
from mcore_ckpt.state.param_groups import (
    SavedGroups,
    Schedules,
    find_counterparts,
    match_parts,
    read_live_groups,
    read_param_groups,
    write_param_groups,
)
from mcore_ckpt.state.shards import LocalShard


class FusedAdam(torch.optim.Optimizer):
    """transformer-engine's state layout: `step` in the groups, no tensor of it in the state. Plain Adam otherwise."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                for kind in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(kind, torch.zeros_like(p))
                b1, b2 = group["betas"]
                state["exp_avg"].lerp_(p.grad, 1 - b1)
                state["exp_avg_sq"].lerp_(p.grad**2, 1 - b2)
                unbiased = state["exp_avg_sq"] / (1 - b2 ** group["step"])
                p -= group["lr"] / (1 - b1 ** group["step"]) * state["exp_avg"] / (unbiased.sqrt() + group["eps"])


def weights(*sizes: int, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.rand(n, generator=generator)) for n in sizes]


def step(inner: torch.optim.Optimizer, count: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for group in inner.param_groups:
            for p in group["params"]:
                p.grad = torch.rand(p.shape, generator=generator)
        inner.step()


def part_of(inner: Any) -> OptimizerPart:
    return OptimizerPart(SimpleNamespace(), inner)


def values(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for group in inner.param_groups for p in group["params"]]


@pytest.mark.parametrize("cls", [FusedAdam, torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizer_that_gets_back_its_step_and_moments_goes_on_alike(cls: type[Any]) -> None:
    groups = [{"params": weights(3, 2)}, {"params": weights(4, seed=5), "weight_decay": 0.0}]
    inner = cls(groups, lr=0.1)
    step(inner, 3)
    fresh = cls(copy.deepcopy([{"params": group["params"]} for group in inner.param_groups]), lr=0.7)
    step(fresh, 1, seed=9)
    for a, b in zip(inner.param_groups, fresh.param_groups, strict=True):
        for p, q in zip(a["params"], b["params"], strict=True):
            q.data.copy_(p.data)
            for kind in ("exp_avg", "exp_avg_sq"):
                fresh.state[q][kind].copy_(inner.state[p][kind])
    assert read_step(part_of(inner)) == 3
    write_param_groups(part_of(fresh), read_param_groups(part_of(inner)), "checkpoint")
    part_of(fresh).write_step(read_step(part_of(inner)))
    assert read_step(part_of(fresh)) == 3
    for optimizer in (inner, fresh):
        step(optimizer, 2)
    assert all(a.equal(b) for a, b in zip(values(inner), values(fresh), strict=True))
    assert read_step(part_of(fresh)) == 5


@pytest.mark.parametrize("count", [float("nan"), float("inf")])
def test_a_step_that_is_no_number_is_refused(count: float) -> None:
    inner = torch.optim.Adam(weights(3))
    step(inner, 1)
    for state in inner.state.values():
        state["step"].fill_(count)
    with pytest.raises(UnsupportedError, match=f"have done {count} steps: the state is damaged"):
        read_step(part_of(inner))


def test_torchs_adam_gets_a_step_tensor_for_each_parameter() -> None:
    """A shared one counts once per parameter."""
    inner = torch.optim.Adam(weights(3, 2, 4))
    step(inner, 1)
    part_of(inner).write_step(7)
    steps = [state["step"] for state in inner.state.values()]
    assert len({tensor.data_ptr() for tensor in steps}) == 3
    assert {(tensor.item(), tensor.dtype, tensor.shape, tensor.device.type) for tensor in steps} == {
        (7.0, torch.float32, torch.Size([]), "cpu")
    }
    step(inner, 2)
    assert read_step(part_of(inner)) == 9


def test_te_counts_in_every_group_and_not_in_the_state() -> None:
    inner = FusedAdam([{"params": weights(3)}, {"params": []}, {"params": weights(2)}])
    assert read_step(part_of(inner)) is None
    step(inner, 2)
    assert read_step(part_of(inner)) == 2
    part_of(inner).write_step(11.0)
    assert [type(group["step"]) for group in inner.param_groups if group["params"]] == [int, int]
    assert all("step" not in state for state in inner.state.values())
    step(inner, 1)
    assert read_step(part_of(inner)) == 12


def test_before_the_first_step_and_without_parameters_there_is_none() -> None:
    for inner in (torch.optim.Adam(weights(3)), FusedAdam(weights(3)), None):
        assert read_step(part_of(inner)) is None
        part_of(inner).write_step(None)
        assert read_step(part_of(inner)) is None
    part_of(None).write_step(5)
    assert part_of(None).param_groups == read_param_groups(part_of(None)) == []


def test_different_numbers_of_steps_are_refused() -> None:
    for inner in (torch.optim.Adam([{"params": weights(3)}, {"params": weights(2)}]), FusedAdam(weights(3, 2))):
        step(inner, 1)
        if isinstance(inner, FusedAdam):
            inner.add_param_group({"params": weights(4)})
            inner.param_groups[1]["step"] = 5
        else:
            inner.state[inner.param_groups[1]["params"][0]]["step"].fill_(5)
        with pytest.raises(UnsupportedError, match=r"different numbers of steps: \[1(\.0)?, 5(\.0)?\]"):
            read_step(part_of(inner))


def test_a_subclass_of_fused_adam_counts_in_groups_too() -> None:
    derived = type("MyAdam", (FusedAdam,), {})
    assert steps_in_groups(derived(weights(1)))
    assert not steps_in_groups(torch.optim.Adam(weights(1)))


IDENTITIES = [
    {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False},
    {"wd_mult": 0.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False},
    {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": True},
]


def grouped(order: list[int], **fields: Any) -> OptimizerPart:
    return part_of(FusedAdam([{"params": weights(2), **IDENTITIES[i], **fields} for i in order]))


def test_groups_keep_their_parameters_and_on_request_their_rates() -> None:
    saved = read_param_groups(grouped([0], lr=0.9, weight_decay=0.4, max_lr=1.0, eps=1e-3))
    assert saved[0].keys().isdisjoint({"params", "step"})
    options: list[tuple[Option, tuple[float, ...]]] = [("checkpoint", (0.9, 0.4, 1e-3)), ("run", (0.2, 0.1, 1e-3))]
    for option, expected in options:
        part = grouped([0], lr=0.2, weight_decay=0.1)
        parameters = part.param_groups[0]["params"]
        write_param_groups(part, saved, option)
        group = part.param_groups[0]
        assert group["params"] is parameters
        assert (group["lr"], group["weight_decay"], group["eps"]) == expected


def shard(name: str, parameter: torch.nn.Parameter) -> LocalShard:
    return LocalShard(ShardKey(name, "model"), Region.whole(tuple(parameter.shape)), parameter)


def test_bf16_and_fp32_parameters_of_one_group_keep_their_own_main_parameters() -> None:
    """DistributedOptimizer's fields. Its groups list fp32 parameters before bf16 ones, the model does not."""
    model = {
        name: torch.nn.Parameter(torch.full((size,), float(size), dtype=dtype))
        for name, size, dtype in (
            ("a", 8, torch.bfloat16),
            ("norm", 6, torch.float32),
            ("b", 4, torch.bfloat16),
            ("router", 2, torch.float32),
        )
    }
    low, full = [model["a"], model["b"]], [model["norm"], model["router"]]
    ranges = {"a": (2, 8), "b": (0, 1), "norm": (0, 6), "router": (1, 2)}
    owned = {id(model[name]): SimpleNamespace(start=low, end=high) for name, (low, high) in ranges.items()}
    mains = {name: torch.nn.Parameter(p.detach().float()[slice(*ranges[name])]) for name, p in model.items()}
    inner = FusedAdam([{"params": [mains["norm"], mains["router"], mains["a"], mains["b"]]}])
    step(inner, 1)
    owner = SimpleNamespace(
        optimizer=inner,
        config=SimpleNamespace(),
        gbuf_ranges=[],
        model_float16_groups=[low],
        model_fp32_groups=[full],
        shard_fp32_from_float16_groups=[[mains["a"], mains["b"]]],
        shard_fp32_groups=[[mains["norm"], mains["router"]]],
        _get_model_param_range_map=lambda p: {"param": owned[id(p)]},
    )
    chained = SimpleNamespace(chained_optimizers=[owner, SimpleNamespace(optimizer=None)])
    dense, experts = read_optimizer(chained, [shard(name, p) for name, p in model.items()], first_instance=True)
    assert experts == []
    assert {state.name for state in dense} == set(model)
    for state in dense:
        assert state.main is mains[state.name]
        assert state.region.flat == ranges[state.name]
        assert state.is_model_view == (model[state.name].dtype == torch.float32)
        assert state.moments == inner.state[mains[state.name]]
    assert [part.is_sharded for part in optimizer_parts(chained)] == [True, False]
    (second_instance, _) = read_optimizer(chained, [shard(name, p) for name, p in model.items()], False)
    assert all(state.replica for state in second_instance)


def test_state_that_is_no_moment_or_of_no_known_parameter_is_refused_by_name() -> None:
    (p,) = weights(4)
    inner = torch.optim.Adam([p])
    chained = SimpleNamespace(optimizer=inner)
    with pytest.raises(UnsupportedError, match=r"shape \[4\] that is not in the model"):
        read_optimizer(chained, [], True)
    for value, what in ((torch.zeros(3), "a tensor of 3 elements"), ("text", "a str")):
        inner.state[p]["odd"] = value
        with pytest.raises(UnsupportedError, match=f"'odd' of weight is {what}"):
            read_optimizer(chained, [shard("weight", p)], True)


def test_reading_makes_no_state() -> None:
    (p,) = weights(4)
    inner = torch.optim.Adam([p])
    ((state,),) = read_optimizer(SimpleNamespace(optimizer=inner), [shard("weight", p)], True)
    assert state.moments == {}
    assert not inner.state, "an entry without step and moments breaks the next step"


DENSE, EXPERT = IDENTITIES[0], IDENTITIES[0] | {"is_expert_parallel": True}


def chained(*identities: list[dict[str, Any]]) -> list[OptimizerPart]:
    """One optimizer per list of groups."""
    return [part_of(FusedAdam([{"params": weights(2), **group} for group in groups])) for groups in identities]


def saved_part(groups: list[dict[str, Any]], step: int | None = 5, **fields: Any) -> dict[str, Any]:
    return {"kind": "Adam", "param_groups": groups, "step": step, "grad_scaler": None, **fields}


SCHEDULES = Schedules("checkpoint", {}, {})


def matched(
    parts: list[OptimizerPart], saved: list[dict[str, Any]]
) -> list[tuple[float | int | None, list[dict[str, Any] | None]]]:
    """The steps and the groups that each part gets, without members."""
    groups = SavedGroups.of(saved)
    found = []
    for part, state in zip(parts, match_parts(parts, saved), strict=True):
        live = [replace(group, has_members=True) for group in read_live_groups(part)]
        candidates = [group for group in groups.groups if group.number in state.candidates]
        numbers = find_counterparts(live, candidates, False, SCHEDULES).numbers if live else {}
        fields = [None if (n := numbers[each.key]) is None else dict(groups.groups[n].fields) for each in live]
        found.append((state.step, fields))
    return found


def marked(group: dict[str, Any], lr: float = 0.5) -> dict[str, Any]:
    return group | {"lr": lr}


def test_optimizers_chained_alike_are_matched_in_turn() -> None:
    saved = [saved_part([DENSE], 5), saved_part([EXPERT], 7)]
    assert matched(chained([DENSE], [EXPERT]), saved) == [(5, [DENSE]), (7, [EXPERT])]


def test_experts_that_had_an_optimizer_of_their_own_join_the_dense_one() -> None:
    saved = [saved_part([marked(DENSE), IDENTITIES[1]]), saved_part([marked(EXPERT)])]
    assert matched(chained([DENSE, IDENTITIES[1]]), saved) == [(5, [marked(DENSE), IDENTITIES[1]])]
    assert matched(chained([EXPERT, DENSE]), saved) == [(5, [marked(EXPERT), marked(DENSE)])]


def test_groups_that_a_user_told_apart_keep_their_rates() -> None:
    """Experts with a rate of their own join the dense optimizer, as a group that is not of experts alone."""
    dense, experts = marked(DENSE) | {"max_lr": 1e-3}, marked(EXPERT) | {"max_lr": 1e-5}
    here = [DENSE | {"max_lr": 1e-3}, DENSE | {"max_lr": 1e-5}]
    assert matched(chained(here), [saved_part([dense]), saved_part([experts])]) == [(5, [dense, experts])]
    with pytest.raises(CheckpointMismatchError, match=r"differ in \['max_lr'\]"):
        matched(chained([DENSE | {"max_lr": 3e-3}, EXPERT]), [saved_part([dense, dense | {"max_lr": 2e-3}, experts])])


def test_experts_that_had_none_take_the_dense_ones() -> None:
    (step_, _), (_, experts) = matched(
        chained([DENSE, IDENTITIES[1]], [EXPERT]), [saved_part([marked(DENSE), IDENTITIES[1]])]
    )
    assert step_ == 5
    assert experts == [marked(DENSE)], "experts have no group of their own there"
    # What it belongs to stays the part's own.
    (part,) = chained([EXPERT | {"lr": 0.1}])
    write_param_groups(part, experts, "checkpoint")
    assert (part.param_groups[0]["lr"], part.param_groups[0]["is_expert_parallel"]) == (0.5, True)


def test_optimizers_of_different_steps_do_not_become_one() -> None:
    saved = [saved_part([DENSE], 5), saved_part([EXPERT], 7)]
    with pytest.raises(CheckpointMismatchError, match=r"different numbers of steps, \[5, 7\]"):
        match_parts(chained([DENSE]), saved)
    (unstepped,) = match_parts(chained([DENSE]), [saved_part([DENSE], None), saved_part([EXPERT], 7)])
    assert unstepped.step == 7


def test_members_that_make_no_sense_are_damage() -> None:
    for members in ([["a"]], [["a"], ["b[1-]"]], [["a"], [3]], 5, [["a"], None]):
        with pytest.raises(CheckpointCorruptError, match="members of param groups"):
            SavedGroups.of([saved_part([DENSE, EXPERT], members=members)])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": "SGD"}, "wanted the state of Adam, found that of SGD"),
        ({"grad_scaler": {"scale": 1.0}}, "wanted no grad scaler, found one"),
    ],
)
def test_another_optimizer_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=reason):
        match_parts(chained([DENSE]), [saved_part([DENSE], **fields)])


def test_parts_without_parameters_fit_any() -> None:
    none = saved_part([], None, kind="NoneType")
    dense, empty = match_parts([*chained([DENSE]), part_of(None)], [saved_part([DENSE]), none])
    assert (dense.step, empty.step, empty.param_groups) == (5, None, ())
    (one,) = match_parts(chained([DENSE]), [saved_part([DENSE]), none])
    assert one.step == 5
