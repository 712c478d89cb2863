"""ROLL's Megatron strategy with our checkpoints, on several ranks: another layout, HuggingFace weights, weights alone.

A whole trainer of ROLL's, on one rank, is in tests/integrations/test_roll.py.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig

from mcore_ckpt.checkpoint.manifest import AdapterSettings
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointMismatchError, CommitError, LockedError, NoRoomError
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps.space_watch import SpaceWatch
from mcore_ckpt.steps.trainer_lock import TrainerLock
from tests.distributed.adapters import ALPHA, DIM, FROZEN, with_adapters
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import TIMEOUT_S
from tests.distributed.global_state import assert_same_state, global_state
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, assert_state, poison, snapshot
from tests.distributed.test_reshard import SAME
from tests.distributed.training import Layout, Training, build, parallel, train

sys.path.insert(0, str(Path(__file__).parent.parent / "integrations" / "roll_stand_in"))
from mcore_ckpt.integrations.roll.pipeline import CheckpointUploader
from mcore_ckpt.integrations.roll.strategy import CheckpointStrategy

pytestmark = pytest.mark.world(2)

DP2 = LAYOUTS["dp2-bf16"]
BF16: dict[str, Any] = {"precision": "bf16"}


class Strategy(CheckpointStrategy):
    """With what `MegatronTrainStrategy.initialize` sets."""

    def __init__(self, training: Training, root: Path, role: str = "actor_train", **args: Any) -> None:
        self.worker = SimpleNamespace(cluster_name=role, pipeline_config=SimpleNamespace(max_ckpt_to_keep=0))
        config = {"type": "mcore_ckpt", "output_dir": str(root), "timeout_s": TIMEOUT_S}
        path = args.pop("model_name_or_path", None)
        options = args.pop("options", {})
        self.worker_config = SimpleNamespace(
            checkpoint_config=config | options, model_args=SimpleNamespace(model_name_or_path=path)
        )
        defaults = {"save_only_model": False, "save_hf_model": False, "ckpt_format": "torch_dist"}
        self.megatron_train_args = SimpleNamespace(**defaults | args)
        self.models_wrapped = training.model
        self.models_unwrapped = [chunk.module for chunk in training.model]
        self.optimizer, self.scheduler = training.optimizer, training.scheduler
        self.tokenizer = self.processor = None
        self.offloaded = True

    def load_states(self) -> None:
        self.offloaded = False

    def close(self) -> None:
        assert self._manager is not None
        self._manager.close()


def complete_step(root: Path, step: int, tmp_path: Path) -> None:
    """The driver's part."""
    if dist.get_rank() == 0:
        folder = tmp_path / f"driver{step}" / "pipeline"
        folder.mkdir(parents=True)
        (folder / "worker_state_pipeline.json").write_text(json.dumps({"step": step}))
        CheckpointUploader(str(root), timeout_s=TIMEOUT_S).upload(f"checkpoint-{step}", str(folder.parent))
    dist.barrier()


@pytest.mark.shows("ROLL", "other layout")
@pytest.mark.parametrize(
    "switches",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            BF16 | {"offload": 0.5, "precision_aware": True},
            id="offloaded",
            marks=(pytest.mark.full, pytest.mark.shows("ROLL", "offload", "precision-aware")),
        ),
        pytest.param(
            BF16 | {"precision_aware": True, "remainders": True},
            id="remainders",
            marks=(pytest.mark.full, pytest.mark.shows("ROLL", "precision-aware")),
        ),
    ],
)
def test_a_checkpoint_of_its_ranks_loads_under_another_layout(
    switches: dict[str, Any], shared_path: Path, tmp_path: Path
) -> None:
    """ROLL's torch_dist format, which is asked for here, cannot be resumed from under any."""
    root = shared_path / "root"
    layout = Layout(2, **SAME, **switches)
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, 2)
        strategy = Strategy(first, root)
        metrics = strategy.save_checkpoint("unused", 2, "checkpoint-2", is_last_step=True)
        complete_step(root, 2, tmp_path)
        wanted = global_state(first)
        strategy.close()
        with everywhere():
            assert metrics.keys() == {"load", "save"}
            assert not strategy.offloaded
            assert [status.step for status in steps.complete_steps(root)] == [2]
    layout = replace(layout, tp=2)
    with parallel(layout):
        # An actor is handed the checkpoint, a critic its own folder in it.
        for name in ("checkpoint-2", "checkpoint-2/actor_train"):
            second = build(layout, seed=2)
            poison(second)
            strategy = Strategy(second, root)
            strategy.load_checkpoint(str(root / name))
            strategy.close()
            found = global_state(second)
            with everywhere():
                assert_same_state(found, wanted)


def test_hugging_face_weights_are_beside_the_checkpoint_if_roll_asks_for_them(
    shared_path: Path, tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=40,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        attention_bias=False,
    )
    if dist.get_rank() == 0:
        config.save_pretrained(shared_path / "published")
    dist.barrier()
    with parallel(DP2):
        training = build(DP2, seed=1)
        strategy = Strategy(
            training, shared_path / "root", save_hf_model=True, model_name_or_path=str(shared_path / "published")
        )
        strategy.save_checkpoint("unused", 1, "checkpoint-1", is_last_step=True)
        strategy.close()
        with everywhere():
            folder = shared_path / "root" / "checkpoint-1" / "actor_train" / "huggingface"
            assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
            assert list(folder.glob("*.safetensors"))


@pytest.mark.shows("ROLL", "LoRA")
def test_adapters_are_saved_alone_and_resumed(
    shared_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `lora_target` the model is a PeftModel. ROLL fills the base as it does without a checkpoint."""
    root, layout = shared_path / "root", Layout(2, frozen=FROZEN)
    with_adapters(monkeypatch, "PEFT", use_rslora=True)
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, 2)
        strategy = Strategy(first, root)
        strategy.save_checkpoint("unused", 2, "checkpoint-2", is_last_step=True)
        strategy.close()
        complete_step(root, 2, tmp_path)
        at_save = snapshot(first)
        through = train(first, 2, 4)
        with everywhere():
            role = root / "checkpoint-2" / "actor_train"
            assert read_manifest(role).adapters == AdapterSettings(ALPHA * DIM**0.5, trained=())
            saved = list(NativeReader.open(role).names)
            assert len(saved) == 4  # of two layers, A and B
            assert all(".adapter.linear_" in name for name in saved)
    with parallel(layout):
        second = build(layout, seed=1)
        train(second, 7, 8)
        with torch.no_grad():
            for chunk in second.model:
                for parameter in (p for p in chunk.parameters() if p.requires_grad):
                    parameter.fill_(float("nan"))
        strategy = Strategy(second, root)
        strategy.load_checkpoint(str(root / "checkpoint-2"))
        strategy.close()
        loaded = snapshot(second)
        resumed = train(second, 2, 4)
        with everywhere():
            assert_same(loaded, at_save)
            assert resumed == through


def test_a_config_that_cannot_be_read_is_no_obstacle_unless_it_is_needed(shared_path: Path) -> None:
    """A published model may bring code of its own, which is not run for the sake of a copy of its config."""
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    if dist.get_rank() == 0:
        (shared_path / "published").mkdir()
        (shared_path / "published" / "config.json").write_text(json.dumps(own))
    dist.barrier()
    options = {"model_name_or_path": str(shared_path / "published")}
    with parallel(DP2):
        training = build(DP2, seed=1)
        strategy = Strategy(training, shared_path / "root", **options)
        strategy.save_checkpoint("unused", 1, "checkpoint-1", is_last_step=True)
        strategy.close()
        with everywhere():
            assert (shared_path / "root" / "checkpoint-1" / "actor_train" / "manifest.json").exists()
        strategy = Strategy(training, shared_path / "root", **options, save_hf_model=True)
        with pytest.raises(ValueError, match="custom code"):
            strategy.save_checkpoint("unused", 2, "checkpoint-2")


def test_weights_alone_are_saved_if_roll_says_so(shared_path: Path, tmp_path: Path) -> None:
    root = shared_path / "root"
    with parallel(DP2):
        training = build(DP2, seed=1)
        strategy = Strategy(training, root, save_only_model=True)
        strategy.save_checkpoint("unused", 1, "checkpoint-1", is_last_step=True)
        strategy.close()
        complete_step(root, 1, tmp_path)
        with everywhere():
            assert {path.name for path in (root / "checkpoint-1" / "actor_train").iterdir()} == {
                "manifest.json",
                "model",
            }
        strategy = Strategy(training, root)
        error = error_of(lambda: strategy.load_checkpoint(str(root / "checkpoint-1")))
        strategy.close()
        raised_everywhere(CheckpointMismatchError, error)


def test_a_driver_that_never_commits_is_told_on_all_ranks(shared_path: Path, tmp_path: Path) -> None:
    """And what was saved by several ranks is taken by them again, bit for bit."""
    root = shared_path / "root"
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        strategy = Strategy(training, root, options={"async_upload": True})
        strategy.save_checkpoint("unused", 1, "checkpoint-1")
        error = error_of(lambda: strategy.save_checkpoint("unused", 2, "checkpoint-2"))
        messages = raised_everywhere(CommitError, error)
        with everywhere():
            assert "checkpoint-1 never became a checkpoint" in messages[0]
        complete_step(root, 1, tmp_path)
        strategy.save_checkpoint("unused", 2, "checkpoint-2", is_last_step=True)
        saved = snapshot(training)
        complete_step(root, 2, tmp_path)
        strategy.close()
        second = build(DP2, seed=2)
        poison(second)
        strategy = Strategy(second, root)
        strategy.load_checkpoint(str(root / "checkpoint-2"))
        strategy.close()
        assert_state(second, saved)


def test_a_second_trainer_takes_nothing_from_the_first(shared_path: Path, tmp_path: Path) -> None:
    """Started by mistake from the same configuration, it comes to a step that the first one has saved."""
    root = shared_path / "root"
    with parallel(DP2):
        training = build(DP2, seed=1)
        strategy = Strategy(training, root)
        strategy.save_checkpoint("unused", 1, "checkpoint-1", is_last_step=True)
        strategy.close()
        complete_step(root, 1, tmp_path)
        if dist.get_rank() == 0:
            told, tell = os.pipe()
            over, end = os.pipe()
            first = os.fork()
            if first == 0:
                os.close(end)
                TrainerLock(root, "actor_train").take(0)
                os.write(tell, b"x")
                os.read(over, 1)
                os._exit(0)
            os.read(told, 1)
            os.close(over)
        dist.barrier()
        second = Strategy(training, root)
        error = error_of(lambda: second.save_checkpoint("unused", 1, "checkpoint-1"))
        second.close()
        if dist.get_rank() == 0:
            os.close(end)
            os.waitpid(first, 0)
        raised_everywhere(LockedError, error)
        with everywhere():
            assert [status.step for status in steps.complete_steps(root)] == [1]
        # Nor does one whose files do not fit.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SpaceWatch, "check", full)
            third = Strategy(training, root)
            raised_everywhere(NoRoomError, error_of(lambda: third.save_checkpoint("unused", 1, "checkpoint-1")))
            third.close()
        with everywhere():
            assert [status.step for status in steps.complete_steps(root)] == [1]


def full(*_: object) -> None:
    raise NoRoomError("the disk is full")
