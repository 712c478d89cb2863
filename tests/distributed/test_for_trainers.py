"""A run goes back to Megatron-LM: its own `load_checkpoint` goes on from what `mcore-ckpt convert` makes of a step."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt import CheckpointConfig
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations import megatron as drop_in
from mcore_ckpt.ranks import rendezvous
from mcore_ckpt.tools.convert.for_trainers.convert import TrainerConversionReport, convert_for_trainer
from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.examine.select import select
from tests.distributed import megatron_lm
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.global_state import assert_same_state, global_state, loss_and_norm
from tests.distributed.layouts import LAYOUTS
from tests.distributed.resuming import SIZES
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.test_muon import LAYOUTS as KINDS
from tests.distributed.test_muon import exists
from tests.distributed.test_param_groups import build_with
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, Training, build, parallel, train
from tests.support.fused_adam import fused_adam

STEP, END = 3, 5
OPERATIONS = 1.5e12
_conversions = [0]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    drop_in.configure(object(), config=CheckpointConfig())


def adam(fused: bool) -> contextlib.AbstractContextManager[None]:
    """transformer-engine's FusedAdam, without which megatron loads no `fully_reshardable` (test_upstream.py)."""
    return fused_adam() if fused else contextlib.nullcontext()


def save_by_loop(training: Training, root: Path) -> None:
    """As a loop of Megatron-LM does whose two functions are ours."""
    more = {"consumed_train_samples": 24, "data_parallel_random_init": True, "timers": object()}
    args = megatron_lm.arguments(training.layout, root, **more)
    drop_in.configure(args, config=CheckpointConfig(timeout_s=40.0))
    drop_in.save_checkpoint(STEP, training.model, training.optimizer, training.scheduler, OPERATIONS)
    drop_in.maybe_finalize_async_save(terminate=True)


def converted(source: Path, root: Path, layout: str = "megatron", **more: Any) -> TrainerConversionReport:
    _conversions[0] += 1
    return convert_for_trainer(
        source, root, layout, rendezvous(f"test-for-trainers/{_conversions[0]}", 60.0), test=True, **more
    )


def groups_of(training: Training) -> list[dict[str, Any]]:
    return training.optimizer.param_groups


def loaded(layout: Layout, root: Path, **more: Any) -> tuple[Training, Any]:
    """A new training that Megatron-LM has resumed."""
    training = build(layout, seed=2)
    megatron_lm.poison_for_megatron(training)
    args = megatron_lm.arguments(layout, root, **more)
    assert megatron_lm.load(training, args) == (STEP, OPERATIONS)
    return training, args


FUSED = (
    *("dp2-bf16", "dp2-two-dtypes", "dp2-fp16", "dp2-buckets", "dp4-two-instances"),
    *("pp2-tied-bf16", "pp2-vpp2", "ep2", "dp2-expert-bias", "tp2-pp2", "tp2-ep2-etp1"),
)
REPLICATED = ("plain", "mtp", "dp2-bf16-replicated", "dp2-fp32-replicated", "ep2-replicated", "pp2-mtp", "hybrid")
IN_CI = ("dp2-bf16-fused", "dp2-fp32-replicated")


@pytest.mark.shows("Megatron-LM", "going back")
@pytest.mark.parametrize(
    ("name", "fused"),
    [
        pytest.param(name, fused, id=f"{name}{end}", marks=marks(LAYOUTS[name].world, f"{name}{end}" in IN_CI))
        for fused, end, names in ((True, "-fused", FUSED), (False, "", REPLICATED))
        for name in names
        if name in LAYOUTS
    ],
)
def test_a_run_goes_back_bit_for_bit(name: str, fused: bool, shared_path: Path) -> None:
    layout = LAYOUTS[name]
    if not fused:
        layout = replace(layout, distributed_optimizer=False)
    with parallel(layout), adam(fused):
        first = build(layout, seed=1)
        train(first, 0, STEP)
        save_by_loop(first, shared_path / "ours")
        at_save = snapshot(first)
        reference = train(first, STEP, END)

        report = converted(shared_path / "ours", shared_path / "theirs")
        assert report.path == shared_path / "theirs" / "iter_0000003"
        second, args = loaded(layout, shared_path / "theirs", data_parallel_random_init=True)
        found = snapshot(second)
        resumed = train(second, STEP, END)
        with everywhere():
            assert args.consumed_train_samples == 24
            assert_same(found, at_save)
            assert resumed == reference


def first_saved(layout: Layout, fused: bool, root: Path) -> tuple[Any, list[float]]:
    """What a training has when it is converted, and what its next step shows."""
    with parallel(layout), adam(fused):
        first = build(layout, seed=1)
        train(first, 0, STEP)
        save_by_loop(first, root / "ours")
        state = global_state(first)
        converted(root / "ours", root / "theirs")
        return state, loss_and_norm(train(first, STEP, STEP + 1)[0])


def goes_on(before: Layout, after: Layout, fused: bool, root: Path) -> None:
    state, losses = first_saved(before, fused, root)
    with parallel(after), adam(fused):
        assert_goes_on(after, root, state, losses, rel=0 if before == after else 1e-2)


def assert_goes_on(layout: Layout, root: Path, state: Any, losses: list[float], rel: float) -> None:
    """Megatron-LM resumes with the same state, and its next step is the same, or nearly under another layout."""
    second, _ = loaded(layout, root / "theirs")
    found = global_state(second)
    resumed = loss_and_norm(train(second, STEP, STEP + 1)[0])
    with everywhere():
        assert_same_state(found, state)
        assert resumed == (pytest.approx(losses, rel=rel) if rel else losses)


PLAIN = Layout(2, precision="bf16", num_layers=4, **SIZES)
MOVES = {
    "tp-to-pp": (replace(PLAIN, tp=2), replace(PLAIN, pp=2, vpp=2)),
    "dp-to-tp": (PLAIN, replace(PLAIN, tp=2)),
    "pp-to-dp": (replace(PLAIN, pp=2, tied_embeddings=True), replace(PLAIN, tied_embeddings=True)),
    "buckets": (replace(PLAIN, bucket_size=5000, overlap_grad_reduce=True), PLAIN),
    "to-buckets": (PLAIN, replace(PLAIN, bucket_size=5000, overlap_grad_reduce=True)),
    "experts": (replace(PLAIN, experts=4, ep=2), replace(PLAIN, experts=4, ep=2, tp=2, etp=1)),
    # Megatron loads what another of its optimizers has.
    "to-replicated": (PLAIN, replace(PLAIN, distributed_optimizer=False)),
    "from-replicated": (replace(PLAIN, distributed_optimizer=False), replace(PLAIN, tp=2)),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("move", [pytest.param(m, marks=() if m == "tp-to-pp" else pytest.mark.full) for m in MOVES])
def test_any_layout_loads_it(move: str, shared_path: Path) -> None:
    before, after = MOVES[move]
    goes_on(before, after, True, shared_path)


AWARE = replace(PLAIN, precision_aware=True, moment_dtypes=("bf16", "fp16"))
OTHERS = {
    "aware": (AWARE, AWARE),
    "aware-main": (replace(AWARE, main_dtype="fp16"), replace(AWARE, main_dtype="fp16")),
    # What megatron cannot load in this form goes on without it.
    "without-remainders": (replace(AWARE, remainders=True), AWARE),
    "without-offload": (replace(PLAIN, offload=0.5), PLAIN),
    "without-both": (replace(PLAIN, precision_aware=True, offload=0.5), PLAIN),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) for name in OTHERS])
def test_other_settings_of_adam(name: str, shared_path: Path) -> None:
    before, after = OTHERS[name]
    goes_on(before, after, True, shared_path)


@pytest.mark.full
@pytest.mark.world(2)
@pytest.mark.parametrize(
    "name", ["plain", "plain-ep2", "owners", "owners-ep2", "layout", "layout-lion", "lion", "adaptive"]
)
def test_other_optimizers(name: str, shared_path: Path) -> None:
    layout = replace(KINDS[name], **SIZES)
    if not exists(layout):
        pytest.skip("this megatron-core does not have it")
    # Beside Muon there may be a DistributedOptimizer, which needs it.
    goes_on(layout, layout, layout.layer_wise == "layout", shared_path)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("soap", "Q_L.* do not have the parameter's shape", id="soap"),
        pytest.param("sgd", "the state of SGD", id="sgd", marks=pytest.mark.full),
    ],
)
def test_an_optimizer_that_megatron_cannot_load_is_refused(name: str, message: str, shared_path: Path) -> None:
    layout = replace(KINDS[name], **SIZES)
    if not exists(layout):
        pytest.skip("this megatron-core does not have it")
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, 1)
        save_by_loop(first, shared_path / "ours")
        error = error_of(lambda: converted(shared_path / "ours", shared_path / "theirs"))
        assert re.search(message, raised_everywhere(UnsupportedError, error)[0])
        with everywhere():
            assert not (shared_path / "theirs").exists()


@pytest.mark.world(2)
@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_resharded_step_has_the_optimizers_of_its_layout(before: int, after: int, shared_path: Path) -> None:
    """Under expert parallelism experts have one of their own, and megatron wants as many as it has."""
    layouts = {ep: replace(PLAIN, experts=4, ep=ep) for ep in (before, after)}
    with parallel(layouts[before]), adam(True):
        first = build(layouts[before], seed=1)
        train(first, 0, STEP)
        save_by_loop(first, shared_path / "ours")
        state = global_state(first)
        losses = loss_and_norm(train(first, STEP, STEP + 1)[0])
        if dist.get_rank() == 0:
            reshard(select(shared_path / "ours"), shared_path / "resharded", WantedLayout(ep=after, world=2))
        dist.barrier()
        report = converted(shared_path / "resharded", shared_path / "theirs")
        assert any("--no-load-rng" in note for note in report.notes)
    with parallel(layouts[after]), adam(True):
        assert_goes_on(layouts[after], shared_path, state, losses, rel=1e-2)


@pytest.mark.world(2)
@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.full)])
def test_it_comes_back_to_ours(fused: bool, shared_path: Path) -> None:
    layout = replace(PLAIN, distributed_optimizer=fused)
    state, losses = first_saved(layout, fused, shared_path)
    with parallel(layout), adam(fused):
        second = build(layout, seed=2)
        poison(second)
        args = megatron_lm.arguments(layout, shared_path / "theirs")
        drop_in.configure(args, config=CheckpointConfig(timeout_s=40.0))
        assert drop_in.load_checkpoint(second.model, second.optimizer, second.scheduler) == (STEP, OPERATIONS)
        found = global_state(second)
        resumed = loss_and_norm(train(second, STEP, STEP + 1)[0])
        with everywhere():
            assert args.consumed_train_samples == 24
            assert_same_state(found, state)
            assert resumed == losses


@pytest.mark.world(2)
@pytest.mark.full
def test_groups_with_rates_of_their_own(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core up to 0.18 takes them for one group, and the report says so."""
    with parallel(PLAIN), adam(True):
        first = build_with(PLAIN, monkeypatch, {"*embedding*": {"max_lr": 1e-3}, "*linear_proj.weight": {"eps": 1e-3}})
        train(first, 0, STEP)
        save_by_loop(first, shared_path / "ours")
        report = converted(shared_path / "ours", shared_path / "theirs")
        (note,) = (note for note in report.notes if note.startswith("some param groups differ only in"))
        assert "eps, max_lr, and megatron-core 0.16 to 0.18" in note
