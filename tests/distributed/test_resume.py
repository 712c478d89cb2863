"""Training goes on after a load as if it had never stopped: bit for bit, in every layout."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.agreement import everywhere, gather
from tests.distributed.checkpointing import files_of, manager_of, position, save
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, chained, poison, snapshot
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, build, parallel, train


@dataclass(frozen=True)
class Case:
    layout: Layout
    steps_before: int = 3
    steps_after: int = 2
    into_used: bool = False
    """Load into a training that has stepped, as after a rollback, and not into a new one."""


def cases() -> dict[str, Case]:
    every = {name: Case(layout) for name, layout in LAYOUTS.items()}
    dp2, dp2_bf16, dp2_overlap = (LAYOUTS[name] for name in ("dp2-buckets", "dp2-bf16", "dp2-overlap"))
    every |= {
        "dp2-before-first-step": Case(dp2, steps_before=0),
        "dp2-bf16-before-first-step": Case(dp2_bf16, steps_before=0),
        "dp2-replicated-before-first-step": Case(LAYOUTS["dp2-bf16-replicated"], steps_before=0),
        "ep2-before-first-step": Case(LAYOUTS["ep2"], steps_before=0),
        "dp2-bf16-rollback": Case(dp2_bf16, into_used=True),
        "dp2-overlap-rollback": Case(dp2_overlap, into_used=True),
        "dp2-fp32-replicated-rollback": Case(LAYOUTS["dp2-fp32-replicated"], into_used=True),
        "dp2-fp16-rollback": Case(LAYOUTS["dp2-fp16"], into_used=True),
        "dp2-rollback-to-before-first-step": Case(dp2, steps_before=0, into_used=True),
        "tp2-pp2-rollback": Case(LAYOUTS["tp2-pp2"], into_used=True),
    }
    return every


# Of the kinds of optimizers and the ways to cut a model, each once; of the moments to save at and to load in, too.
IN_CI = {
    "mtp",
    "dp2-bf16-replicated",
    "dp2-two-dtypes",
    "dp2-fp32-replicated",
    "dp2-overlap",
    "dp2-nothing-to-own",
    "pp2-frozen-stage",
    "pp2-tied-bf16",
    "dp2-expert-bias",
    "cp2",
    "dp2-bf16-before-first-step",
    "dp2-fp16-rollback",
    "dp2-rollback-to-before-first-step",
    "tower-pp2-vpp2",
    "tp2-ep2-etp1",
    "tp2-etp1",
    "pp2-vpp2-hybrid",
    "pp2-vpp2-dp2-stages",
}


def by_world(named: dict[str, Case]) -> list[Any]:
    return [pytest.param(case, id=name, marks=marks(case.layout.world, name in IN_CI)) for name, case in named.items()]


def assert_all_alike(root: Path, step: int) -> None:
    """Every way to save leaves the same bytes."""
    files = {mode: files_of(root / mode / f"global_steps_{step}" / "actor") for mode in ("sync", "snapshot", "lazy")}
    for mode, found in files.items():
        assert found.keys() == files["sync"].keys(), mode
        differing = [path for path in found if found[path] != files["sync"][path]]
        assert not differing, f"{mode}: {differing}"


@pytest.mark.parametrize("case", by_world(cases()))
def test_resumed_training_is_bit_identical(case: Case, shared_path: Path) -> None:
    step, end = case.steps_before, case.steps_before + case.steps_after
    with parallel(case.layout):
        first = build(case.layout, seed=1)
        train(first, 0, step)
        # With overlap_param_gather a snapshot gathers parameters, and would do the manager's work for it.
        before = None if case.layout.overlap_param_gather else snapshot(first)
        save(first, shared_path / "sync", step)
        at_save = snapshot(first)
        if before is not None:
            with everywhere():
                assert_same(at_save, before)
        save(first, shared_path / "snapshot", step, async_save=True, shared_writes=False)
        manager = manager_of(first, shared_path / "lazy", async_save=True, async_mode="lazy")
        handle = manager.save(step, extra_state=position(step))
        reference = train(first, step, end)  # changes everything while the save is under way
        at_end = snapshot(first)
        manager.close()
        with everywhere():
            assert handle.committed
            assert_all_alike(shared_path, step)

        second = build(case.layout, seed=2)
        if case.into_used:
            train(second, 50, 52)
        poison(second)
        manager = manager_of(second, shared_path / "lazy")
        result = manager.load()
        manager.close()
        loaded = snapshot(second)
        with everywhere():
            assert result.step == step
            assert repr(result.extra_state) == repr(position(step))
            assert_same(loaded, at_save)
        resumed = train(second, step, end)
        finally_ = snapshot(second)
        with everywhere():
            assert resumed == reference
            assert_same(finally_, at_end)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(replace(LAYOUTS["plain"], precision="bf16"), id="bf16", marks=pytest.mark.world(1)),
        pytest.param(LAYOUTS["plain"], id="fp32", marks=pytest.mark.world(1)),
        pytest.param(LAYOUTS["dp2-bf16"], id="dp2-bf16", marks=marks(2, in_ci=False)),
        pytest.param(LAYOUTS["dp2-bf16-replicated"], id="dp2-bf16-replicated", marks=pytest.mark.world(2)),
    ],
)
def test_model_loaded_alone_survives_the_next_optimizer_step(layout: Layout, shared_path: Path) -> None:
    """The main parameters must follow the model's, or the next step writes the old weights back."""
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, 3)
        save(first, shared_path, 3)
        saved = snapshot(first)

        second = build(layout, seed=2)
        manager = manager_of(second, shared_path, load_contents=("model",))
        manager.load()
        manager.close()
        # A step of rate zero changes nothing but what main parameters write to the model.
        for optimizer in chained(second.optimizer):
            for group in optimizer.param_groups:
                group["max_lr"] = group["min_lr"] = group["lr"] = 0.0
        train(second, 3, 4)
        stepped = snapshot(second)
        with everywhere():
            assert_same(
                {name: value for name, value in stepped.items() if name.startswith("chunk")},
                {name: value for name, value in saved.items() if name.startswith("chunk")},
            )


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dp2-buckets", marks=pytest.mark.full),
        pytest.param("dp2-bf16", marks=pytest.mark.full),
        "dp2-overlap",
        "dp2-fp32-replicated",
        pytest.param("pp2-tied-bf16", marks=pytest.mark.full),
    ],
)
def test_optimizer_loaded_alone_brings_the_model_along(name: str, shared_path: Path) -> None:
    """Its main parameters are the model's: whatever they were written over must not stay in use."""
    layout = LAYOUTS[name]
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, 3)
        save(first, shared_path, 3)
        saved = snapshot(first)

        second = build(layout, seed=2)
        poison(second)
        manager = manager_of(second, shared_path, load_contents=("optimizer", "extra"))
        manager.load()
        manager.close()
        loaded = snapshot(second)
        with everywhere():
            assert_same(loaded, saved)


@pytest.mark.world(2)
def test_bucket_sizes_may_change(shared_path: Path) -> None:
    """Other buckets cut the optimizer elsewhere: a rank then finds its ranges in several ranks' files."""
    one, several = (replace(LAYOUTS["dp2-buckets"], bucket_size=size) for size in (None, 3000))
    with parallel(several):
        first = build(several, seed=1)
        train(first, 0, 3)
        save(first, shared_path, 3)
        reference = train(first, 3, 6)
    with parallel(one):
        second = build(one, seed=2)
        poison(second)
        manager = manager_of(second, shared_path)
        manager.load()
        manager.close()
        resumed = train(second, 3, 6)
        with everywhere():
            # Gradient norms add the same squares in another order.
            found, wanted = ([loss for step in steps for loss in step.losses] for steps in (resumed, reference))
            assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.world(2)
def test_each_checkpoint_can_be_chosen(shared_path: Path) -> None:
    layout = LAYOUTS["dp2-bf16"]
    with parallel(layout):
        training = build(layout, seed=1)
        manager = manager_of(training, shared_path)
        states = {}
        for step in (1, 2, 3):
            train(training, step - 1, step)
            manager.save(step, extra_state=position(step)).wait()
            states[step] = snapshot(training)
        manager.wait()
        choices: list[tuple[dict[str, Any], int]] = [
            ({"step": 1}, 1),
            ({"path": shared_path / "global_steps_2" / "actor"}, 2),
            ({}, 3),
        ]
        for choice, step in choices:
            poison(training)
            result = manager.load(**choice)
            found = snapshot(training)
            with everywhere():
                assert result.step == step
                assert repr(result.extra_state) == repr(position(step))
                assert_same(found, states[step])
        manager.close()


@pytest.mark.world(2)
def test_a_role_need_not_hand_over_extra_state_from_every_rank(shared_path: Path) -> None:
    layout = LAYOUTS["dp2-bf16"]
    with parallel(layout):
        training = build(layout, seed=1)
        manager = manager_of(training, shared_path)
        manager.save(1, extra_state=OrderedDict(only="here") if dist.get_rank() == 1 else None).wait()
        result = manager.load()
        manager.close()
        assert gather(repr(result.extra_state)) == ["None", repr(OrderedDict(only="here"))]
