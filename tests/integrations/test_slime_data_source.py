"""The data source of slime and miles as a role of the step, without models: `commit_role` stands in for the actor."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CommitError,
    HungDiskError,
    LockedError,
    UnsupportedError,
)
from mcore_ckpt.integrations.slime.data_position import data_file, newest_with_data
from mcore_ckpt.integrations.slime.replacing import ActorCheckpoints
from mcore_ckpt.integrations.slime.rollout_role import has_rollout_role, models_of_step
from mcore_ckpt.ranks import single_process_agreement
from mcore_ckpt.steps import (
    commit_role,
    complete_steps,
    read_tracker,
    step_status,
    uncommit_earlier_save,
)
from tests.integrations.with_stand_ins import Options, imported

FORKS = ("slime", "miles")


@pytest.fixture(params=FORKS)
def fork(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with imported(request.param, monkeypatch):
        yield request.param


def source_of(fork: str, root: Path, **more: Any) -> Any:
    return _class_of(fork)(_arguments(fork, root, **more))


def _class_of(fork: str) -> Any:
    return import_module(f"mcore_ckpt.integrations.{fork}.data_source").DataSource


def _arguments(fork: str, root: Path, **more: Any) -> Options:
    plain = {
        "save": str(root),
        "load": str(root),
        "rollout_global_dataset": True,
        "use_critic": False,
        "num_critic_only_steps": 0,
        "prompt_data": "prompts.jsonl",
        "n_samples_per_prompt": 1,
        "data_source_path": f"mcore_ckpt.integrations.{fork}.data_source.DataSource",
        "mcore_ckpt": {"timeout_s": 20.0},
    }
    return Options(**{**plain, **more})


def sample_of(fork: str, **values: Any) -> Any:
    sample = import_module(f"{fork}.utils.types").Sample
    return sample(status=sample.Status.ABORTED, **values)


def save_actor(root: Path, rollout_id: int, role: str = "actor") -> None:
    """What the actor's save leaves: a role that declares the other one."""
    uncommit_earlier_save(root / f"global_steps_{rollout_id}", role, "rollout")
    agreement = single_process_agreement(role, 20.0)
    folder = root / f"global_steps_{rollout_id}" / role
    commit_role(agreement, folder, rollout_id, [role, "rollout"], lambda files: files.write("weights", b"w"))


def newest(root: Path) -> int | None:
    return newest_with_data(root, "actor", root, reads_role=True)


def test_the_position_and_the_buffer_come_back_with_their_step(fork: str, tmp_path: Path) -> None:
    first = source_of(fork, tmp_path)
    experts = np.arange(6, dtype=np.int32).reshape(2, 3)
    for rollout_id in range(2):
        first.get_samples(8 + len(first.buffer))
        first.add_samples(
            [
                [sample_of(fork, index=10 * rollout_id + n, tokens=[1, 2], rollout_routed_experts=experts)]
                for n in range(2)
            ]
        )
        save_actor(tmp_path, rollout_id)
        assert [step.step for step in complete_steps(tmp_path)] == list(range(rollout_id))
        first.save(rollout_id)
        assert read_tracker(tmp_path) == rollout_id
    assert not (tmp_path / "rollout").exists()

    second = source_of(fork, tmp_path)
    second.load(1)
    assert second.sample_offset == first.sample_offset == 16
    assert [group[0].index for group in second.buffer] == [10, 11]  # the first two were taken again
    (sample,) = second.buffer[1]
    assert (sample.tokens, sample.status.value) == ([1, 2], "aborted")
    assert np.array_equal(sample.rollout_routed_experts, experts)
    second.load(0)
    assert (second.sample_offset, len(second.buffer)) == (8, 2)


def test_a_run_that_begins_anew_takes_nothing_of_step_0(fork: str, tmp_path: Path) -> None:
    """With --finetune the driver loads rollout -1 from a folder that has steps."""
    first = source_of(fork, tmp_path)
    first.get_samples(8)
    first.add_samples([[sample_of(fork, index=7)]])
    save_actor(tmp_path, 0)
    first.save(0)
    anew = source_of(fork, tmp_path)
    anew.load(-1)
    assert (anew.sample_offset, anew.buffer) == (0, [])


def test_a_step_whose_driver_died_does_not_count(fork: str, tmp_path: Path) -> None:
    source = source_of(fork, tmp_path)
    save_actor(tmp_path, 0)
    source.save(0)
    source.get_samples(8)
    save_actor(tmp_path, 1)  # and the driver dies
    status = step_status(tmp_path / "global_steps_1")
    assert not status.is_complete
    assert "rollout" in status.reason
    assert [step.step for step in complete_steps(tmp_path)] == [0]
    assert read_tracker(tmp_path) == 0


def test_a_step_that_is_saved_again_waits_for_its_position(fork: str, tmp_path: Path) -> None:
    """After a rollback. Otherwise new weights would be complete with the position of the run that was given up."""
    source = source_of(fork, tmp_path)
    for rollout_id in range(2):
        save_actor(tmp_path, rollout_id)
        source.save(rollout_id)
    save_actor(tmp_path, 1)
    assert [step.step for step in complete_steps(tmp_path)] == [0]
    source.get_samples(24)
    source.save(1)
    assert [step.step for step in complete_steps(tmp_path)] == [0, 1]
    again = source_of(fork, tmp_path)
    again.load(1)
    assert again.sample_offset == 24


class Saving:
    """Stands in for `LoopCheckpoints`. `save` reads the state, and ends as an async save does whose process dies."""

    def save(self, iteration: int, training: Any, args: Any, config: Any, state: Any, prepared: Any) -> None:
        state()
        prepared()


class Refusing(Saving):
    """Does as a save does that is refused: another trainer holds the lock, or the disk is full."""

    def save(self, iteration: int, training: Any, args: Any, config: Any, state: Any, prepared: Any) -> None:
        state()
        raise LockedError("another trainer holds the lock")


def actor_of(fork: str, root: Path) -> Any:
    actor = ActorCheckpoints.__new__(ActorCheckpoints)
    actor._args, actor._has_rollout_role, actor._checkpoints = _arguments(fork, root), True, Saving()
    actor._config, actor._hf_config, actor._tokenizer = actor._read_config(), None, None
    return actor


def test_a_step_that_is_saved_again_is_incomplete_until_an_async_save_has_ended(fork: str, tmp_path: Path) -> None:
    """With --async-save the driver commits first. Then the weights that were given up must not complete the step."""
    source = source_of(fork, tmp_path)
    for rollout_id in range(2):
        save_actor(tmp_path, rollout_id)
        source.save(rollout_id)
    actor_of(fork, tmp_path).save_checkpoint(1, [object()], None, None)
    source.get_samples(24)
    source.save(1)
    assert [step.step for step in complete_steps(tmp_path)] == [0]
    assert read_tracker(tmp_path) != 1


def test_a_save_that_is_refused_undoes_nothing(fork: str, tmp_path: Path) -> None:
    """Such as one of a trainer that was started by mistake with the same --save."""
    source = source_of(fork, tmp_path)
    save_actor(tmp_path, 0)
    source.save(0)
    actor = actor_of(fork, tmp_path)
    actor._checkpoints = Refusing()
    with pytest.raises(LockedError):
        actor.save_checkpoint(0, [object()], None, None)
    assert [step.step for step in complete_steps(tmp_path)] == [0]


def test_a_damaged_role_is_found_and_never_loaded(fork: str, tmp_path: Path) -> None:
    source = source_of(fork, tmp_path)
    for rollout_id in range(2):
        source.get_samples(8)
        save_actor(tmp_path, rollout_id)
        source.save(rollout_id)
    assert newest(tmp_path) is None
    path = tmp_path / "global_steps_1" / "rollout" / "global_dataset_state_dict_1.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert newest(tmp_path) == 0
    with pytest.raises(CheckpointCorruptError, match=path.name):
        source.load(1)
    (tmp_path / "global_steps_0" / "rollout" / "global_dataset_state_dict_0.pt").write_bytes(b"cut")
    with pytest.raises(CheckpointNotFoundError, match="set --ckpt-step 1 and leave out --data-source-path"):
        newest(tmp_path)


def test_a_run_moves_over_and_back(fork: str, tmp_path: Path) -> None:
    stock: Any = import_module(f"{fork}.rollout.data_source").RolloutDataSourceWithBuffer(_arguments(fork, tmp_path))
    stock.get_samples(8)
    save_actor(tmp_path, 0)
    uncommit = tmp_path / "global_steps_0" / "actor"
    commit_role(single_process_agreement("actor", 20.0), uncommit, 0, ["actor"], lambda files: files.write("w", b"w"))
    stock.save(0)  # beside the step, as before
    source = source_of(fork, tmp_path)
    assert newest(tmp_path) is None
    source.load(0)
    assert source.sample_offset == 8
    source.get_samples(8)
    save_actor(tmp_path, 1)
    source.save(1)
    with pytest.raises(
        CheckpointNotFoundError, match="the data source of mcore_ckpt by --data-source-path again, or copy the file"
    ):
        newest_with_data(tmp_path, "actor", tmp_path, reads_role=False)
    target = data_file(tmp_path, 1)
    target.write_bytes((tmp_path / "global_steps_1" / "rollout" / target.name).read_bytes())
    assert newest_with_data(tmp_path, "actor", tmp_path, reads_role=False) is None
    stock.load(1)
    assert stock.sample_offset == 16


def test_what_cannot_be_stored_is_refused_by_name(
    fork: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of(fork, tmp_path)
    source.add_samples([[sample_of(fork, multimodal_inputs={"image": object()})]])
    save_actor(tmp_path, 0)
    with pytest.raises(UnsupportedError, match=r"multimodal_inputs.*keeps_buffer = False"):
        source.save(0)
    assert not complete_steps(tmp_path)
    source.args.mcore_ckpt["if_failed"] = "warn"
    with caplog.at_level(logging.WARNING):
        source.save(0)
    assert "the step of rollout 0 stays incomplete" in caplog.text
    monkeypatch.setattr(type(source), "keeps_buffer", False)
    source.save(0)
    assert [step.step for step in complete_steps(tmp_path)] == [0]


def test_a_failed_write_leaves_the_step_incomplete(fork: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(fork, tmp_path)
    save_actor(tmp_path, 0)
    saved = torch.save
    monkeypatch.setattr(torch, "save", lambda value, path: (saved(value, path), Path(path).unlink()))
    with pytest.raises(CommitError, match=r"DataSource\.save wrote no file below 'rollout' for rollout 0"):
        source.save(0)
    assert not complete_steps(tmp_path)


def test_a_disk_that_hangs_ends_the_save(fork: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    source = source_of(fork, tmp_path / "run", mcore_ckpt={"timeout_s": 1.0})
    save_actor(tmp_path / "run", 0)
    monkeypatch.setattr("mcore_ckpt.steps.role_files.write_file", lambda path, data: pipe.read_bytes())
    with pytest.raises(HungDiskError, match="pipe"):
        source.save(0)
    assert not complete_steps(tmp_path / "run")
    pipe.open("wb").close()  # the disk answers again


def test_old_steps_go_once_the_position_is_committed(fork: str, tmp_path: Path) -> None:
    """When the actor has committed, the new step is not complete yet, so the actor does not count it."""
    source = source_of(fork, tmp_path, mcore_ckpt={"timeout_s": 20.0, "max_to_keep": 1}, save_retain_interval=2)
    for rollout_id in range(4):
        save_actor(tmp_path, rollout_id)
        source.save(rollout_id)
    assert [step.step for step in complete_steps(tmp_path)] == [0, 2, 3]


def test_the_models_that_share_the_step(tmp_path: Path) -> None:
    def models(rollout_id: int, is_beside: bool = True, **more: Any) -> tuple[str, ...]:
        return models_of_step(_arguments("slime", tmp_path, **more), rollout_id, is_beside)

    warm = {"use_critic": True, "num_critic_only_steps": 2}
    assert models(0) == ("actor",)
    assert models(1, **warm) == ("critic",)
    assert models(2, **warm) == ("actor", "critic")
    assert models(1, False, **warm) == ()
    assert models(2, False, **warm) == ("actor",)


def test_without_a_model_in_the_folder_the_file_is_where_the_fork_has_it(fork: str, tmp_path: Path) -> None:
    own = {"use_critic": True, "num_critic_only_steps": 1, "megatron_config_path": "roles.yaml"}
    source = source_of(fork, tmp_path, **own)
    source.get_samples(8)
    source.save(0)
    assert data_file(tmp_path, 0).exists()
    again = source_of(fork, tmp_path, **own)
    again.load(0)
    assert again.sample_offset == 8


def test_the_actor_declares_the_role_only_for_our_data_source(fork: str, tmp_path: Path) -> None:
    stock = f"{fork}.rollout.data_source.RolloutDataSourceWithBuffer"
    assert has_rollout_role(_arguments(fork, tmp_path))
    assert not has_rollout_role(_arguments(fork, tmp_path, data_source_path=stock))
    assert not has_rollout_role(_arguments(fork, tmp_path, rollout_global_dataset=False))
    actor = ActorCheckpoints.__new__(ActorCheckpoints)
    actor._args, actor._has_rollout_role = _arguments(fork, tmp_path), True
    assert actor._roles("actor", 0) == ("actor", "rollout")
    actor._args.mcore_ckpt.update(max_to_keep=1, optimizer_for_last=1)
    config = actor._read_config()
    assert (config.max_to_keep, config.optimizer_for_last) == (1, 1)  # no step is complete without its position
    actor._args.mcore_ckpt["remote"] = "s3://bucket/run"
    with pytest.raises(UnsupportedError, match=r"remote store.*data_source\.DataSource"):
        actor._read_config()


def test_without_the_fork_it_says_so(fork: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"mcore_ckpt.integrations.{fork}.data_source"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, f"{fork}.rollout.data_source", None)
    with pytest.raises(ImportError, match=rf"data_source needs {fork}"):
        import_module(name)
