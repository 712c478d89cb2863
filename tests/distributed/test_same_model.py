"""A checkpoint of a model with the same tensors that computes something else: named by field, or refused."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.load.huggingface import load_hf
from mcore_ckpt.models import known_architectures, register_architecture
from mcore_ckpt.state.model import unwrap
from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.examine.diff import diff
from mcore_ckpt.tools.examine.select import select
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import manager_of, save
from tests.distributed.hf_models import Shape, assert_holds, build_model, global_tensors
from tests.distributed.refusals import assert_names, refused
from tests.distributed.training import Layout, Training, build, parallel, train
from tests.support.tiny_models import make_hf_folder


def with_other_model(training: Training) -> Training:
    """Every tensor keeps its shape, and megatron computes something else with it."""
    for chunk in map(unwrap, training.model):
        chunk.config.num_attention_heads, chunk.config.rotary_interleaved = 2, True
        chunk.rotary_base = 1000000
    return training


@pytest.mark.world(2)
def test_a_longer_context_loads_from_huggingface(shared_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, shape = shared_path / "hf", Shape(2, tp=2)
    if dist.get_rank() == 0:
        make_hf_folder(folder, "qwen2")
    dist.barrier()
    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        for chunk in map(unwrap, chunks):
            chunk.rotary_base = 1000000  # type: ignore[assignment]
        error = error_of(lambda: load_hf(chunks, folder, strict_model=True))
        assert_names(raised_everywhere(CheckpointMismatchError, error), "rotary_base is 1000000, but config.json")
        # An architecture that has no rules for its config.json still says how many heads cut its rows.
        known = known_architectures()["qwen2"]
        register_architecture(replace(known, rules=()))
        config = unwrap(chunks[0]).config
        heads, config.num_attention_heads = config.num_attention_heads, 2  # type: ignore[union-attr, assignment]
        error = error_of(lambda: load_hf(chunks, folder))
        register_architecture(known)
        config.num_attention_heads = heads  # type: ignore[union-attr, assignment]
        assert_names(raised_everywhere(CheckpointMismatchError, error), "num_attention_heads is 2 in the model")
        with caplog.at_level(logging.WARNING, "mcore_ckpt"):
            load_hf(chunks, folder)
        with everywhere():
            assert_holds(chunks, global_tensors(folder))
    told = [each for each in caplog.messages if "a longer context" in each]
    assert len(told) == (dist.get_rank() == 0)


@pytest.mark.world(2)
def test_another_model_with_the_same_tensors(shared_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = Layout(2, pp=2)
    with parallel(layout):
        saved = build(layout, seed=1)
        train(saved, 0, 1)
        save(saved, shared_path / "a", 1)
        same = manager_of(saved, shared_path / "a")
        report = same.load().report
        same.close()
        other = with_other_model(build(layout, seed=2))
        with everywhere():
            assert report.other_model == ()
        strict = manager_of(other, shared_path / "a", strict_model=True)
        messages = refused(other, strict.load, CheckpointMismatchError)
        strict.close()
        assert_names(messages, "num_attention_heads is 4 in the checkpoint and 2 here", "rotary_interleaved is False")
        manager = manager_of(other, shared_path / "a")
        with caplog.at_level(logging.WARNING, "mcore_ckpt"):
            report = manager.load().report
        is_first = manager._trainer.agreement.is_coordinator
        manager.close()
        save(other, shared_path / "b", 1)
        with everywhere():
            assert report.other_model == (
                "num_attention_heads is 4 in the checkpoint and 2 here",
                "rotary_base is 10000 in the checkpoint and 1000000 here",
                "rotary_interleaved is False in the checkpoint and True here",
            )
    if is_first:
        [wrong, longer] = [each for each in caplog.messages if "in the checkpoint and" in each]
        assert "num_attention_heads is 4" in wrong
        assert "rotary_base is 10000" in longer
        assert "longer context" in longer
        step = Path("global_steps_1")
        facts = read_manifest(shared_path / "a" / step / "actor").model
        reshard(select(shared_path / "a" / step), shared_path / "c", WantedLayout(pp=1))
        assert facts is not None
        assert read_manifest(shared_path / "c" / step / "actor").model == facts
        [found] = diff(shared_path / "a" / step, shared_path / "b" / step, ignored=[".*"]).roles
        assert [value.name for value in found.values if value.name.startswith("model")] == [
            *("model: num_attention_heads", "model: rotary_base", "model: rotary_interleaved")
        ]
