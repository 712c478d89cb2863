"""A new kind of checkpoint, which is only added to the list of kinds, loads its weights into a live model."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats import kinds
from mcore_ckpt.state.model import model_shards
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.hf_models import Shape, assert_holds, build_model, global_tensors
from tests.distributed.refusals import assert_names, refused
from tests.distributed.training import Layout, build, parallel, train
from tests.support.tiny_models import make_hf_folder
from tests.support.toy_kind import Toy, save_toy

MODEL = CheckpointConfig(save_contents=("model",), load_contents=("model",), timeout_s=60)
BF16 = Layout(2, precision="bf16")


@pytest.fixture(autouse=True)
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, Toy()))


def on_rank_0(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    with everywhere():
        if dist.get_rank() == 0:
            save_toy(folder, tensors)


@pytest.mark.world(2)
@pytest.mark.parametrize("shape", [Shape(2, tp=2), Shape(2, pp=2)], ids=["tp2", "pp2"])
def test_its_weights_load_under_any_layout(shape: Shape, shared_path: Path) -> None:
    hf, toy = shared_path / "hf", shared_path / "global_step_7" / "toy"
    with everywhere():
        if dist.get_rank() == 0:
            make_hf_folder(hf, "qwen2")
    tensors = global_tensors(hf)
    on_rank_0(toy, tensors)
    with parallel(shape.layout):
        chunks = build_model(hf, shape)
        with closing(CheckpointManager(shared_path / "root", chunks, config=MODEL)) as manager:
            result = manager.load(path=toy)
        with everywhere():
            assert (result.step, result.extra_state, result.report.path) == (7, None, toy)
            assert_holds(chunks, tensors)

        name = "decoder.layers.1.mlp.linear_fc2.weight"
        on_rank_0(toy, {each: tensor for each, tensor in tensors.items() if each != name})
        with closing(CheckpointManager(shared_path / "root", chunks, config=MODEL)) as manager:
            error = error_of(lambda: manager.load(path=toy))
        assert_names(raised_everywhere(CheckpointMismatchError, error), f"{name}: wanted .* found no such tensor")
        on_rank_0(toy, {**tensors, "decoder.layers.9.mlp.linear_fc2.weight": torch.ones(2)})
        with closing(CheckpointManager(shared_path / "root", chunks, config=MODEL)) as manager:
            error = error_of(lambda: manager.load(path=toy))
        assert_names(raised_everywhere(CheckpointMismatchError, error), r"layers\.9\..*: wanted no such tensor, found")
        with everywhere():
            assert_holds(chunks, tensors)


@pytest.mark.world(2)
def test_a_training_takes_the_weights_and_begins_anew(shared_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with parallel(BF16):
        training = build(BF16, seed=1)
        shards = {shard.key.name: shard.tensor for shard in model_shards(training.model)}
        tensors = {name: tensor.detach().float() for name, tensor in shards.items() if tensor.is_floating_point()}
        on_rank_0(shared_path / "toy", tensors)
        other = build(BF16, seed=2)
        train(other, 0, 1)
        arguments = (shared_path / "root", other.model, other.optimizer, other.scheduler)
        for contents in (("model", "optimizer", "extra"), ("optimizer",), ("extra",)):
            with closing(CheckpointManager(*arguments, config=replace(MODEL, load_contents=contents))) as manager:
                messages = refused(other, lambda: manager.load(path=shared_path / "toy"), UnsupportedError)
            assert_names(messages, "is a checkpoint of the toy trainer", r"load_contents=\('model',\)")
        with closing(CheckpointManager(*arguments, config=replace(MODEL, strict_dtypes=True))) as manager:
            messages = refused(other, lambda: manager.load(path=shared_path / "toy"), CheckpointMismatchError)
        assert_names(messages, "float32 to bfloat16")
        with closing(CheckpointManager(*arguments, config=MODEL)) as manager:
            result = manager.load(path=shared_path / "toy")
        with everywhere():
            assert sum(result.report.rounded.values()) == len(tensors)
            told = [line for line in caplog.messages if "values were rounded" in line]
            warning = f"{shared_path / 'toy'}: values were rounded: model: float32 to bfloat16"
            assert told == ([] if dist.get_rank() else [warning])
            for shard in model_shards(other.model):
                if shard.key.name in tensors:
                    assert torch.equal(shard.tensor, tensors[shard.key.name].to(shard.tensor.dtype)), shard.key.name
