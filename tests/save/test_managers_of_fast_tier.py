"""Which steps of the fast tier are durable and which stay, when one manager saves after another one."""

from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.fast.copies import Copies, CopyHandle
from mcore_ckpt.steps.listing import complete_steps
from mcore_ckpt.steps.transaction import Attempt
from tests.support.unsharded_model import Model


def manager_of(tmp_path: Path, **fast: Any) -> CheckpointManager:
    tier = FastTier(tmp_path / "node", **{"replicas": 0, **fast})
    config = CheckpointConfig(save_contents=("model",), timeout_s=20, fast=tier)
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
