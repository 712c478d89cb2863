"""ROLL's options, the driver's part of a checkpoint, and arguments that cannot be honoured."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt.checkpoint import TRACKER_FILE
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CommitError,
    InvalidArgumentError,
    UnsupportedError,
)
from mcore_ckpt.steps import commit, delete_old_steps, tracker, uncommit_earlier_save
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.tools.examine.verify import verify

sys.path.insert(0, str(Path(__file__).parent / "roll_stand_in"))
from mcore_ckpt.integrations.roll.checkpoints import commit_pipeline, role_folder
from mcore_ckpt.integrations.roll.options import read_options, step_of
from mcore_ckpt.integrations.roll.pipeline import CheckpointUploader, _write_rng
from mcore_ckpt.integrations.roll.strategy import CheckpointStrategy

TIMEOUT_S = 10.0


def driver_files(folder: Path, step: int) -> Path:
    """As BasePipeline.do_checkpoint leaves them: below the folder, in `pipeline`."""
    (folder / "pipeline").mkdir(parents=True)
    (folder / "pipeline" / "worker_state_pipeline.json").write_text(json.dumps({"step": step}))
    return folder


def uploader_of(root: Path, **options: Any) -> CheckpointUploader:
    return CheckpointUploader(str(root), type="mcore_ckpt", timeout_s=TIMEOUT_S, **options)


def test_the_drivers_part_alone_is_a_checkpoint_that_is_verified(tmp_path: Path) -> None:
    """Of one whose clusters save nothing; a name of another program's in it is no obstacle."""
    root, local = tmp_path / "root", driver_files(tmp_path / "local", 3)
    (local / "pipeline" / "metrics").mkdir()
    (local / "pipeline" / "metrics" / "rewards.txt").write_text("1.5")
    uploader = uploader_of(root)
    uploader.roles = ()
    uploader.upload("checkpoint-3", str(local))
    assert uploader.get_latest_ckpt() == str(root / "checkpoint-3")
    assert verify(root, deep=True).is_sound
    assert (root / "checkpoint-3" / "pipeline" / "metrics" / "rewards.txt").read_text() == "1.5"
    assert tracker.read_tracker(root) == 3


def test_the_drivers_part_of_a_step_waits_for_the_clusters(tmp_path: Path) -> None:
    """Those that have begun are its roles, where no pipeline of ours tells them."""
    root = tmp_path / "root"
    commit.open_staging(root / "checkpoint-3" / "critic", commit.new_attempt())
    uploader_of(root).upload("checkpoint-3", str(driver_files(tmp_path / "local", 3)))
    (status,) = steps.list_steps(root)
    assert status.declared == {"critic", "pipeline"}
    assert not status.is_complete
    assert tracker.read_tracker(root) is None
    assert uploader_of(root).get_latest_ckpt() is None


def test_the_best_steps_are_those_by_the_drivers_log(tmp_path: Path) -> None:
    uploader = uploader_of(tmp_path / "root", keep_best=["critic/score/mean:1:max"])
    uploader.roles = ()
    for step, score in ((1, 0.5), (2, 0.9), (3, float("nan")), (4, "n/a"), (5, 0.1)):
        local = driver_files(tmp_path / f"local{step}", step)
        history = [{"critic/score/mean": 7.0}, {"critic/score/mean": score, "loss": 1.0}]
        (local / "pipeline" / "worker_state_pipeline.json").write_text(json.dumps({"log_history": history}))
        uploader.upload(f"checkpoint-{step}", str(local))
        delete_old_steps(tmp_path / "root", uploader.options.policy(SimpleNamespace(max_ckpt_to_keep=1)), step)
    found = {status.step: status.metrics for status in steps.complete_steps(tmp_path / "root")}
    assert found == {2: {"critic/score/mean": 0.9}, 5: {"critic/score/mean": 0.1}}


def test_a_failed_upload_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    monkeypatch.setattr(commit, "publish", fails)
    with pytest.raises(CommitError, match="No space left"):
        commit_pipeline(root, "checkpoint-3", driver_files(tmp_path / "local", 3) / "pipeline", (), TIMEOUT_S)
    assert not [path for path in root.rglob("*") if path.is_file()]


def fails(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_strategy_of_rolls_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "local" / "iter_0000001").mkdir(parents=True)
    with pytest.raises(UnsupportedError, match="worker_cls"):
        uploader_of(tmp_path / "root").upload("checkpoint-3", str(tmp_path / "local"))


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert uploader_of(tmp_path / "nowhere").get_latest_ckpt() is None
    (tmp_path / "root" / "checkpoint-7").mkdir(parents=True)
    assert uploader_of(tmp_path / "root").get_latest_ckpt() is None


def test_a_checkpoint_of_others_is_not_ours_and_half_of_one_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    theirs = tmp_path / "checkpoint-300"
    theirs.mkdir()
    assert role_folder(theirs, "actor_train") is None
    assert role_folder(tmp_path / "somewhere", "actor_train") is None
    assert role_folder(theirs / "critic", "critic") is None
    uploader = uploader_of(root)
    uploader.roles = ("actor_train",)
    uploader.upload("checkpoint-3", str(driver_files(tmp_path / "local", 3)))
    for folder in (root / "checkpoint-3", root / "checkpoint-3" / "actor_train"):
        with pytest.raises(CheckpointNotFoundError, match="not committed by actor_train"):
            role_folder(folder, "actor_train")
    # An asynchronous first save was interrupted: the models were not committed yet.
    assert uploader.get_latest_ckpt() is None
    # There was a complete step, so the run must not begin anew.
    (root / TRACKER_FILE).write_text("2")
    with pytest.raises(CheckpointNotFoundError, match="not committed by actor_train"):
        uploader.get_latest_ckpt()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "output_dir"),
        ({"output_dir": "/models/${exp_name}"}, "resolve"),
        ({"output_dir": "/models", "asnyc_upload": True}, "asnyc_upload"),
        ({"output_dir": "/models", "async_save": True}, "async_save"),
        ({"output_dir": "/models", "timeout_s": -1}, "timeout_s"),
        ({"output_dir": "/models", "async_upload": "False"}, "async_upload is 'False': use False"),
        ({"output_dir": "/models", "keep_best": "reward"}, "keep_best is 'reward'"),
        ({"output_dir": "/models", "keep_every": "100"}, "keep_every is '100': use 100, without quotes"),
    ],
)
def test_options_that_nobody_knows_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("save_contents", ["model"]),
        ("load_contents", ["model"]),
        ("max_to_keep", 3),
        ("roles", ["actor_train"]),
        ("remote", "s3://bucket/run"),
        ("prune_remote", True),
        ("upload_timeout_s", 60.0),
    ],
)
def test_options_that_roll_decides_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        read_options({"output_dir": "/models/run", name: value})


def test_options_are_rolls_and_ours() -> None:
    options = read_options({"type": "mcore_ckpt", "output_dir": "/models/run", "strict": True, "keep_every": 500})
    assert options.root == Path("/models/run")
    assert options.async_upload is True  # as in ROLL
    assert options.config.strict is True
    assert options.policy(SimpleNamespace(max_ckpt_to_keep=0)).max_to_keep is None
    policy = options.policy(SimpleNamespace(max_ckpt_to_keep=3))
    assert (policy.max_to_keep, policy.keep_every) == (3, 500)
    best = read_options({"output_dir": "/models/run", "keep_best": [["reward", 2, "max"]], "keep_for": 60.0})
    assert best.policy(SimpleNamespace(max_ckpt_to_keep=3)).keep_best == (("reward", 2, "max"),)
    assert best.policy(SimpleNamespace(max_ckpt_to_keep=0)).keep_best == ()
    assert step_of("checkpoint-12") == 12
    with pytest.raises(ValueError, match="checkpoint-"):
        step_of("step12")


class Strategy(CheckpointStrategy):
    """With attributes, as ROLL's has them."""


def strategy_of(root: Path, **more: Any) -> CheckpointStrategy:
    strategy = Strategy()
    strategy.worker = SimpleNamespace(cluster_name="actor_train", pipeline_config=SimpleNamespace())
    strategy.worker_config = SimpleNamespace(checkpoint_config={"output_dir": str(root)})
    strategy.load_states = lambda: None
    vars(strategy).update(more)
    return strategy


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.save_checkpoint("local", 3, "checkpoint-3", tag="best"), UnsupportedError, "best"),
        (lambda s: s.load_checkpoint("checkpoint-3", tag="best"), UnsupportedError, "best"),
        (lambda s: s.save_checkpoint("local", 3, "checkpoint-4"), ValueError, "checkpoint-4"),
    ],
)
def test_a_strategys_arguments_that_cannot_be_honoured(
    tmp_path: Path, call: Callable[[CheckpointStrategy], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(strategy_of(tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_drivers_generators_go_on(tmp_path: Path) -> None:
    path = tmp_path / "rng_state_pipeline.pth"
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state(), "cuda": []}
    torch.save(states, path)
    wanted = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    _write_rng(path)
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == wanted


def test_the_drivers_generators_run_nothing(tmp_path: Path) -> None:
    """ROLL opens this file with torch.load(weights_only=False)."""
    path = tmp_path / "rng_state_pipeline.pth"
    torch.save({"python": Bomb()}, path)
    with pytest.raises(CheckpointCorruptError):
        _write_rng(path)


class Bomb:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('it went off')",))


def test_what_is_saved_again_counts_only_when_all_of_it_has_come(tmp_path: Path) -> None:
    """With async_upload the driver may commit before a cluster does, whose part of an earlier run must not count."""
    step = tmp_path / "checkpoint-4"
    for role in ("actor_train", "critic", "pipeline"):
        (step / role).mkdir(parents=True)
        (step / role / "manifest.json").touch()
    uncommit_earlier_save(step, "critic", "pipeline")
    assert [path.parent.name for path in step.rglob("manifest.json")] == ["actor_train"]
    uncommit_earlier_save(step, "critic", "pipeline")
    uncommit_earlier_save(tmp_path / "checkpoint-5", "critic", "pipeline")
