"""A training that goes on from a remote store: local checkpoints are gone, older, or damaged."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import CheckpointNotFoundError, InvalidArgumentError, RemoteError
from mcore_ckpt.io import retries
from tests.distributed.agreement import everywhere, gather, raised_everywhere
from tests.distributed.checkpointing import manager_of, position
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, assert_state, poison, snapshot
from tests.distributed.test_fallback import SHARD, flip_a_bit
from tests.distributed.training import Training, build, parallel, train

DP2 = LAYOUTS["dp2-bf16"]


def save(training: Training, root: Path, steps: range, **config: Any) -> list[dict]:
    """Saves after each step; the states."""
    states = []
    manager = manager_of(training, root, **config)
    for step in steps:
        train(training, step - 1, step)
        handle = manager.save(step, extra_state=position(step))
        handle.wait()
        states.append(snapshot(training))
        with everywhere():
            assert (handle.upload is not None) == (dist.get_rank() == 0)
    manager.wait()
    with everywhere():
        assert handle.upload is None or handle.upload.done
    manager.close()
    return states


def failure_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def remove(path: Path) -> None:
    with everywhere():
        if dist.get_rank() == 0:
            shutil.rmtree(path)


@pytest.mark.world(2)
@pytest.mark.parametrize("async_save", [False, True])
def test_a_training_comes_back_from_the_remote_store(shared_path: Path, async_save: bool) -> None:
    root, remote = shared_path / "local", f"file://{shared_path}/remote"
    with parallel(DP2):
        training = build(DP2, seed=1)
        states = save(training, root, range(1, 4), remote=remote, max_to_keep=2, async_save=async_save)
        # The newest here is damaged on one rank: its copy comes before an older step.
        with everywhere():
            if dist.get_rank() == 0:
                flip_a_bit(root / "global_steps_3" / SHARD)
        poison(training)
        manager = manager_of(training, root, remote=remote)
        result = manager.load()
        found = snapshot(training)
        with everywhere():
            assert result.step == 3
            assert str(result.report.path).startswith(f"{remote}/global_steps_3/actor/")
            assert "wrong CRC" in result.report.skipped[0]
            assert_same(found, states[2])
        remove(root)
        poison(training)
        with everywhere():
            assert manager.latest_step() == 3
        assert gather(manager.load(step=2).extra_state["rank"]) == [0, 1]
        assert_state(training, states[1])
        manager.close()


@pytest.mark.world(2)
def test_the_newest_of_both_places_is_taken_and_here_first(shared_path: Path) -> None:
    root, remote = shared_path / "local", f"file://{shared_path}/remote"
    with parallel(DP2):
        training = build(DP2, seed=1)
        save(training, root, range(1, 3), remote=remote)
        manager = manager_of(training, root, remote=remote)
        assert gather(str(manager.load().report.path)) == [str(root / "global_steps_2" / "actor")] * 2
        remove(root / "global_steps_2")
        result = manager.load()
        manager.close()
        with everywhere():
            assert result.step == 2
            assert str(result.report.path).startswith(remote)


@pytest.mark.world(2)
def test_a_store_out_of_reach_is_no_reason_to_start_anew(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "REMOTE_TRIES", 1)
    root, remote = shared_path / "local", f"file://{shared_path}/remote"
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, root, remote=remote)
        raised_everywhere(CheckpointNotFoundError, failure_of(manager.load))

        def unreachable(*args: object, **kwargs: object) -> None:
            raise OSError("no route to host")

        monkeypatch.setattr(manager._remote.store.fs, "ls", unreachable)
        for message in raised_everywhere(RemoteError, failure_of(manager.load)):
            assert "no route to host" in message
        train(training, 0, 1)
        handle = manager.save(1)
        manager.wait()
        with everywhere():
            assert handle.committed
            assert handle.upload is None or isinstance(handle.upload.exception, (RemoteError, type(None)))
            assert handle.upload is None or not handle.upload.done
        assert gather(manager.load().step) == [1, 1]
        manager.close()


@pytest.mark.world(2)
def test_what_the_store_needs_is_asked_for_at_once(shared_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with parallel(DP2):
        training = build(DP2, seed=1)
        url = "nosuch://user:pa55word@host/x"
        error = failure_of(lambda: manager_of(training, shared_path, remote=url))
        for message in raised_everywhere(InvalidArgumentError, error):
            assert "nosuch://host/x" in message
            assert "pa55word" not in message
        with everywhere():
            assert "pa55word" not in caplog.text
