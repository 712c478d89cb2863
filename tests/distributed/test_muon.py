"""Trainings with Muon and its kin (NVIDIA's emerging-optimizers, real code): plain, and divided layer by layer."""

import inspect
from dataclasses import replace
from pathlib import Path

import megatron.core.optimizer
import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.examine.select import select
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import manager_of, save
from tests.distributed.global_state import assert_same_state, global_state, loss_and_norm
from tests.distributed.resuming import (
    SIZES,
    assert_chain_returns_the_same_bytes,
    assert_goes_on,
    loaded,
    saved_by_megatron,
    trained,
)
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, build, parallel, train
from tests.support import emerging

pytestmark = pytest.mark.skipif(not emerging.INSTALLED, reason="emerging-optimizers is not installed")

FULL = pytest.mark.full
MUON = Layout(2, precision="bf16", optimizer="muon", distributed_optimizer=False)
LAYOUTS = {
    "plain": MUON,
    "plain-fp32": replace(MUON, precision="fp32"),
    "owners": replace(MUON, layer_wise="owners"),
    # Since 0.18 megatron does not wrap it in fp32 training, and cannot train.
    "owners-fp32": replace(MUON, layer_wise="owners", precision="fp32"),
    "owners-overlap": replace(MUON, layer_wise="owners", overlap_param_gather=True, overlap_grad_reduce=True),
    "owners-tp2": replace(MUON, layer_wise="owners", tp=2),
    "owners-pp2-tied": replace(MUON, layer_wise="owners", pp=2, tied_embeddings=True),
    "owners-ep2": replace(MUON, layer_wise="owners", ep=2, experts=4),
    "plain-ep2": replace(MUON, ep=2, experts=4),
    "layout": replace(MUON, layer_wise="layout"),
    "layout-overlap": replace(MUON, layer_wise="layout", overlap_param_gather=True, overlap_grad_reduce=True),
    "layout-lion": replace(MUON, layer_wise="layout", scalar_optimizer="lion"),
    "adaptive": replace(MUON, optimizer="adaptive_muon", layer_wise="owners", scalar_optimizer="lion"),
    "adaptive-normuon": replace(MUON, optimizer="adaptive_muon", moment2="normuon", layer_wise="layout"),
    "adaptive-namo": replace(MUON, optimizer="adaptive_muon", moment2="namo"),
    "soap": replace(MUON, optimizer="soap"),
    "soap-owners-tp2": replace(MUON, optimizer="soap", layer_wise="owners", tp=2),
    "sgd": Layout(2, precision="bf16", optimizer="sgd", distributed_optimizer=False),
    "lion": replace(MUON, optimizer="lion"),
}
IN_CI = {("owners", 2), ("layout-lion", 2), ("adaptive-normuon", 2), ("soap-owners-tp2", 2), ("owners-ep2", 0)}


def exists(layout: Layout) -> bool:
    """Whether this megatron-core has it."""
    if not hasattr(OptimizerConfig, "use_layer_wise_distributed_optimizer"):  # until 0.17
        is_new = layout.optimizer not in ("muon", "sgd", "adam") or layout.scalar_optimizer != "adam"
        return not is_new and layout.layer_wise != "layout"
    if layout.scalar_optimizer == "lion":  # 0.18 has the setting, but does not use it
        return "muon_scalar_optimizer" in inspect.getsource(megatron.core.optimizer)
    return (layout.layer_wise, layout.precision) != ("owners", "fp32")


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        pytest.param(layout, steps, id=f"{name}-{steps}", marks=marks(2, (name, steps) in IN_CI))
        for name, layout in LAYOUTS.items()
        for steps in (2, 0)
    ],
)
def test_a_killed_training_goes_on_bit_for_bit(layout: Layout, steps: int, shared_path: Path) -> None:
    if not exists(layout):
        pytest.skip("this megatron-core does not have it")
    assert_goes_on(layout, steps, shared_path)


# -- to and from other settings and layouts ----------------------------------------------------------------

OWNERS = replace(MUON, layer_wise="owners", **SIZES)
PLAIN = replace(MUON, **SIZES)
ADAM = Layout(2, precision="bf16", **SIZES)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        pytest.param(PLAIN, replace(OWNERS, tp=2), id="plain-to-owners-tp2"),
        pytest.param(replace(OWNERS, tp=2), PLAIN, id="owners-tp2-to-plain", marks=FULL),
        pytest.param(OWNERS, replace(OWNERS, pp=2), id="owners-to-pp2"),
        pytest.param(OWNERS, replace(OWNERS, layer_wise="layout"), id="owners-to-layout"),
        pytest.param(replace(OWNERS, layer_wise="layout"), replace(PLAIN, pp=2), id="layout-to-plain-pp2", marks=FULL),
        pytest.param(replace(OWNERS, experts=4), replace(OWNERS, experts=4, ep=2), id="owners-to-ep2", marks=FULL),
        pytest.param(
            replace(PLAIN, optimizer="adaptive_muon"),
            replace(OWNERS, optimizer="adaptive_muon", tp=2),
            id="adaptive-to-tp2",
            marks=FULL,
        ),
        pytest.param(
            replace(PLAIN, optimizer="soap"),
            replace(OWNERS, optimizer="soap", layer_wise="layout"),
            id="soap-to-layout",
            marks=FULL,
        ),
    ],
)
def test_other_owners_and_layouts_have_the_same_state(saved: Layout, wanted: Layout, shared_path: Path) -> None:
    if not (exists(saved) and exists(wanted)):
        pytest.skip("this megatron-core does not have it")
    state, step = trained(saved, shared_path)
    with parallel(wanted):
        training, report = loaded(wanted, shared_path)
        found = global_state(training)
        next_step = loss_and_norm(train(training, 2, 3)[0])
        with everywhere():
            assert not report.new_moments
            assert_same_state(found, state)
            # Muon orthogonalizes what a rank has of a gradient.
            assert next_step == pytest.approx(step, rel=5e-2)


@pytest.mark.world(2)
def test_a_chain_of_owners_returns_the_same_bytes(shared_path: Path) -> None:
    chain = [PLAIN, replace(OWNERS, tp=2), replace(OWNERS, pp=2), OWNERS, PLAIN]
    assert_chain_returns_the_same_bytes(chain, shared_path)


@pytest.mark.world(2)
def test_each_state_is_written_by_its_owner_alone(shared_path: Path) -> None:
    with parallel(OWNERS):
        training = build(OWNERS, seed=1)
        train(training, 0, 1)
        save(training, shared_path, 1)
        owned = sum(len(list(part.mains())) for part in optimizer_parts(training.optimizer))
        files = sorted((shared_path / "global_steps_1" / "actor" / "optim").glob("distrib_optim*.pt"))
        names = [set(torch.load(file, weights_only=True)["state"]) for file in files]
        with everywhere():
            assert len(names[dist.get_rank()]) == owned
            assert all(names)
            assert not names[0] & names[1]


@pytest.mark.world(2)
def test_the_optimizer_alone_brings_back_the_model_on_all_ranks(shared_path: Path) -> None:
    for layout in (OWNERS, *([replace(OWNERS, layer_wise="layout")] if exists(LAYOUTS["layout"]) else [])):
        root = shared_path / str(layout.layer_wise)
        state, _ = trained(layout, root)
        with parallel(layout):
            training, _ = loaded(layout, root, load_contents=("optimizer",))
            found = global_state(training)
            with everywhere():
                assert_same_state(found, state)


@pytest.mark.world(2)
def test_the_model_alone_becomes_the_main_parameters(shared_path: Path) -> None:
    state, _ = trained(OWNERS, shared_path)
    with parallel(OWNERS):
        training = build(OWNERS, seed=2)
        manager = manager_of(training, shared_path, load_contents=("model",))
        manager.load()
        manager.close()
        found = global_state(training)
        with everywhere():
            for key in (key for key in state if key.endswith(" model")):
                assert torch.equal(found[key.removesuffix("model") + "param"], state[key].float()), key


@pytest.mark.world(2)
def test_reshard_divides_muons_state_and_refuses_soaps(shared_path: Path) -> None:
    state, _ = trained(OWNERS, shared_path / "muon")
    soap = replace(PLAIN, optimizer="soap")
    if exists(soap):
        trained(soap, shared_path / "soap")
    with everywhere():
        if dist.get_rank() == 0:
            reshard(select(shared_path / "muon"), shared_path / "tp2", WantedLayout(tp=2))
            if exists(soap):
                with pytest.raises(UnsupportedError, match="the saved layout: load the checkpoint directly"):
                    reshard(select(shared_path / "soap"), shared_path / "no", WantedLayout(tp=2))
    layout = replace(OWNERS, tp=2)
    with parallel(layout):
        training, _ = loaded(layout, shared_path / "tp2")
        found = global_state(training)
        with everywhere():
            assert_same_state(found, state)


# -- other moments -----------------------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("saved", "wanted", "why", "anew"),
    [
        pytest.param(ADAM, OWNERS, "wanted the state of Muon, found that of Adam", {"Muon"}, id="adam-to-muon"),
        pytest.param(OWNERS, ADAM, "wanted exp_avg and exp_avg_sq of Adam, found momentum_buffer", {"Adam"}, id="back"),
        pytest.param(
            replace(PLAIN, optimizer="soap"),
            replace(PLAIN, optimizer="soap", tp=2),
            "belongs to other parts of the parameter",
            {"SOAP"},
            id="soap-to-tp2",
        ),
        pytest.param(
            replace(PLAIN, optimizer="adaptive_muon", moment2="normuon"),
            replace(PLAIN, optimizer="adaptive_muon", moment2="namo"),
            "wanted moment2_buffer of shape",
            {"AdaptiveMuon"},
            id="normuon-to-namo",
            marks=FULL,
        ),
        pytest.param(
            replace(PLAIN, optimizer="adaptive_muon"),
            replace(PLAIN, optimizer="adaptive_muon", moment2="normuon"),
            "wanted moment2_buffer and momentum_buffer of AdaptiveMuon, found",
            {"AdaptiveMuon"},
            id="adamuon-to-normuon",
            marks=FULL,
        ),
        pytest.param(
            PLAIN,
            replace(PLAIN, scalar_optimizer="lion"),
            "wanted the state of Lion, found that of Adam and Muon",
            {"Lion"},
            id="adam-to-lion",
            marks=FULL,
        ),
    ],
)
def test_other_moments_are_refused_or_start_anew(
    saved: Layout, wanted: Layout, why: str, anew: set[str], shared_path: Path
) -> None:
    if not (exists(saved) and exists(wanted)):
        pytest.skip("this megatron-core does not have it")
    state, _ = trained(saved, shared_path)
    with parallel(wanted):
        training = build(wanted, seed=2)
        before = snapshot(training)
        manager = manager_of(training, shared_path)
        with pytest.raises(CheckpointMismatchError, match=why) as refused:
            manager.load()
        manager.close()
        after = snapshot(training)
        with everywhere():
            assert "reset_moments=True" in str(refused.value)
            assert_same(after, before)
        training, report = loaded(wanted, shared_path, reset_moments=True)
        found = global_state(training)
        train(training, 2, 3)
        save(training, shared_path / "again", 3)
        with everywhere():
            assert set(report.new_moments) == anew
            for key in (key for key in state if key.endswith((" model", " param"))):
                assert torch.equal(found[key], state[key]), key


# -- megatron's own checkpoints ----------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        pytest.param(PLAIN, replace(OWNERS, tp=2), id="plain-to-owners-tp2"),
        pytest.param(OWNERS, PLAIN, id="owners-to-plain", marks=FULL),
        pytest.param(replace(OWNERS, layer_wise="layout"), replace(OWNERS, pp=2), id="layout-to-owners-pp2"),
        pytest.param(replace(PLAIN, precision="fp32"), replace(PLAIN, precision="fp32", tp=2), id="fp32", marks=FULL),
        pytest.param(replace(PLAIN, experts=4), replace(OWNERS, experts=4, ep=2), id="plain-to-ep2", marks=FULL),
        pytest.param(replace(PLAIN, scalar_optimizer="lion"), replace(OWNERS, scalar_optimizer="lion"), id="lion"),
        pytest.param(replace(ADAM, distributed_optimizer=False), replace(ADAM, tp=2), id="replicated-to-distributed"),
        pytest.param(ADAM, replace(ADAM, distributed_optimizer=False), id="distributed-to-replicated", marks=FULL),
    ],
)
def test_megatrons_own_checkpoints_are_read(saved: Layout, wanted: Layout, shared_path: Path) -> None:
    if not (exists(saved) and exists(wanted)):
        pytest.skip("this megatron-core does not have it")
    with parallel(saved):
        first = saved_by_megatron(saved, shared_path, "fully_reshardable")
        state = global_state(first)
        step = loss_and_norm(train(first, 2, 3)[0])
    with parallel(wanted):
        training = build(wanted, seed=2)
        train(training, 0, 1)
        poison(training)
        manager = manager_of(training, shared_path / "unused", load_contents=("model", "optimizer"))
        manager.load(path=shared_path)
        manager.close()
        found = global_state(training)
        next_step = loss_and_norm(train(training, 2, 3)[0])
        with everywhere():
            assert_same_state(found, state)
            assert next_step == pytest.approx(step, rel=5e-2)


@pytest.mark.world(2)
def test_megatrons_checkpoint_of_another_kind_is_refused(shared_path: Path) -> None:
    with parallel(PLAIN):
        saved_by_megatron(PLAIN, shared_path, "fully_reshardable", steps=1)
    with parallel(ADAM):
        training = build(ADAM, seed=2)
        before = snapshot(training)
        manager = manager_of(training, shared_path / "unused", load_contents=("model", "optimizer"))
        with pytest.raises(CheckpointMismatchError, match=r"optimizer\.state\.exp_avg"):
            manager.load(path=shared_path)
        manager.close()
        after = snapshot(training)
        with everywhere():
            assert_same(after, before)
