"""Checks, reads and finds the files that SkyRL's driver writes into a step."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointNotFoundError, CommitError
from mcore_ckpt.integrations.kit.driver import newest_valid
from mcore_ckpt.integrations.skyrl.options import DRIVER_ROLE
from mcore_ckpt.io import replace_file
from mcore_ckpt.steps import RoleReader, list_steps, step_status

logger = logging.getLogger(__name__)

# SkyRL's driver reads this file to find the newest checkpoint.
_STOCK_TRACKER = "latest_ckpt_global_step.txt"
_DATA_FILE = "data.pt"
_STATE_FILE = "trainer_state.pt"


def check_files(files: Path, root: str) -> None:
    """Checks the driver's files, and puts the real path into the configuration that they hold.

    Raises CommitError: SkyRL could not save the state of the data loader, which it only logs.
    """
    if not (files / _DATA_FILE).is_file() or not (files / _DATA_FILE).stat().st_size:
        raise CommitError(
            "SkyRL could not save the state of the data loader (its log has the reason: Failed to save dataloader "
            "state), so the step does not count"
        )
    state = torch.load(files / _STATE_FILE, weights_only=False)  # this process has just written it
    state["config"]["trainer"]["ckpt_path"] = root
    torch.save(state, files / _STATE_FILE)


def put_files(step_path: Path, folder: Path) -> None:
    """Copies the driver's files of a step into `folder`, and checks each one's size and CRC.

    Raises CheckpointCorruptError, CheckpointNotFoundError and OSError.
    """
    reader = RoleReader(step_status(step_path).role_dir(DRIVER_ROLE))
    for file in reader.manifest.files:
        (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
        reader.put(file.path, folder / file.path)


def finite(metrics: Mapping[str, Any], wanted: set[str]) -> dict[str, float]:
    """Returns the wanted metrics that are there and finite."""
    found = {name: metrics[name] for name in sorted(wanted) if isinstance(metrics.get(name), (int, float))}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def newest(root: Path) -> Path | None:
    """Returns the newest complete step of ours; None if SkyRL must look for one that it wrote.

    Raises CheckpointNotFoundError: there are steps of ours, but none is complete, and none of SkyRL's is there.
    """
    try:
        return newest_valid(root, DRIVER_ROLE, verify=False)
    except CheckpointNotFoundError as error:
        # After a change from SkyRL's checkpoints, our first save may have been interrupted.
        if not _names_stock_step(root):
            raise
        logger.warning("SkyRL's own checkpoint is loaded, because no step of mcore_ckpt is complete: %s", error)
        return None


def _names_stock_step(root: Path) -> bool:
    """True if SkyRL's tracker names a checkpoint that SkyRL wrote."""
    try:
        step_path = root / f"global_step_{int((root / _STOCK_TRACKER).read_text())}"
    except (OSError, ValueError):
        return False
    return (step_path / _STATE_FILE).exists()


def move_stock_tracker(root: Path) -> None:
    """Lets SkyRL's tracker name our newest complete step. Logs errors of the disk.

    SkyRL without this package then raises an error. With an old tracker, it would go on from an old checkpoint of
    SkyRL, and without a tracker it would start from the beginning.
    """
    try:
        complete = [status.step for status in list_steps(root) if status.is_complete]
        if complete:
            replace_file(root / _STOCK_TRACKER, str(max(complete)).encode())
    except OSError as error:
        logger.warning("%s could not be updated: %s", root / _STOCK_TRACKER, error)
