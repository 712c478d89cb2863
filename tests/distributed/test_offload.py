"""Trainings whose optimizer updates some parameters on the host (HybridDeviceOptimizer).

The device is simulated (tests/support/simulated_device.py).
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from mcore_ckpt.state.optimizers.hybrid_device import HybridDevicePart
from mcore_ckpt.state.optimizers.part import OptimizerPart
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import files_of, manager_of, save
from tests.distributed.global_state import assert_same_state, global_state, loss_and_norm
from tests.distributed.resuming import SIZES, assert_goes_on, loaded, loaded_from, saved_by_megatron
from tests.distributed.snapshot import assert_same, chained, poison, snapshot
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, Training, build, parallel, train
from tests.support.simulated_device import is_on_host

DP2 = Layout(2, precision="bf16")
FULL = pytest.mark.full
SAME = replace(DP2, **SIZES)
LAYOUTS = {
    "none": replace(DP2, offload=0.0),
    "half": replace(DP2, offload=0.5),
    "half-overlap": replace(DP2, offload=0.5, offload_overlap=True),
    "half-precision-aware": replace(DP2, offload=0.5, precision_aware=True),
    "all": replace(DP2, offload=1.0),
    "all-overlap-precision-aware": replace(DP2, offload=1.0, offload_overlap=True, precision_aware=True),
    "tp2-half": Layout(2, tp=2, precision="bf16", offload=0.5, precision_aware=True),
    "pp2-half": Layout(2, pp=2, precision="bf16", offload=0.5, precision_aware=True),
    "ep2-half": Layout(2, ep=2, experts=4, precision="bf16", offload=0.5, precision_aware=True),
}


def offloaded(training: Training) -> list[bool]:
    """For each parameter, whether it is updated on the host."""
    return [
        is_on_host(inner)
        for part in chained(training.optimizer)
        for inner in part.optimizer.param_to_inner_param.values()
    ]


# Each fraction, each way to keep the main parameters, and each way to cut a model once.
IN_CI = {("half", 0), ("half-overlap", 2), ("all-overlap-precision-aware", 2), ("ep2-half", 2)}


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        pytest.param(layout, steps, id=f"{name}-{steps}", marks=marks(2, (name, steps) in IN_CI))
        for name, layout in LAYOUTS.items()
        for steps in (2, 0)
    ],
)
def test_a_killed_training_goes_on_bit_for_bit(layout: Layout, steps: int, shared_path: Path) -> None:
    assert_goes_on(layout, steps, shared_path)


@pytest.mark.world(2)
def test_the_fraction_is_offloaded() -> None:
    for name in ("none", "half", "all-overlap-precision-aware"):
        with parallel(LAYOUTS[name]):
            there = offloaded(build(LAYOUTS[name], seed=1))
        assert (any(there), all(there)) == (name != "none", name.startswith("all")), name


# -- to and from other settings ----------------------------------------------------------------------------


@pytest.mark.world(2)
def test_a_chain_of_settings_returns_the_same_bytes(shared_path: Path) -> None:
    """On and off, another fraction, precision-aware or not, another layout: the state stays, and training goes on."""
    chain = [
        replace(SAME, offload=None),
        replace(SAME, offload=0.5),
        replace(SAME, offload=1.0, precision_aware=True, offload_overlap=True),
        replace(SAME, offload=0.3, tp=2),
        replace(SAME, offload=0.0, precision_aware=True, pp=2),
        replace(SAME, offload=None),
    ]
    with parallel(chain[0]):
        first = build(chain[0], seed=1)
        train(first, 0, 2)
        wanted = global_state(first)
        save(first, shared_path / "0", 2)
        reference = loss_and_norm(train(first, 2, 3)[0])
    for number, layout in enumerate(chain[1:]):
        with parallel(layout):
            training, _ = loaded(layout, shared_path / str(number))
            found = global_state(training)
            save(training, shared_path / str(number + 1), 2)
            step = loss_and_norm(train(training, 2, 3)[0])
            with everywhere():
                assert_same_state(found, wanted)
                # bf16 adds up in another order where the layout differs.
                assert step == pytest.approx(reference, rel=2e-2)
    with everywhere():
        one, last = (files_of(shared_path / name / "global_steps_2" / "actor") for name in ("0", "5"))
        differing = [path for path in one if one[path] != last[path]]
        assert all(path.startswith(("rng_states/", "extra_state/")) for path in differing), differing


@pytest.mark.world(2)
def test_the_model_alone_becomes_the_main_parameters(shared_path: Path) -> None:
    """megatron's own `reload_model_params` leaves out the copies on the host."""
    for name in ("half", "half-precision-aware"):
        layout = LAYOUTS[name]
        with parallel(layout):
            first = build(layout, seed=1)
            train(first, 0, 2)
            save(first, shared_path / name, 2)
            wanted = {key: value for key, value in global_state(first).items() if key.endswith(" model")}
            training, _ = loaded(layout, shared_path / name, load_contents=("model",))
            for group in training.optimizer.param_groups:
                group["lr"] = group["weight_decay"] = 0.0
            found = global_state(training)
            with everywhere():
                for key, model in wanted.items():
                    assert torch.equal(found[key], model), key
                    assert torch.equal(found[key.removesuffix("model") + "param"], model.float()), key


@pytest.mark.world(2)
@pytest.mark.parametrize("left_out", ["outer", "inner", *(pytest.param(w, marks=FULL) for w in ("state", "step"))])
def test_what_a_load_does_is_needed(left_out: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: without it, the training does not go on as it was."""
    layout = LAYOUTS["half"]
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, 2)
        save(first, shared_path, 2)
        at_save = snapshot(first)
        reference = train(first, 2, 4)
        second = build(layout, seed=2)
        poison(second)
        if left_out == "outer":  # the parameters of which the inner ones are copies
            monkeypatch.setattr(
                HybridDevicePart, "refresh", lambda part: part.inner._sync_sub_optimizers_state_to_hdo()
            )
        elif left_out == "state":  # what HybridDeviceOptimizer shows as its own state
            monkeypatch.setattr(HybridDeviceOptimizer, "_sync_sub_optimizers_state_to_hdo", lambda hdo: None)
        elif left_out == "step":
            monkeypatch.setattr(HybridDevicePart, "write_step", lambda part, step: None)
        else:  # taking the parameters that megatron shows for the truth
            monkeypatch.setattr(HybridDevicePart, "mains", OptimizerPart.mains)
            for name in ("state_of", "new_state_of"):
                monkeypatch.setattr(HybridDevicePart, name, lambda part, main: {})
        manager = manager_of(second, shared_path)
        manager.load()
        manager.close()
        monkeypatch.undo()
        same_state, same_steps = True, True
        try:
            assert_same(snapshot(second), at_save)
        except AssertionError:
            same_state = False
        try:
            same_steps = train(second, 2, 4) == reference
        except (AssertionError, KeyError):
            same_steps = False
        with everywhere():
            assert not (same_state and same_steps)


@pytest.mark.world(2)
@pytest.mark.parametrize("name", ["all-overlap-precision-aware", pytest.param("half", marks=FULL)])
def test_torch_dist_is_loaded_into_it(name: str, shared_path: Path) -> None:
    plain, layout = replace(SAME, offload=None), replace(LAYOUTS[name], **SIZES)
    with parallel(plain):
        wanted = global_state(saved_by_megatron(plain, shared_path / "dist", "fully_reshardable"))
    with parallel(layout):
        training, _ = loaded_from(shared_path / "dist", layout)
        found = global_state(training)
        train(training, 2, 3)
        with everywhere():
            assert_same_state(found, wanted)


@pytest.mark.world(2)
@pytest.mark.parametrize("form", ["fully_reshardable", pytest.param("dp_reshardable", marks=FULL)])
@pytest.mark.parametrize("name", ["half", pytest.param("all-overlap-precision-aware", marks=FULL)])
def test_torch_dist_of_it_is_read(name: str, form: str, shared_path: Path) -> None:
    """Its groups have classes, which megatron (0.16) cannot read back itself."""
    layout = replace(LAYOUTS[name], **SIZES)
    with parallel(layout):
        first = saved_by_megatron(layout, shared_path / "dist", form)
        wanted = global_state(first)
        save(first, shared_path / "ours", 2)  # after megatron's own
    for target in (layout, replace(SAME, offload=None)):
        with parallel(target):
            training, _ = loaded_from(shared_path / "dist", target, assume_optimizer_step=2)
            found = global_state(training)
            with everywhere():
                assert_same_state(found, wanted)


@pytest.mark.world(2)
def test_a_save_in_the_background_keeps_what_was_on_the_host(shared_path: Path) -> None:
    layout = LAYOUTS["half-precision-aware"]
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, 2)
        wanted = global_state(first)
        manager = manager_of(first, shared_path, async_save=True)
        manager.save(2)
        train(first, 2, 4)
        manager.close()
        found = global_state(loaded(layout, shared_path)[0])
        with everywhere():
            assert_same_state(found, wanted)
