"""Which steps of the fast tier are durable and which stay, when one manager saves after another one."""

import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.checkpoint.manifest import ManifestSummary
from mcore_ckpt.checkpoint.provenance import Commit
from mcore_ckpt.fast.copies import Copies, CopyHandle
from mcore_ckpt.save import context
from mcore_ckpt.save.drain import Drain
from mcore_ckpt.steps.listing import complete_steps
from mcore_ckpt.steps.role_files import files_manifest
from mcore_ckpt.steps.transaction import Attempt
from tests.support.unsharded_model import Model
from tests.support.waiting import LONG_S


def manager_of(tmp_path: Path, choices: Mapping[str, Any] = MappingProxyType({}), **fast: Any) -> CheckpointManager:
    tier = FastTier(tmp_path / "node", **{"replicas": 0, **fast})
    config = CheckpointConfig(save_contents=("model",), timeout_s=20, fast=tier, **choices)
    return CheckpointManager(tmp_path / "root", Model(), config=config)


def steps_in(folder: Path) -> list[int]:
    return [status.step for status in complete_steps(folder)]


def test_the_steps_until_the_next_durable_one_are_counted_across_managers(tmp_path: Path) -> None:
    """A run that is restarted before each durable step would else never have one."""
    for step in (1, 2, 3):
        manager = manager_of(tmp_path, durable_every=3)
        manager.save(step)
        manager.close()
    assert steps_in(tmp_path / "root") == [3]


def test_a_save_that_would_wait_for_the_root_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of(tmp_path, {"if_busy": "skip", "async_save": True}, durable_every=2)
    gate = threading.Event()
    run = Drain.run

    def wait_and_run(drain: Drain) -> Any:
        assert gate.wait(LONG_S)
        return run(drain)

    monkeypatch.setattr(Drain, "run", wait_and_run)
    for step in (1, 2, 3):  # the second is being copied to the root, and the third is not to be
        assert manager.save(step).wait().nbytes
    assert manager.save(4).skipped
    gate.set()
    manager.wait()
    assert manager.save(5).wait().nbytes, "it is durable in the place of the one that was skipped"
    manager.close()
    assert steps_in(tmp_path / "root") == [2, 5]


def test_an_older_step_stays_until_a_newer_one_is_known_to_have_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a lost node would cost both, if the manager that saves is not the one that has loaded."""

    def add(copies: Copies, step: int, attempt: Attempt) -> CopyHandle:
        return CopyHandle(step)

    for step, are_complete, wanted in ((1, True, [1]), (2, False, [1, 2]), (3, True, [3])):
        with monkeypatch.context() as patched:
            if not are_complete:
                patched.setattr(Copies, "add", add)
            manager = manager_of(tmp_path, keep=1)
            manager.save(step)
            manager.close()  # waits for deletions
        assert steps_in(tmp_path / "node") == wanted


def test_the_commits_that_only_other_nodes_have_are_counted(tmp_path: Path) -> None:
    """Else a step of a training that goes on with a new node would count as older than the steps that are left."""
    head = ManifestSummary(9, "actor", ("actor",), "a" * 32, "", commit=Commit(5, None, ((1, 5),)))
    trainer: Any = SimpleNamespace(root=tmp_path / "root", role="actor")
    tier = SimpleNamespace(home=tmp_path / "node", folder=tmp_path / "node")
    fast: Any = SimpleNamespace(tier=tier, earlier=[SimpleNamespace(head=head)])
    manifest = files_manifest("actor", 10, ("actor",), "b" * 32, [], 1)
    history = context._history(trainer, None, fast)
    commit = history.stamp(manifest, tmp_path / "node" / "global_steps_10" / "actor").commit
    assert commit is not None
    assert commit.number == 6
