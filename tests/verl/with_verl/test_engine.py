"""What verl's own tests want of clean-up and CheckpointHandler, of the real engine with our checkpoints.

The cases are those of verl's test_checkpoint_cleanup_on_cpu.py and test_checkpoint_handler_on_cpu.py. Theirs call what
BaseCheckpointManager does before and after a save (`ensure_checkpoint_capacity`, `register_checkpoint`) on folders that
are none, with a list in memory; here real checkpoints are saved, and what counts is on the disk. One case is not kept:
with two to keep verl deletes one before the next is there.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from mcore_ckpt.steps import commit, tracker
from mcore_ckpt.steps import listing as steps
from tests.distributed import forked_ranks
from tests.verl import engine_on_cpu, sft


@pytest.fixture
def in_rank(tmp_path: Path, model: Path) -> Callable[..., None]:
    """Calls a function, in one rank, with a trainer that has not trained yet and the root of its checkpoints."""

    def run(work: Callable[[SFTTrainer, Path], None], *overrides: str, root: Path = tmp_path / "root") -> None:
        def in_process(rank: int) -> None:
            engine_on_cpu.enable()
            os.environ["VERL_FILE_LOGGER_PATH"] = str(tmp_path / "losses.jsonl")
            work(SFTTrainer(sft.configuration(root, model, (sft.OURS, *overrides))), root)

        log = tmp_path / "log"
        assert forked_ranks.run(1, in_process, log) == [0], log.read_text()

    return run


def save(engine: Any, root: Path, step: int, max_to_keep: int | None, role: str = "actor") -> None:
    engine.save_checkpoint(str(root / f"global_step_{step}" / role), None, step, max_to_keep)
    # Old ones are deleted beside the training.
    engine.checkpoint_mananager.wait()


def found(root: Path) -> list[int]:
    return [status.step for status in steps.complete_steps(root)]


def test_the_old_one_stays_until_the_new_one_is_there(in_rank: Callable[..., None]) -> None:
    def work(trainer: SFTTrainer, root: Path) -> None:
        seen, publish = [], commit.publish

        def look(*args: Any) -> None:
            seen.append(found(root))
            publish(*args)

        commit.publish = look
        for step in (100, 200, 300):
            save(trainer.engine, root, step, max_to_keep=1)
            assert found(root) == [step]
        assert seen == [[], [100], [200]]

    in_rank(work)


def test_how_many_stay(in_rank: Callable[..., None]) -> None:
    def work(trainer: SFTTrainer, root: Path) -> None:
        for max_to_keep, stay in ((2, [200, 300]), (0, [100, 200, 300]), (None, [100, 200, 300])):
            for step in (100, 200, 300):
                save(trainer.engine, root / f"keeps {max_to_keep}", step, max_to_keep)
            assert found(root / f"keeps {max_to_keep}") == stay

    in_rank(work)


def test_a_checkpoint_of_another_run_stays(in_rank: Callable[..., None], tmp_path: Path) -> None:
    def first(trainer: SFTTrainer, root: Path) -> None:
        trainer.ckpt_handler.save_checkpoint(step=1)

    def second(trainer: SFTTrainer, root: Path) -> None:
        assert trainer.resume_global_step == 1
        for step in (2, 3):
            trainer.ckpt_handler.save_checkpoint(step=step)
        trainer.engine.checkpoint_mananager.wait()
        assert (found(root), found(other)) == ([3], [1])

    other, keep = tmp_path / "other", "trainer.max_ckpt_to_keep=1"
    in_rank(first, keep, root=other)
    in_rank(second, keep, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={other}/global_step_1")


def test_what_a_run_resumes_from(in_rank: Callable[..., None], tmp_path: Path) -> None:
    def first(trainer: SFTTrainer, root: Path) -> None:
        assert trainer.resume_global_step == 0
        assert find_latest_ckpt_path(str(root)) is None
        for step in (1, 2):
            trainer.ckpt_handler.save_checkpoint(step=step)
        assert find_latest_ckpt_path(str(root)) == str(root / "global_step_2")

    def resumed_from(step: int, trainer: SFTTrainer, root: Path) -> None:
        assert trainer.resume_global_step == step

    path = f"trainer.resume_from_path={tmp_path}/root/global_step_1"
    in_rank(first)
    in_rank(partial(resumed_from, 2))
    in_rank(partial(resumed_from, 0), "trainer.resume_mode=disable")
    in_rank(partial(resumed_from, 1), "trainer.resume_mode=resume_path", path)


def test_what_the_trainer_writes_stays(in_rank: Callable[..., None]) -> None:
    """Into the step's folder, while the engine saves it."""

    def work(trainer: SFTTrainer, root: Path) -> None:
        trainer.ckpt_handler.lora_train_meta = {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
        # The second time there is a checkpoint in its place.
        for _ in range(2):
            trainer.ckpt_handler.save_checkpoint(step=1)
            trainer.engine.checkpoint_mananager.wait()
            folder = root / "global_step_1"
            assert json.loads((folder / "lora_train_meta.json").read_text())["r"] == 8
            assert torch.load(folder / "data_0.pt", weights_only=False) == trainer.train_dataloader.state_dict()
            assert found(root) == [1]

    in_rank(work, "++checkpoint.async_save=True")


def test_a_failed_save_leaves_the_tracker(in_rank: Callable[..., None]) -> None:
    def work(trainer: SFTTrainer, root: Path) -> None:
        trainer.ckpt_handler.save_checkpoint(step=1)
        commit.publish = fail
        with pytest.raises(Exception, match="no space left"):
            trainer.ckpt_handler.save_checkpoint(step=2)
        assert find_latest_ckpt_path(str(root)) == str(root / "global_step_1")
        assert found(root) == [1]

    def fail(*args: Any) -> None:
        raise OSError("no space left")

    in_rank(work, "trainer.max_ckpt_to_keep=1")


def test_the_model_for_huggingface(in_rank: Callable[..., None]) -> None:
    def work(trainer: SFTTrainer, root: Path) -> None:
        trainer.ckpt_handler.save_checkpoint(step=1)
        folder = root / "global_step_1" / "huggingface"
        # What verl hands to its rollout, by mbridge.
        bridged = {name: tensor.clone() for name, tensor in trainer.engine.get_per_tensor_param()[0]}
        tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        assert tensors.keys() == bridged.keys()
        for name, tensor in bridged.items():
            assert torch.equal(tensors[name], tensor), name
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
        assert AutoTokenizer.from_pretrained(folder).pad_token == "word0"

    in_rank(work, "checkpoint.save_contents=[model,optimizer,extra,hf_model]")


def test_copies_in_another_store(in_rank: Callable[..., None], tmp_path: Path) -> None:
    store = tmp_path / "store"

    def work(trainer: SFTTrainer, root: Path) -> None:
        place = "global_step_1/actor"
        trainer.engine.save_checkpoint(str(root / place), str(store / place), 1)
        trainer.engine.checkpoint_mananager.wait()
        assert tracker.read_tracker(store) == 1
        trainer.engine.load_checkpoint(str(tmp_path / "elsewhere" / place), str(store / place))

    in_rank(work)


def test_what_was_loaded_is_deleted_after_the_next(in_rank: Callable[..., None]) -> None:
    def work(trainer: SFTTrainer, root: Path) -> None:
        save(trainer.engine, root, 1, None)
        trainer.engine.load_checkpoint(str(root / "global_step_1" / "actor"), del_local_after_load=True)
        assert found(root) == [1]
        save(trainer.engine, root, 2, None)
        assert found(root) == [2]

    in_rank(work)
