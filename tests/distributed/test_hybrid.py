"""Checkpoints that go between GPTModel and HybridModel, which has attention and MLP in layers of their own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import files_of, manager_of, save
from tests.distributed.foreign_checkpoints import save_torch_dist, seed_replicas_alike
from tests.distributed.global_state import GlobalState, assert_same_state, global_state, loss_and_norm
from tests.distributed.layouts import HAS_HYBRID
from tests.distributed.refusals import assert_names, refused, refused_load
from tests.distributed.snapshot import poison
from tests.distributed.training import Layout, Training, build, parallel, train

pytestmark = pytest.mark.skipif(not HAS_HYBRID, reason="this megatron-core has no HybridModel")

SAME: dict[str, Any] = {"padded_vocab": 144, "global_batch": 4, "dropout": 0.0}
# The second layer of the GPTModel has experts (training.py), and the layer of multi-token prediction is like it.
GPT = Layout(2, **SAME, experts=4, num_layers=2, mtp_layers=1)
HYBRID = Layout(2, **SAME, experts=4, pattern="*-*E/*E", mtp_layers=1)


def loaded(layout: Layout, root: Path, path: Path | None = None) -> Training:
    training = build(layout, seed=2)
    poison(training)
    contents = ("model", "optimizer", "extra") if path is None else ("model", "optimizer")
    manager = manager_of(training, root, load_contents=contents)
    manager.load(path=path)
    manager.close()
    return training


def values(state: GlobalState) -> list[bytes]:
    """The tensors without their names, in an order that does not depend on these."""
    return sorted(tensor.contiguous().view(-1).numpy().tobytes() for tensor in state.values())


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "hybrid",
    [
        pytest.param(HYBRID, id="dp2"),
        pytest.param(replace(HYBRID, pp=2, pattern="*|-*E/*E"), id="pp2"),
        pytest.param(replace(HYBRID, pp=2, vpp=2, pattern="*|-|*|E/*E"), id="pp2-vpp2", marks=pytest.mark.full),
        pytest.param(replace(HYBRID, tp=2), id="tp2", marks=pytest.mark.full),
        pytest.param(replace(HYBRID, ep=2), id="ep2", marks=pytest.mark.full),
    ],
)
def test_a_gpt_goes_through_a_hybrid_and_returns_the_same_bytes(hybrid: Layout, shared_path: Path) -> None:
    with parallel(GPT):
        first = build(GPT, seed=1)
        train(first, 0, 2)
        state = global_state(first)
        save(first, shared_path / "gpt", 2)
        reference = loss_and_norm(train(first, 2, 3)[0])
    with parallel(hybrid):
        second = loaded(hybrid, shared_path / "gpt")
        of_hybrid = global_state(second)
        save(second, shared_path / "hybrid", 2)
        step = loss_and_norm(train(second, 2, 3)[0])
        with everywhere():
            assert values(of_hybrid) == values(state)
            # The same computation, added up in another order where the layout differs.
            assert step == pytest.approx(reference, rel=2e-5)
    with parallel(GPT):
        save(loaded(GPT, shared_path / "hybrid"), shared_path / "again", 2)
    with everywhere():
        first_files, last_files = (
            files_of(shared_path / name / "global_steps_2" / "actor") for name in ("gpt", "again")
        )
        assert first_files.keys() == last_files.keys()
        differing = [path for path in first_files if first_files[path] != last_files[path]]
        assert all(path.startswith(("rng_states/", "extra_state/")) for path in differing), differing


# With layers that are alike, megatron stores those of a GPTModel as one tensor, and otherwise each as one of its own.
DENSE = replace(GPT, experts=None)
DENSE_HYBRID = replace(HYBRID, experts=None, pattern="*-*-/*-")


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("gpt", "hybrid"),
    [
        pytest.param(GPT, replace(HYBRID, pp=2, pattern="*|-*E/*E"), id="experts-pp2"),
        pytest.param(DENSE, replace(DENSE_HYBRID, tp=2), id="dense-tp2"),
        pytest.param(DENSE, DENSE_HYBRID, id="dense-dp2", marks=pytest.mark.full),
        pytest.param(GPT, replace(HYBRID, ep=2), id="experts-ep2", marks=pytest.mark.full),
    ],
)
def test_torch_dist_goes_from_one_to_the_other_and_back(gpt: Layout, hybrid: Layout, shared_path: Path) -> None:
    with parallel(gpt):
        first = build(gpt, seed=1)
        seed_replicas_alike()
        train(first, 0, 2)
        state = global_state(first)
        save_torch_dist(first, shared_path / "gpt", "fully_reshardable")
        reference = loss_and_norm(train(first, 2, 3)[0])
    with parallel(hybrid):
        second = loaded(hybrid, shared_path / "unused", path=shared_path / "gpt")
        of_hybrid = global_state(second)
        seed_replicas_alike()
        save_torch_dist(second, shared_path / "hybrid", "fully_reshardable")
        step = loss_and_norm(train(second, 2, 3)[0])
        with everywhere():
            assert values(of_hybrid) == values(state)
            assert step == pytest.approx(reference, rel=2e-5)
    with parallel(gpt):
        found = global_state(loaded(gpt, shared_path / "unused", path=shared_path / "hybrid"))
        with everywhere():
            assert_same_state(found, state)


@pytest.mark.world(2)
def test_torch_dist_of_other_layers_is_refused(shared_path: Path) -> None:
    with parallel(DENSE):
        first = build(DENSE, seed=1)
        seed_replicas_alike()
        train(first, 0, 1)
        for form in ("fully_reshardable", "dp_reshardable"):
            save_torch_dist(first, shared_path / form, form)
    for form, pattern, said in (
        (
            "fully_reshardable",
            "*-M-/*-",
            r"wanted the layers attention, mlp, mamba, mlp, found 2 x \(attention \+ mlp\)",
        ),
        ("dp_reshardable", "*-*-/*-", "dp_reshardable optimizer state can be loaded only into the same layers"),
    ):
        hybrid = replace(DENSE_HYBRID, pattern=pattern)
        with parallel(hybrid):
            training = build(hybrid, seed=2)

            def load(training: Training = training, path: Path = shared_path / form) -> None:
                manager = manager_of(training, shared_path / "unused", load_contents=("model", "optimizer"))
                try:
                    manager.load(path=path)
                finally:
                    manager.close()

            assert_names(refused(training, load, CheckpointMismatchError), said)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (
            "*-*-*-",
            r"wanted the layers 3 x \(attention, mlp\), found attention",
        ),
        ("*-*E/M-", r"wanted the layers mamba, mlp in mtp\.layers\.0, found attention \+ experts"),
        ("M*-*-", r"wanted the layers mamba, 2 x \(attention, mlp\), found"),
        ("**--", r"wanted the layers 2 x \(attention\), 2 x \(mlp\), found"),
    ],
)
def test_layers_that_do_not_match_are_listed(pattern: str, said: str, shared_path: Path) -> None:
    with parallel(GPT):
        save(build(GPT, seed=1), shared_path, 2)
    hybrid = replace(HYBRID, pattern=pattern, mtp_layers=pattern.count("/") or None)
    with parallel(hybrid):
        training = build(hybrid, seed=2)
        assert_names(refused_load(training, shared_path, CheckpointMismatchError), said)


@pytest.mark.world(2)
def test_a_model_of_which_megatron_builds_a_half_is_refused(shared_path: Path) -> None:
    """Without pipeline parallelism, HybridModel builds the first segment and passes over the second."""
    layout = replace(HYBRID, pattern="*-|*E")
    with parallel(layout):
        training = build(layout, seed=1)
        error = error_of(lambda: manager_of(training, shared_path))
        assert_names(raised_everywhere(UnsupportedError, error), r"has 2 of the 4 layers .*'\*-\|\*E'")
