"""Trainings with megatron's precision-aware optimizer, which keeps its state in 16 and 8 bits.

transformer-engine's FusedAdam is stood in for (tests/support/fused_adam.py).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.state.optimizers.fused_adam import FusedAdamPart
from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.examine.select import select
from mcore_ckpt.tools.examine.verify import verify
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import manager_of, save
from tests.distributed.foreign_checkpoints import save_torch_dist, save_verl_ranks, seed_replicas_alike
from tests.distributed.global_state import GlobalState, assert_same_state, global_state, loss_and_norm
from tests.distributed.resuming import (
    SIZES,
    assert_chain_returns_the_same_bytes,
    assert_goes_on,
    loaded,
    loaded_from,
    trained,
)
from tests.distributed.snapshot import assert_same, chained, snapshot
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, build, parallel, train
from tests.support.fused_adam import fused_adam
from tests.support.simulated_device import simulated_device

FUSED = Layout(2, precision="bf16", precision_aware=True)
LAYOUTS = {
    "fp32": FUSED,
    "remainders": replace(FUSED, remainders=True),
    "fp16-moments": replace(FUSED, moment_dtypes=("fp16", "fp16")),
    "bf16-moments-remainders": replace(FUSED, moment_dtypes=("bf16", "bf16"), remainders=True),
    "fp8-moments": replace(FUSED, moment_dtypes=("fp8", "fp16"), remainders=True, fp32_norms=True),
    "fp16-mains": replace(FUSED, main_dtype="fp16", moment_dtypes=("bf16", "fp32")),
    "fp16-training": replace(FUSED, precision="fp16"),
    "tp2-remainders": replace(FUSED, tp=2, remainders=True, moment_dtypes=("fp16", "fp16")),
    "pp2-tied": replace(FUSED, pp=2, remainders=True, tied_embeddings=True),
    "ep2-fp8": replace(FUSED, ep=2, experts=4, moment_dtypes=("fp8", "fp8")),
    "overlap": replace(FUSED, remainders=True, overlap_param_gather=True, overlap_grad_reduce=True),
}
IN_CI = {("fp8-moments", 2), ("fp16-mains", 0), ("tp2-remainders", 2), ("remainders", 0)}


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        pytest.param(layout, steps, id=f"{name}-{steps}", marks=marks(2, (name, steps) in IN_CI))
        for name, layout in LAYOUTS.items()
        for steps in (2, 0)
    ],
)
def test_a_killed_training_goes_on_bit_for_bit(layout: Layout, steps: int, shared_path: Path) -> None:
    assert_goes_on(layout, steps, shared_path, has_all_state=steps > 0)


# -- to and from other settings ----------------------------------------------------------------------------

PLAIN = Layout(2, precision="bf16", **SIZES)
FULL = pytest.mark.full


def values_of(state: GlobalState) -> GlobalState:
    """Without the model's own tensors, which FusedAdam rounds in another way with remainders."""
    return {name: tensor for name, tensor in state.items() if not name.endswith(" model")}


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        pytest.param(PLAIN, {"precision_aware": True}, marks=FULL),
        (PLAIN, {"precision_aware": True, "remainders": True, "tp": 2}),
        ({"remainders": True}, {"precision_aware": False}),
        pytest.param({"remainders": True, "tp": 2}, {"remainders": True, "pp": 2}, marks=FULL),
        ({"moment_dtypes": ("fp16", "bf16")}, {"precision_aware": False, "tp": 2}),
        pytest.param({"moment_dtypes": ("fp8", "fp8"), "main_dtype": "fp16"}, {"remainders": True}, marks=FULL),
        pytest.param({"remainders": True, "pp": 2}, {"precision_aware": False, "precision": "fp32"}, marks=FULL),
    ],
)
def test_other_settings_and_layouts_have_the_same_values(
    saved: Layout | dict[str, Any], wanted: dict[str, Any], shared_path: Path
) -> None:
    source = saved if isinstance(saved, Layout) else replace(PLAIN, precision_aware=True, **saved)
    target = replace(PLAIN, **{"precision_aware": True, **wanted})
    state, step = trained(source, shared_path)
    with parallel(target):
        training, report = loaded(target, shared_path)
        found = values_of(global_state(training))
        next_step = loss_and_norm(train(training, 2, 3)[0])
        with everywhere():
            assert not report.rounded
            assert_same_state(found, {name: as_fp32(tensor) for name, tensor in values_of(state).items()})
            assert next_step == pytest.approx(step, rel=2e-2)


def as_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


@pytest.mark.full
@pytest.mark.world(2)
def test_a_chain_of_settings_returns_the_same_bytes(shared_path: Path) -> None:
    chain = [
        PLAIN,
        replace(PLAIN, precision_aware=True, tp=2),
        replace(PLAIN, precision_aware=True, pp=2),
        PLAIN,
    ]
    assert_chain_returns_the_same_bytes(chain, shared_path)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("wanted", "rounded"),
    [
        (
            {"moment_dtypes": ("fp16", "bf16")},
            {"exp_avg: float32 to scaled float16", "exp_avg_sq: float32 to bfloat16"},
        ),
        pytest.param({"main_dtype": "fp16"}, {"param: float32 to scaled float16"}, marks=FULL),
        pytest.param({"moment_dtypes": ("fp8", "fp32")}, {"exp_avg: float32 to scaled uint8"}, marks=FULL),
    ],
)
def test_what_is_rounded_is_said_or_refused(wanted: dict[str, Any], rounded: set[str], shared_path: Path) -> None:
    state, _ = trained(PLAIN, shared_path)
    layout = replace(PLAIN, precision_aware=True, **wanted)
    with parallel(layout):
        training, report = loaded(layout, shared_path)
        found = global_state(training)
        strict = build(layout, seed=2)
        before = snapshot(strict)
        manager = manager_of(strict, shared_path, strict_dtypes=True)
        with pytest.raises(CheckpointMismatchError, match="strict_dtypes") as refused:
            manager.load()
        manager.close()
        after = snapshot(strict)
        with everywhere():
            assert set(report.rounded) == rounded
            assert all(text in str(refused.value) for text in rounded)
            assert_same(after, before)
            for name, tensor in values_of(state).items():
                size = tensor.abs().max().item()
                torch.testing.assert_close(found[name].float(), tensor, rtol=0.07, atol=size * 1e-3, msg=name)


@pytest.mark.world(2)
def test_halves_under_another_layout_are_rounded_once(shared_path: Path) -> None:
    """Each range has a scale of its own, and other ranges get others."""
    source = replace(PLAIN, precision_aware=True, moment_dtypes=("fp16", "fp16"))
    state, _ = trained(source, shared_path)
    target = replace(source, tp=2)
    with parallel(target):
        training, report = loaded(target, shared_path)
        found = global_state(training)
        with everywhere():
            assert set(report.rounded) == {f"{kind}: float32 to scaled float16" for kind in ("exp_avg", "exp_avg_sq")}
            for name, tensor in values_of(state).items():
                size = tensor.abs().max().item()
                torch.testing.assert_close(found[name], tensor, rtol=2**-11, atol=size * 2**-24, msg=name)


@pytest.mark.world(2)
def test_the_tools_read_it(shared_path: Path) -> None:
    """`reshard` writes all values as float32, so nothing is rounded."""
    layout = replace(PLAIN, precision_aware=True, remainders=True, moment_dtypes=("fp16", "fp8"))
    state, _ = trained(layout, shared_path / "a")
    with everywhere():
        if dist.get_rank() == 0:
            assert verify(shared_path / "a", deep=True).is_sound
            reshard(select(shared_path / "a"), shared_path / "b", WantedLayout(tp=2))
            assert verify(shared_path / "b", deep=True).is_sound
    target = replace(PLAIN, tp=2)
    with parallel(target):
        training, report = loaded(target, shared_path / "b")
        found = values_of(global_state(training))
        with everywhere():
            assert not report.rounded
            assert_same_state(found, values_of(state))


# -- model and optimizer apart -----------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize("name", ["remainders", pytest.param("fp16-mains", marks=FULL)])
def test_model_and_optimizer_are_loaded_apart(name: str, shared_path: Path) -> None:
    layout = replace(LAYOUTS[name], **SIZES)
    state, _ = trained(layout, shared_path / "both")
    trained(layout, shared_path / "optimizer", save_contents=("optimizer", "extra"))
    with parallel(layout):
        for folder in ("both", "optimizer"):
            training, _ = loaded(layout, shared_path / folder, load_contents=("optimizer",))
            found = global_state(training)
            with everywhere():
                assert_same_state(values_of(found), values_of(state))
                if layout.remainders:  # otherwise FusedAdam rounds more precise values than it keeps
                    assert_same_state(found, state)
        training, _ = loaded(layout, shared_path / "both", load_contents=("model",))
        alone = global_state(training)
        with everywhere():
            for key, model in state.items():
                if key.endswith(" model"):
                    assert torch.equal(alone[key], model), key
                    main = alone[key.removesuffix("model") + "param"].float()
                    torch.testing.assert_close(main, model.float(), rtol=2**-11 if name == "fp16-mains" else 0, atol=0)


@pytest.mark.world(2)
def test_remainders_change_the_weights_they_are_beside_on_all_replicas(shared_path: Path) -> None:
    """A tie is rounded down to an even weight, and up beside a remainder. The replicas' weights follow."""
    with parallel(PLAIN):
        first = build(PLAIN, seed=1)
        train(first, 0, 2)
        with torch.no_grad():
            for part in chained(first.optimizer):
                for group in part.param_groups:
                    for main in group["params"]:
                        main.view(torch.int32).bitwise_and_(~0x1FFFF).bitwise_or_(0x8000)
                part._copy_main_params_to_model_params()
            for chunk in first.model:
                chunk.start_param_sync(force_sync=True)
        wanted = global_state(first)
        save(first, shared_path, 2)
    layout = replace(PLAIN, precision_aware=True, remainders=True)
    with parallel(layout):
        for how in ("read", "broadcast"):
            training, _ = loaded(layout, shared_path, load_replicas=how)
            found = global_state(training)  # fails if replicas differ
            with everywhere():
                assert_same_state(values_of(found), values_of(wanted))
                changed = [name for name in wanted if not torch.equal(found[name], wanted[name])]
                assert any(name.endswith(" model") for name in changed)
        save(training, shared_path / "halves", 2)
    # And back: HybridDeviceOptimizer rounds main parameters into its ranges of the weights, to the even neighbour.
    offloaded = replace(PLAIN, precision_aware=True, offload=0.5)
    with parallel(offloaded):
        with simulated_device():
            training = build(offloaded, seed=2)
        manager = manager_of(training, shared_path / "halves")
        manager.load()
        manager.close()
        found = global_state(training)
        with everywhere():
            assert_same_state(values_of(found), values_of(wanted))


@pytest.mark.world(2)
def test_weights_for_huggingface_are_no_upper_halves(shared_path: Path) -> None:
    layout = replace(PLAIN, precision_aware=True, remainders=True)
    trained(layout, shared_path)
    with parallel(layout):
        training = build(layout, seed=2)
        manager = manager_of(training, shared_path, load_contents=("optimizer", "hf_model"))
        with pytest.raises(UnsupportedError, match="put 'model' into load_contents"):
            manager.load()
        manager.close()


@pytest.mark.world(2)
def test_frozen_weights_that_are_rounded_are_reported(shared_path: Path) -> None:
    saved = replace(PLAIN, precision="fp32", frozen="mlp")
    trained(saved, shared_path)
    layout = replace(saved, precision="bf16")
    with parallel(layout):
        _, report = loaded(layout, shared_path)
        with everywhere():
            # Weights that train are rounded from their main parameters, which are loaded, too.
            assert list(report.rounded) == ["model: float32 to bfloat16"]
            assert report.rounded["model: float32 to bfloat16"] == 3 * layout.num_layers


@pytest.mark.world(2)
def test_main_parameters_that_were_loaded_before_the_first_step_are_saved(shared_path: Path) -> None:
    """They are part of the state that FusedAdam would make in its first step, so the plan of a save has to change."""
    with parallel(PLAIN):
        first = build(PLAIN, seed=1)
        for part in chained(first.optimizer):
            for main in (main for group in part.param_groups for main in group["params"]):
                main.detach().view(torch.int32).bitwise_or_(0x123)  # more than the weight has
        state = values_of(global_state(first))
        save(first, shared_path / "plain", 7)
    layout = replace(PLAIN, precision_aware=True)
    with parallel(layout):
        training = build(layout, seed=2)
        manager = manager_of(training, shared_path / "fused")
        manager.save(1).wait()
        manager.load(path=shared_path / "plain" / "global_steps_7" / "actor")
        manager.save(2).wait()
        manager.close()
    with parallel(PLAIN):
        training = build(PLAIN, seed=3)
        manager = manager_of(training, shared_path / "fused")
        manager.load(step=2)
        manager.close()
        found = values_of(global_state(training))
        with everywhere():
            assert_same_state(found, state)


# -- negative controls -------------------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize("left_out", ["scale", "gather", "main of fp32"])
def test_what_a_load_does_is_needed(left_out: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = replace(PLAIN, precision_aware=True, remainders=True, moment_dtypes=("fp16", "fp16"), fp32_norms=True)
    state, _ = trained(layout, shared_path)
    with parallel(layout):
        if left_out == "scale":
            monkeypatch.setattr(FusedAdamPart, "live_scale_of", lambda part, each, kind: torch.zeros(1))
        elif left_out == "gather":
            monkeypatch.setattr("mcore_ckpt.state.main_weights.gather_parameters", lambda chunks: None)
        else:
            monkeypatch.setattr(FusedAdamPart, "refresh", lambda part: None)
        contents = ("optimizer",) if left_out == "gather" else ("model", "optimizer", "extra")
        training, _ = loaded(layout, shared_path, load_contents=contents)
        monkeypatch.undo()
        same, shown = True, True
        try:
            assert_same_state(global_state(training), state)
        except AssertionError:
            same = False
        for part in chained(training.optimizer):
            for parameter in (parameter for group in part.model_fp32_groups for parameter in group):
                theirs = part._get_main_param_and_optimizer_states(parameter)["param"]
                owned = part._get_model_param_range_map(parameter)["param"]
                shown &= torch.equal(theirs, parameter.detach().view(-1)[owned.start : owned.end])
        with everywhere():
            assert (same, shown) == (left_out == "main of fp32", left_out != "main of fp32")


# -- other programs' checkpoints ---------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "form", ["fully_reshardable", *(pytest.param(form, marks=FULL) for form in ("dp_reshardable", "verl_ranks"))]
)
@pytest.mark.parametrize(
    "settings", [{"remainders": True}, {"moment_dtypes": ("fp16", "bf16")}], ids=["remainders", "16"]
)
def test_megatrons_own_checkpoints_of_it_are_read(settings: dict[str, Any], form: str, shared_path: Path) -> None:
    """megatron stores remainders as if they were the main parameters; its own load of them fails, or loses them."""
    layout = replace(PLAIN, precision_aware=True, **settings)
    with parallel(layout):
        first = build(layout, seed=1)
        seed_replicas_alike()
        train(first, 0, 2)
        if form == "verl_ranks":
            save_verl_ranks(first, shared_path)
        else:
            with fused_adam():
                save_torch_dist(first, shared_path, form)
        state = global_state(first)
    for target in (layout, replace(PLAIN, precision_aware=False)):
        with parallel(target):
            training, report = loaded_from(shared_path, target, assume_optimizer_step=2)
            found = values_of(global_state(training))
            train(training, 2, 3)
            with everywhere():
                wanted = {name: as_fp32(tensor) for name, tensor in values_of(state).items()}
                if "fp16" in target.moment_dtypes:  # coded anew
                    assert set(report.rounded) == {
                        "exp_avg: float32 to scaled float16",
                        "exp_avg_sq: float32 to bfloat16",
                    }
                    for name, tensor in wanted.items():
                        torch.testing.assert_close(found[name].float(), tensor, rtol=2**-11, atol=0, msg=name)
                else:
                    assert not report.rounded
                    assert_same_state(found, wanted)
