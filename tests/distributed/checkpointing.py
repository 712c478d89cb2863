"""Saving and loading a training of the tests."""

from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager
from tests.distributed.agreement import everywhere
from tests.distributed.snapshot import Snapshot, assert_same, poison, snapshot
from tests.distributed.training import Training

# No wait of the tests is for a rank that has died; a deadline that passes is a defect to see soon.
TIMEOUT_S = 40.0


def manager_of(
    training: Training, root: Path, role: str = "actor", hf_config: Any = None, **config: Any
) -> CheckpointManager:
    return CheckpointManager(
        root,
        training.model,
        training.optimizer,
        training.scheduler,
        role=role,
        hf_config=hf_config,
        config=CheckpointConfig(timeout_s=TIMEOUT_S, **config),
    )


def save(training: Training, root: Path, step: int, role: str = "actor", **config: Any) -> None:
    manager = manager_of(training, root, role, **config)
    handle = manager.save(step, extra_state=position(step))
    handle.wait()
    manager.close()
    with everywhere():
        assert handle.committed is True


def assert_loads(manager: CheckpointManager, training: Training, wanted: Snapshot, **which: Any) -> None:
    """A load into spoiled state brings back what was saved."""
    poison(training)
    manager.load(**which)
    loaded = snapshot(training)
    with everywhere():
        assert_same(loaded, wanted)


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """Every file but the manifest, which is of one attempt and time."""
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def position(step: int) -> dict[str, Any]:
    """As a trainer keeps its place in the data, with something of this rank's own in it."""
    return {"step": step, "rank": dist.get_rank(), "seen": torch.arange(step), "recent": deque([slice(0, step)], 4)}
