"""LR schedulers: megatron's own and torch's."""

import copy
import io
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.optim import lr_scheduler

from mcore_ckpt.checkpoint.plain_files import pickle_plain
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.state.common_state import write_common
from mcore_ckpt.state.param_groups import SavedPart
from mcore_ckpt.state.scheduler import (
    GroupOrder,
    check_scheduler,
    read_scheduler,
    saved_scheduler,
    schedules_of,
    write_scheduler,
)


def adam() -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "wd_mult": 0.5, "max_lr": 0.02}]
    return torch.optim.Adam(groups, lr=0.1)


def megatrons(**changes: Any) -> OptimizerParamScheduler:
    choices: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": 0.1,
        "min_lr": 0.01,
        "lr_warmup_steps": 3,
        "lr_decay_steps": 20,
    }
    choices |= {"lr_decay_style": "cosine", "wd_incr_style": "linear", "wd_incr_steps": 20}
    choices |= {"start_wd": 0.01, "end_wd": 0.1}
    return OptimizerParamScheduler(adam(), **(choices | changes))


NEITHER = {"use_checkpoint_opt_param_scheduler": False}


def rates(scheduler: Any, steps: int) -> list[list[tuple[float, float]]]:
    """What the groups get at each of the next steps."""
    seen = []
    for _ in range(steps):
        scheduler.step(1)
        seen.append([(group["lr"], group["weight_decay"]) for group in scheduler.optimizer.param_groups])
    return seen


def stored(scheduler: Any) -> dict[str, Any]:
    state = read_scheduler(scheduler)
    assert state is not None
    restored = saved_scheduler({"lr_scheduler": torch.load(io.BytesIO(pickle_plain(state)), weights_only=True)})
    assert restored is not None
    return restored


def load(scheduler: Any, state: dict[str, Any] | None) -> None:
    check_scheduler(scheduler, state)
    write_scheduler(scheduler, state)


@pytest.mark.parametrize("saved_at", [0, 2, 9, 25])
@pytest.mark.parametrize("stepped", [0, 1, 13])
def test_megatrons_goes_on_where_it_was_however_often_it_is_loaded(saved_at: int, stepped: int) -> None:
    original = megatrons()
    original.step(saved_at)
    state = stored(original)
    other = megatrons()
    other.step(stepped)
    for _ in range(2):
        load(other, state)
        assert other.num_steps == saved_at
    assert rates(other, 6) == rates(original, 6)


def test_the_saved_schedule_counts_by_default_and_the_new_one_if_overridden() -> None:
    original = megatrons()
    original.step(5)
    state = stored(original)
    taken = megatrons(max_lr=0.5, use_checkpoint_opt_param_scheduler=True)
    load(taken, state)
    assert (taken.max_lr, taken.num_steps) == (0.1, 5)
    kept = megatrons(max_lr=0.5, use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)
    load(kept, state)
    assert (kept.max_lr, kept.num_steps) == (0.5, 5)
    options = [schedules_of(scheduler, state).option for scheduler in (taken, kept, megatrons(**NEITHER), None)]
    assert options == ["checkpoint", "run", "equal", "checkpoint"]


@pytest.mark.parametrize(
    ("changes", "state_changes"),
    [
        ({"max_lr": 0.5}, {}),
        ({"min_lr": 0.0}, {}),
        ({"lr_decay_steps": 30}, {}),
        ({"end_wd": 0.2}, {}),  # the last megatron looks at, after it has stepped
        ({}, {"max_lr": None}),
        ({}, {"num_steps": None}),
    ],
)
def test_what_megatron_would_refuse_half_way_changes_nothing(changes: dict, state_changes: dict) -> None:
    state = stored(megatrons())
    for key in state_changes:
        del state[key]
    scheduler = megatrons(use_checkpoint_opt_param_scheduler=False, **changes)
    scheduler.step(4)
    before = copy.deepcopy((scheduler.state_dict(), scheduler.optimizer.param_groups))
    with pytest.raises(CheckpointMismatchError, match="LR scheduler does not accept"):
        check_scheduler(scheduler, state)
    assert scheduler.state_dict() == before[0]
    assert [group["lr"] for group in scheduler.optimizer.param_groups] == [group["lr"] for group in before[1]]


def test_a_check_that_passes_changes_nothing_either() -> None:
    state = stored(megatrons())
    scheduler = megatrons()
    scheduler.step(4)
    before = rates(copy.deepcopy(scheduler), 3)
    check_scheduler(scheduler, state)
    assert rates(scheduler, 3) == before
    assert state == stored(megatrons())


def test_groups_that_keep_their_values_get_the_rates_of_the_loaded_schedule() -> None:
    """`load_state_dict` sets the rates before it has read the weight decay (0.16 to 0.19)."""
    original = megatrons()
    original.step(5)
    other = megatrons(start_wd=0.05)
    part = SimpleNamespace(optimizer=other.optimizer)
    write_common(part, other, [SavedPart(None, None, None, starts_anew=True)], stored(original))
    original.step(0)
    for one, two in zip(other.optimizer.param_groups, original.optimizer.param_groups, strict=True):
        assert (one["lr"], one["weight_decay"]) == (two["lr"], two["weight_decay"])


def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 6]),
        sequential,
    ],
    ids=["lambda", "cosine", "multistep", "sequential"],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_torchs_go_on_where_they_were(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    def steps(scheduler: Any, count: int) -> list[float]:
        seen = []
        for _ in range(count):
            scheduler.step()
            seen += [group["lr"] for group in scheduler.optimizer.param_groups]
        return seen

    original = make(adam())
    steps(original, 3)
    state = stored(original)
    saved_rates = [group["lr"] for group in original.optimizer.param_groups]
    other = make(adam())
    steps(other, 5)
    load(other, state)
    # torch's schedulers go on from the groups' rates, which are saved with the optimizer.
    for group, rate in zip(other.optimizer.param_groups, saved_rates, strict=True):
        group["lr"] = rate
    assert steps(other, 5) == pytest.approx(steps(original, 5))


def test_the_state_of_torchs_keeps_its_types() -> None:
    """`_get_closed_form_lr` reads the milestones of a Counter."""
    original, other = (lr_scheduler.MultiStepLR(adam(), [2, 6, 6]) for _ in range(2))
    load(other, stored(original))
    assert type(other.milestones) is Counter
    assert other._get_closed_form_lr() == original._get_closed_form_lr()
    with pytest.raises(CheckpointCorruptError, match=r"common.pt: lr_scheduler: .*unheard"):
        saved_scheduler({"lr_scheduler": {"mcore_ckpt.type": "unheard of"}})


def test_megatrons_state_is_plain() -> None:
    """Older versions of this package read it."""
    state = read_scheduler(megatrons(max_lr=np.float64(0.5)))
    assert state is not None
    assert {type(value) for value in state.values()} == {int, float, str}
    assert saved_scheduler({"lr_scheduler": state}) == state


class Scaled:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, step: int) -> float:
        return self.by


def turned(rates: Sequence[float], make: Callable[[torch.optim.Optimizer], Any]) -> Any:
    """A scheduler of groups with these rates."""
    return make(torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates]))


@pytest.mark.parametrize(
    ("make", "by_group"),
    [
        (lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 6]), ["base_lrs", "_last_lr"]),
        (
            lambda optimizer: lr_scheduler.LambdaLR(optimizer, [Scaled(1), Scaled(2)]),
            ["base_lrs", "lr_lambdas", "_last_lr"],
        ),
        (sequential, ["base_lrs", "_last_lr"]),
        (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], 9), ["base_lrs", "_last_lr"]),
        (
            lambda optimizer: lr_scheduler.ReduceLROnPlateau(
                optimizer, min_lr=[group["lr"] for group in optimizer.param_groups]
            ),
            ["min_lrs", "_last_lr"],
        ),
    ],
    ids=["multistep", "lambda", "sequential", "one-cycle", "plateau"],
)
def test_lists_by_group_follow_their_groups(
    make: Callable[[torch.optim.Optimizer], Any], by_group: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """torch's schedulers keep them by place."""
    saved, live = (turned(rates, make) for rates in ((0.1, 0.2), (0.2, 0.1)))
    before = copy.deepcopy(saved.state_dict())
    write_scheduler(live, stored(saved), GroupOrder([1, 0], 2))
    after = live.state_dict()
    for name in before:
        wanted = before[name][::-1] if name in by_group else before[name]
        assert name == "_schedulers" or after[name] == wanted, name
    assert "base_lrs" not in by_group or "base_lrs" in caplog.text
    caplog.clear()
    write_scheduler(live, stored(saved), GroupOrder([0, 1], 2))
    assert (live.state_dict(), caplog.text) == (before, "")


@pytest.mark.parametrize(
    ("numbers", "saved", "wanted"),
    [
        ([2, 0, 1], [1, 2, 3], [3, 1, 2]),
        ([0, None, 1], [1, 2], [1, -2, 2]),  # a new group
        ([1], [1, 2], [2]),  # one is gone
        ([None, 0], [1, 2], [-1, 1]),
        ([1, 0], [1, 2, 3, 4], [1, 2, 3, 4]),  # of something else
    ],
)
def test_a_group_without_counterpart_keeps_the_runs_entry(
    numbers: list[int | None], saved: list[int], wanted: list[int]
) -> None:
    count = 2 if len(saved) == 4 else len(saved)
    order, live = GroupOrder(numbers, count), [-1, -2, -3][: len(numbers)]
    assert order.applied({"deep": [{"x": saved}], "n": 1}, {"deep": [{"x": live}]}) == {"deep": [{"x": wanted}], "n": 1}
    assert order.applied({"x": tuple(saved)}, {"x": live}) == {"x": tuple(wanted)}
    assert order.applied({"x": saved, "_milestones": saved}, {}) == {"x": saved, "_milestones": saved}


def test_a_schedule_whose_state_is_missing_is_refused() -> None:
    """It would go on from wherever it is, and nobody would know."""
    assert read_scheduler(None) is None
    load(None, {"num_steps": 3})
    scheduler = megatrons()
    scheduler.step(2)
    with pytest.raises(CheckpointMismatchError, match="LR scheduler"):
        load(scheduler, None)
    assert scheduler.num_steps == 2
