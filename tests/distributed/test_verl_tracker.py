"""The tracker that verl resumes from: moved after the commit, and put right where a trainer died before it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_state, poison, snapshot
from tests.distributed.test_async import full_disk
from tests.distributed.test_fallback import flip_a_bit
from tests.distributed.training import Training, build, parallel, train
from tests.distributed.verl_words import (
    resume,
    step_folder,
    steps_in,
    tracked,
    verl_manager,
    write_ppo_data,
    write_sft_data_and_tracker,
)

DP2 = LAYOUTS["dp2-bf16"]
MODEL_FILE = "actor/model/mp_rank_00_000/model_states.pt"

pytestmark = pytest.mark.world(2)


@contextmanager
def on_rank_0() -> Iterator[bool]:
    """Of one folder: true on one rank, and the others wait until it is done."""
    yield dist.get_rank() == 0
    dist.barrier()


def save_ppo(training: Training, root: Path, step: int, async_save: bool = False) -> None:
    manager = verl_manager(training, async_save=async_save)
    manager.save_checkpoint(str(step_folder(root, step) / "actor"), None, step, None)
    manager.close()
    write_ppo_data(root, step)


def refused(
    training: Training, folder: Path, expected: type[Exception] = CheckpointNotFoundError, **options: Any
) -> str:
    """What verl's resume raises, on every rank alike."""
    manager = verl_manager(training, **options)
    messages = raised_everywhere(expected, error_of(lambda: manager.load_checkpoint(str(folder))))
    manager.close()
    # Rank 0 has it from itself.
    (message,) = {message.removeprefix("rank 0: ") for message in messages}
    return message


def test_a_step_counts_when_actor_and_critic_are_committed(shared_path: Path) -> None:
    with parallel(DP2):
        trainings = {role: build(DP2, seed) for seed, role in enumerate(("actor", "critic"))}
        managers = {role: verl_manager(training, role, async_save=True) for role, training in trainings.items()}
        for step in (1, 2):
            managers["actor"].save_checkpoint(str(step_folder(shared_path, step) / "actor"), None, step, 1)
            managers["actor"].wait()
            with everywhere():
                assert tracked(shared_path) == (None if step == 1 else "1")
                assert (step_folder(shared_path, 1) / "actor/manifest.json").exists()
            managers["critic"].save_checkpoint(str(step_folder(shared_path, step) / "critic"), None, step, 1)
            managers["critic"].wait()
            dist.barrier()
            with everywhere():
                assert tracked(shared_path) == str(step)
        for manager in managers.values():
            manager.close()
        dist.barrier()
        with everywhere():
            assert not step_folder(shared_path, 1).exists()


def test_sft_comes_back_though_its_tracker_names_what_never_came(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = verl_manager(training, async_save=True)
        manager.save_checkpoint(str(step_folder(shared_path, 1)), None, 1, None)
        write_sft_data_and_tracker(shared_path, 1)
        manager.wait()
        at_save = snapshot(training)
        train(training, 0, 1)
        with full_disk(monkeypatch, rank=1):
            manager.save_checkpoint(str(step_folder(shared_path, 2)), None, 2, None)
            write_sft_data_and_tracker(shared_path, 2)
            error_of(manager.close)
        with everywhere():
            assert tracked(shared_path) == "2"
        message = refused(training, step_folder(shared_path, 2))
        with everywhere():
            assert "global_step_2" in message
            assert "the newest complete step is 1" in message
            assert tracked(shared_path) == "1"
            assert (step_folder(shared_path, 1) / "data_1.pt").exists()
        poison(training)
        resume(training, step_folder(shared_path, 1))
        assert_state(training, at_save)


def test_where_nothing_was_ever_committed_training_may_begin(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        write_sft_data_and_tracker(shared_path, 5)
        message = refused(training, step_folder(shared_path, 5))
        with everywhere():
            assert "there is no other checkpoint here" in message
            assert tracked(shared_path) is None
        # With copies elsewhere the beginning is not where to go.
        write_sft_data_and_tracker(shared_path, 5)
        message = refused(training, step_folder(shared_path, 5), remote=(shared_path / "store").as_uri())
        with everywhere():
            assert "resume_from_path" in message
            assert tracked(shared_path) == "5"


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ("missing", "data.pt is missing"),
        ("queue", "transfer_queue is missing"),
        ("cut", "data.pt: is cut"),
        ("critic", "not committed by critic"),
    ],
)
def test_a_step_whose_trainer_died_before_all_of_it_was_there_is_not_resumed(
    shared_path: Path, lost: str, reason: str
) -> None:
    """Weights of one step and data of none, or an actor without its critic: verl would go on, or fail at each start."""
    with parallel(DP2):
        training = build(DP2, seed=1)
        for step in (1, 2):
            save_ppo(training, shared_path, step)
        newest = step_folder(shared_path, 2)
        with on_rank_0() as writes:
            if writes and lost == "missing":
                (newest / "data.pt").unlink()
            if writes and lost == "queue":
                shutil.rmtree(newest / "transfer_queue")
            if writes and lost == "cut":
                (newest / "data.pt").write_bytes((newest / "data.pt").read_bytes()[:-20])
        if lost == "critic":
            manager = verl_manager(training, roles=["actor", "critic"])
            manager.save_checkpoint(str(newest / "actor"), None, 2, None)
            manager.close()
        with on_rank_0() as writes:
            if writes:
                (shared_path / "latest_checkpointed_iteration.txt").write_text("2")
        message = refused(training, newest / "actor")
        with everywhere():
            assert reason in message
            assert tracked(shared_path) == "1"
        # Asked for again, it is taken as it is; and the tracker's step is sound.
        resume(training, newest / "actor")
        resume(training, step_folder(shared_path, 1) / "actor")


def test_a_damaged_step_sends_the_next_start_to_the_one_before(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        for step in (1, 2):
            train(training, step, step + 1)
            save_ppo(training, shared_path, step)
        at_save = snapshot(training)
        train(training, 3, 4)
        save_ppo(training, shared_path, 3)
        with on_rank_0() as writes:
            if writes:
                flip_a_bit(step_folder(shared_path, 3) / MODEL_FILE)
        message = refused(training, step_folder(shared_path, 3) / "actor", CheckpointCorruptError)
        with everywhere():
            assert "model_states.pt" in message
            assert "the newest complete step is 2" in message
            assert tracked(shared_path) == "2"
        resume(training, step_folder(shared_path, 2) / "actor")
        assert_state(training, at_save)


def test_the_only_step_is_not_given_up_because_it_is_damaged(shared_path: Path) -> None:
    """Else the next start would begin from the beginning, and in time save over it."""
    with parallel(DP2):
        training = build(DP2, seed=1)
        save_ppo(training, shared_path, 1)
        with on_rank_0() as writes:
            if writes:
                flip_a_bit(step_folder(shared_path, 1) / MODEL_FILE)
        message = refused(training, step_folder(shared_path, 1) / "actor", CheckpointCorruptError)
        with everywhere():
            assert "there are the folders global_step_1: load one by its path, or delete" in message
            assert tracked(shared_path) == "1"


def test_a_run_whose_steps_lack_the_role_keeps_its_tracker(shared_path: Path) -> None:
    """A critic that was switched on later: the next start must not begin the actor anew."""
    with parallel(DP2):
        training = build(DP2, seed=1)
        for step in (1, 2):
            save_ppo(training, shared_path, step)
        manager = verl_manager(training, role="critic")
        error = error_of(lambda: manager.load_checkpoint(str(step_folder(shared_path, 2) / "critic")))
        messages = raised_everywhere(CheckpointNotFoundError, error)
        manager.close()
        with everywhere():
            assert "there are the folders global_step_1, global_step_2: load one by its path" in messages[0]
            assert tracked(shared_path) == "2"


def test_another_steps_tracker_is_left_alone(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        save_ppo(training, shared_path, 1)
        message = refused(training, step_folder(shared_path, 7) / "actor")
        with everywhere():
            assert "the newest complete step is 1" in message
            assert "names from now on" not in message
            assert tracked(shared_path) == "1"


def test_a_step_that_only_the_nodes_have_is_resumed(shared_path: Path) -> None:
    """The root has step 2 and the nodes steps 2 and 3; once step 4 is lost, the next start continues from step 3."""
    root, node = shared_path / "root", shared_path / "node"
    fast = {"folder": str(node), "replicas": 0, "durable_every": 2, "keep": 2}
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = verl_manager(training, async_save=True, fast=fast)
        for step in (1, 2, 3):
            train(training, step - 1, step)
            manager.save_checkpoint(str(step_folder(root, step) / "actor"), None, step, None)
            write_ppo_data(root, step)
            manager.wait()
            dist.barrier()
            with everywhere():
                assert tracked(root) == str(step)
        at_save = snapshot(training)
        manager.close()
        dist.barrier()
        with everywhere():
            assert [(step_folder(root, step) / "actor").is_dir() for step in (1, 2, 3)] == [False, True, False]
        poison(training)
        manager = verl_manager(training, async_save=True, fast=fast)
        manager.load_checkpoint(str(step_folder(root, 3) / "actor"))
        assert_state(training, at_save)
        manager.save_checkpoint(str(step_folder(root, 4) / "actor"), None, 4, None)
        write_ppo_data(root, 4)
        manager.close()
        dist.barrier()
        with everywhere():
            assert steps_in(root) == [2, 3, 4]  # the data of step 1 are of no use
        with on_rank_0() as writes:
            for file in [*node.glob("*_4/actor/optim/*.pt"), root / "global_step_4/actor"] if writes else ():
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        message = refused(training, step_folder(root, 4) / "actor", async_save=True, fast=fast)
        with everywhere():
            assert "files are on no node that is left" in message
            assert "the newest complete step is 3" in message
            assert tracked(root) == "3"
        resume(training, step_folder(root, 3) / "actor", fast=fast)
        assert_state(training, at_save)


def test_after_going_back_to_an_older_step_the_tracker_follows(shared_path: Path) -> None:
    """`resume_mode=resume_path`: the next start must not find the run that was left."""
    with parallel(DP2):
        training = build(DP2, seed=1)
        for step in (1, 3):
            save_ppo(training, shared_path, step)
        resume(training, step_folder(shared_path, 1) / "actor")
        save_ppo(training, shared_path, 2, async_save=True)
        with everywhere():
            assert tracked(shared_path) == "2"
        resume(training, step_folder(shared_path, 2) / "actor")
