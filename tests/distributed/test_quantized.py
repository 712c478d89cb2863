"""Trainings with weights in 8 and 4 bits, which are saved and loaded through their main parameters.

transformer-engine's tensors are stood in for (tests/support/quantized.py).
"""

import inspect
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import fp8_utils
from megatron.core.optimizer import distrib_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.errors import CheckpointError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.host_memory import HostMemory
from mcore_ckpt.load.huggingface import load_hf
from mcore_ckpt.save import nodes
from mcore_ckpt.save.capture import WeightCopies
from mcore_ckpt.state import main_weights
from mcore_ckpt.state.main_weights import weights_to_save
from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.examine.select import select
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import manager_of, save
from tests.distributed.foreign_checkpoints import save_torch_dist, seed_replicas_alike
from tests.distributed.global_state import GlobalState, assert_same_state, global_state, loss_and_norm
from tests.distributed.hf_words import hf_config
from tests.distributed.resuming import (
    SIZES,
    assert_chain_returns_the_same_bytes,
    assert_goes_on,
    loaded,
    loaded_from,
    trained,
)
from tests.distributed.snapshot import assert_same, chained, poison, snapshot
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, Training, build, parallel, train
from tests.support.quantized import computing

FULL = pytest.mark.full
EIGHT = Layout(2, precision="bf16", quantized="tensorwise")
# megatron (0.16) takes MXFP8 from the wrong places in its buffers unless all sizes are multiples of 64.
MXFP8: dict[str, Any] = {"quantized": "mxfp8", "hidden_size": 64}
OVERLAP: dict[str, Any] = {"overlap_param_gather": True, "overlap_grad_reduce": True, "bucket_size": 5000}
LAYOUTS = {
    "tensorwise": EIGHT,
    "delayed": replace(EIGHT, quantized="delayed"),
    "blockwise": replace(EIGHT, quantized="blockwise"),
    "mxfp8": replace(EIGHT, **MXFP8),
    "nvfp4": replace(EIGHT, quantized="nvfp4"),
    "tp2": replace(EIGHT, tp=2, quantized="blockwise"),
    "pp2-tied": replace(EIGHT, pp=2, tied_embeddings=True),
    "ep2": replace(EIGHT, ep=2, experts=4),
    "overlap": replace(EIGHT, **OVERLAP),
    "overlap-blockwise": replace(EIGHT, quantized="blockwise", **OVERLAP),
    "overlap-mxfp8": replace(EIGHT, **MXFP8, **OVERLAP),
    "low-moments": replace(EIGHT, precision_aware=True, moment_dtypes=("fp16", "bf16")),
    "fp32-norms": replace(EIGHT, fp32_norms=True, **OVERLAP),
    "fp16": replace(EIGHT, precision="fp16"),
    "dp4-instances": replace(EIGHT, world=4, optimizer_instances=2),
}
IN_CI = {("delayed", 2), ("overlap-mxfp8", 2), ("overlap-blockwise", 0), ("nvfp4", 2), ("low-moments", 2)}
HAS_FOUR_BITS = "quantize_nvfp4_param_shard" in inspect.getsource(distrib_optimizer)


# The weights of these models would be one piece.
PIECE_BYTES = 4096


@pytest.fixture(autouse=True)
def in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "WEIGHT_PIECE_BYTES", PIECE_BYTES)


def needs(layout: Layout) -> None:
    if layout.quantized == "nvfp4" and not HAS_FOUR_BITS:
        pytest.skip("this megatron-core has no weights in NVFP4")


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        pytest.param(layout, steps, id=f"{name}-{steps}", marks=marks(layout.world, (name, steps) in IN_CI))
        for name, layout in LAYOUTS.items()
        for steps in (2, 0)
    ],
)
def test_a_killed_training_goes_on_bit_for_bit(layout: Layout, steps: int, shared_path: Path) -> None:
    needs(layout)
    assert_goes_on(layout, steps, shared_path)


# -- to and from other settings ----------------------------------------------------------------------------

PLAIN = Layout(2, precision="bf16", hidden_size=64, **SIZES)
QUANTIZED = replace(PLAIN, quantized="blockwise")


def without_weights(state: GlobalState) -> GlobalState:
    """Without the model's own tensors, of which some are quantized."""
    return {name: tensor for name, tensor in state.items() if not name.endswith(" model")}


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({}, {"quantized": None, "tp": 2}),
        ({"quantized": None}, {"quantized": "mxfp8", "pp": 2}),
        pytest.param({"tp": 2}, {"quantized": "tensorwise", "pp": 2}, marks=FULL),
        pytest.param({"pp": 2}, {"precision_aware": True, "remainders": True, "quantized": None}, marks=FULL),
        pytest.param({"quantized": "mxfp8"}, {"precision": "fp32", "quantized": None}, marks=FULL),
        pytest.param({"experts": 4, "ep": 2}, {"experts": 4}, marks=FULL),
        pytest.param({"offload": 0.5, "quantized": None}, {"quantized": "tensorwise", "tp": 2}, marks=FULL),
    ],
)
def test_other_settings_and_layouts_have_the_same_main_parameters(
    saved: dict[str, Any], wanted: dict[str, Any], shared_path: Path
) -> None:
    state, step = trained(replace(QUANTIZED, **saved), shared_path)
    layout = replace(QUANTIZED, **wanted)
    with parallel(layout):
        training, report = loaded(layout, shared_path)
        found = global_state(training)
        next_step = loss_and_norm(train(training, 2, 3)[0])
        with everywhere():
            assert not report.rounded
            assert_same_state(without_weights(found), without_weights(state))
            assert next_step == pytest.approx(step, rel=0.1)


@pytest.mark.full
@pytest.mark.world(2)
def test_a_chain_of_settings_returns_the_same_bytes(shared_path: Path) -> None:
    """So the model's files have the same weights as those of a training in bf16."""
    four_bits = "nvfp4" if HAS_FOUR_BITS else "tensorwise"
    chain = [PLAIN, QUANTIZED, replace(PLAIN, quantized="mxfp8", tp=2), replace(PLAIN, quantized=four_bits), PLAIN]
    assert_chain_returns_the_same_bytes(chain, shared_path)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        ("mxfp8", {}),
        pytest.param("mxfp8", {"shared_writes": False}, marks=FULL),
        # With its `_extra_state` too, one of the replicas writes the files alone.
        pytest.param("delayed", {"async_save": True}, marks=FULL),
    ],
)
def test_the_model_files_have_the_rounded_main_parameters(
    recipe: str, config: dict[str, Any], shared_path: Path
) -> None:
    """Whatever is overlapped; and the tools read them as those of any training."""
    layout = replace(QUANTIZED, quantized=recipe, **OVERLAP)
    with parallel(layout):
        first = build(layout, seed=1)
        manager = manager_of(first, shared_path, **config)
        for step in range(1, 4):  # the second and third save use the plan of the first
            train(first, step - 1, step)
            manager.save(step).wait()
        state = global_state(first)
        manager.close()
        reference = train(first, 3, 5)
    with parallel(layout):
        undisturbed = build(layout, seed=1)
        again = train(undisturbed, 0, 5)[3:]
    with everywhere():
        assert again == reference  # saving has changed nothing
        if dist.get_rank() == 0:
            reshard(select(shared_path), shared_path / "b", WantedLayout(tp=2))
    target = replace(PLAIN, tp=2)
    with parallel(target):
        for root in (shared_path, shared_path / "b"):
            alone = build(target, seed=2)
            poison(alone)
            manager = CheckpointManager(root, alone.model, config=CheckpointConfig(load_contents=("model",)))
            manager.load(step=3) if root == shared_path else manager.load()
            manager.close()
            found = global_state(alone)
            with everywhere():
                for name, main in state.items():
                    if name.endswith(" param"):
                        assert torch.equal(found[name.removesuffix("param") + "model"], main.bfloat16()), name


class Allocated(TorchDispatchMode):
    """Lists the bytes of all tensors that this thread makes, but for views and those without memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.name().startswith("aten::") and type(made) is torch.Tensor and not made.is_meta:
            before = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
            self.nbytes += [] if _storage(made) in before else [made.nbytes]
        return made


def _storage(tensor: torch.Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


@pytest.mark.world(2)
def test_one_piece_of_the_weights_is_in_memory_at_a_time(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # While memory for images is being prepared, files are written straight from tensors, which all have memory then.
    monkeypatch.setattr(HostMemory, "prepare", lambda memory, nbytes, device: None)
    with parallel(QUANTIZED):
        training = build(QUANTIZED, seed=1)
        train(training, 0, 1)
        # Without `extra`, the states of random number generators.
        manager = manager_of(training, shared_path, async_save=True, save_contents=("model", "optimizer"))
        manager.save(1).wait()  # makes the structures of the files, which are kept
        with Allocated() as allocated:
            handle = manager.save(2)
        handle.wait()
        weights = weights_to_save(training.model, training.optimizer).by_parameter.values()
        manager.close()
        with everywhere():
            assert sum(weight.nbytes for weight in weights) > 10 * PIECE_BYTES
            assert PIECE_BYTES <= sum(allocated.nbytes) < 2 * PIECE_BYTES, allocated.nbytes


@pytest.mark.world(2)
def test_a_failed_copy_fails_the_save_on_all_ranks(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks need this rank's part of each piece that follows."""
    with parallel(QUANTIZED):
        training = build(QUANTIZED, seed=1)
        manager = manager_of(training, shared_path, async_save=True)
        if dist.get_rank() == 1:
            monkeypatch.setattr(WeightCopies, "take", lambda copies, fragments: 1 / 0)
        with pytest.raises(CheckpointError, match="division by zero"):
            manager.save(1).wait()
        monkeypatch.undo()
        manager.save(2).wait()
        manager.close()


@pytest.mark.world(2)
def test_a_folder_that_fails_on_one_node_fails_the_save_on_all(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not keep this rank from gathering weights together with the others."""
    with parallel(QUANTIZED):
        training = build(QUANTIZED, seed=1)
        fast = FastTier(shared_path / "node", replicas=0)
        manager = manager_of(training, shared_path / "root", async_save=True, fast=fast)
        if dist.get_rank() == 1:
            monkeypatch.setattr(nodes, "make_staging", lambda attempt, mode: 1 / 0)
        with pytest.raises(CheckpointError, match="division by zero"):
            manager.save(1).wait()
        monkeypatch.undo()
        manager.save(2).wait()
        manager.close()


# -- model and optimizer apart -----------------------------------------------------------------------------


def weights_of(training: Training) -> dict[str, torch.Tensor]:
    with computing(()):
        return {name: each.detach().float() for chunk in training.model for name, each in chunk.named_parameters()}


@pytest.mark.world(2)
@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("mxfp8", marks=FULL)])
def test_model_and_optimizer_are_loaded_apart(recipe: str, shared_path: Path) -> None:
    layout = replace(QUANTIZED, quantized=recipe)
    state, _ = trained(layout, shared_path / "both")
    trained(layout, shared_path / "optimizer", save_contents=("optimizer", "extra"))
    with parallel(layout):
        wanted = weights_of(loaded(layout, shared_path / "both")[0])
        for folder in ("both", "optimizer"):
            training, _ = loaded(layout, shared_path / folder, load_contents=("optimizer",))
            found, weights = without_weights(global_state(training)), weights_of(training)
            with everywhere():
                assert_same_state(found, without_weights(state))
                assert_same_weights(weights, wanted)
        for folder in ("both", "optimizer"):
            training = build(layout, seed=2)
            poison(training)
            manager = manager_of(training, shared_path / folder, load_contents=("model",))
            manager.load()
            manager.close()
            found, weights = global_state(training), weights_of(training)
            with everywhere():
                assert_same_weights(weights, wanted)
                for name in (name for name in found if name.endswith(" param")):
                    # Those of other weights follow the weights.
                    is_quantized = name.removesuffix("param") + "model" not in found
                    main = state[name] if is_quantized else state[name].bfloat16().float()
                    assert torch.equal(found[name], main), name


@pytest.mark.world(2)
def test_without_an_optimizer_the_weights_of_the_files_are_quantized(shared_path: Path) -> None:
    trained(QUANTIZED, shared_path)
    with parallel(QUANTIZED):
        wanted = weights_of(loaded(QUANTIZED, shared_path)[0])
        alone = build(QUANTIZED, seed=2)
        poison(alone)
        config = CheckpointConfig(load_contents=("model",), save_contents=("model",))
        manager = CheckpointManager(shared_path, alone.model, config=config)
        manager.load()
        weights = weights_of(alone)
        with pytest.raises(UnsupportedError, match="is quantized, and has no main parameter"):
            manager.save(3).wait()
        manager.close()
        with everywhere():
            assert_same_weights(weights, wanted)


@pytest.mark.world(2)
@pytest.mark.parametrize("source", ["shared", pytest.param("rank0", marks=FULL)])
def test_a_huggingface_model_goes_out_and_in(source: Any, shared_path: Path) -> None:
    """Out of rounded main parameters; into main parameters, or into the weights if there are none."""
    layout = replace(QUANTIZED, padded_vocab=None)  # rows that pad the vocabulary do not come back
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, 2)
        contents = ("model", "optimizer", "extra", "hf_model")
        save(first, shared_path, 2, hf_config=hf_config(layout), save_contents=contents)
        state = global_state(first)
        # Main parameters of a load of bf16 values.
        wanted = weights_of(loaded(layout, shared_path)[0])
        folder = shared_path / "global_steps_2" / "actor" / "huggingface"
        for has_optimizer in (True, False):
            training = build(layout, seed=2)
            poison(training)
            load_hf(training.model, folder, source=source, optimizer=training.optimizer if has_optimizer else None)
            weights, found = weights_of(training), global_state(training) if has_optimizer else {}
            with everywhere():
                assert_same_weights(weights, wanted)
                for name in (name for name in found if name.endswith(" param")):
                    assert torch.equal(found[name], state[name].bfloat16().float()), name
        head = ("lm_head.weight", "output_layer.weight")
        load_hf(training.model, folder, source=source, optimizer=training.optimizer, ignore=head)


def assert_same_weights(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    differing = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not differing, differing


# -- what a load does --------------------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize("left_out", ["finish", "write", pytest.param("gather", marks=FULL)])
def test_what_a_load_does_is_needed(left_out: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: without it, the training does not go on as it was."""
    # Where gathering is overlapped, the next forward pass would gather anyway.
    layout = replace(EIGHT, quantized="blockwise", **(OVERLAP if left_out == "finish" else {}))
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, 2)
        save(first, shared_path, 2)
        reference = train(first, 2, 4)
        second = build(layout, seed=2)
        poison(second)
        if left_out == "finish":
            monkeypatch.setattr(fp8_utils, "te_post_all_gather_processing", lambda weights: None)
        elif left_out == "gather":
            monkeypatch.setattr(main_weights, "gather_parameters", lambda chunks: None)
        else:
            monkeypatch.setattr(main_weights, "copy_main_to_model", lambda optimizer: None)
        manager = manager_of(second, shared_path)
        manager.load()
        manager.close()
        monkeypatch.undo()
        resumed = train(second, 2, 4)
        with everywhere():
            assert resumed != reference


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (replace(EIGHT, frozen="linear_fc1"), r"linear_fc1.weight is quantized, and has no main .*skip_frozen"),
        (replace(EIGHT, quantized="delayed", precision_aware=True), r"to FusedAdam \(fp8_recipe=delayed"),
    ],
    ids=["frozen", "delayed"],
)
def test_what_cannot_be_put_back_is_refused(layout: Layout, message: str, shared_path: Path) -> None:
    with parallel(layout):
        training = build(layout, seed=1)
        with pytest.raises(UnsupportedError, match=message):
            save(training, shared_path, 1)
        if layout.frozen:
            save(training, shared_path, 1, skip_frozen=True)


# -- other programs' checkpoints ---------------------------------------------------------------------------


def weight_to_main(name: str) -> str:
    return name.removesuffix(" model") + " param" if name.endswith(" model") else name


def quantize_as_stored(training: Training) -> None:
    """Gives the weights what 8 bits leave of them, as megatron stores quantized weights in torch_dist."""
    with torch.no_grad():
        for chunk in training.model:
            for name, weight in chunk.named_parameters():
                if ".linear_" in name:
                    scale = weight.abs().max().float() / 448
                    weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)


@pytest.mark.world(2)
@pytest.mark.parametrize("contents", [("model", "optimizer"), ("model",)])
def test_torch_dist_of_quantized_weights_is_read(contents: tuple[str, ...], shared_path: Path) -> None:
    with parallel(PLAIN):
        first = build(PLAIN, seed=1)
        seed_replicas_alike()
        train(first, 0, 2)
        state = global_state(first)
        # The weights of a load are rounded from the main parameters, and not the quantized ones.
        rounded = {name: state[weight_to_main(name)].to(tensor.dtype) for name, tensor in state.items()}
        quantize_as_stored(first)
        args = Namespace(fp8_param_gather=True)
        save_torch_dist(first, shared_path, "fully_reshardable", args=args)
        save_torch_dist(first, shared_path / "says nothing", "fully_reshardable")
    for layout in (PLAIN, QUANTIZED):
        with parallel(layout):
            training, _ = loaded_from(shared_path, layout, contents)
            found = global_state(training)
            weights = weights_of(training)
            with everywhere():
                assert all(torch.isfinite(weight).all() for weight in weights.values())
                if "optimizer" in contents:
                    assert_same_state(found, {name: rounded[name] for name in found})
                for name in (name for name in found if name.endswith(" param")):
                    torch.testing.assert_close(found[name], state[name], rtol=0.1, atol=1e-3)
            if layout == PLAIN and "optimizer" in contents:
                manager = manager_of(training, shared_path / "unused", load_contents=contents)
                with pytest.raises(CheckpointMismatchError, match="do not round to"):
                    manager.load(path=shared_path / "says nothing")
                manager.close()


@pytest.mark.world(2)
def test_weights_of_other_parameters_are_no_quantized_ones(shared_path: Path) -> None:
    """A checkpoint whose main parameters are mixed up is refused, as ever."""
    with parallel(PLAIN):
        first = build(PLAIN, seed=1)
        seed_replicas_alike()
        train(first, 0, 2)
        for part in chained(first.optimizer):
            for group in part.param_groups:
                for main in group["params"]:
                    main.data.copy_(main.data.roll(7))
        save_torch_dist(first, shared_path, "dp_reshardable")
        second = build(PLAIN, seed=2)
        before = snapshot(second)
        manager = manager_of(second, shared_path / "unused", load_contents=("model", "optimizer"))
        with pytest.raises(CheckpointMismatchError, match="do not round to"):
            manager.load(path=shared_path)
        manager.close()
        after = snapshot(second)
        with everywhere():
            assert_same(after, before)
