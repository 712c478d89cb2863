"""Keeps the weights together with the position in the prompts' data, which slime saves after the weights.

slime's driver saves the model, then `<save>/rollout/global_dataset_state_dict_{rollout id}.pt` (`RolloutDataSource`,
2026-08). If the driver dies in between, slime loads the newest weights, finds no file for them, and silently starts the
data from the beginning.
"""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path

from mcore_ckpt.errors import CheckpointNotFoundError
from mcore_ckpt.steps import complete_steps

logger = logging.getLogger(__name__)


def data_file(root: Path, rollout_id: int) -> Path:
    """Returns the file in which slime saves the data position of a rollout."""
    return root / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def newest_with_data(root: Path, role: str, data_root: Path) -> int | None:
    """Returns the newest complete step that has its data position, if the newest of all complete steps lacks its own.

    The driver reads the data position of the step that the actors return, so both go back together. The driver looks
    for the data position in `data_root` (`--load`). If None is returned, the newest step is the right one: it has its
    data position, or there never was one.

    Raises CheckpointNotFoundError: there are data positions, but no step has its own.
    """
    steps = [status.step for status in complete_steps(root) if role in status.committed]
    whole = [step for step in steps if _is_whole(data_file(data_root, step))]
    if not steps or (whole and whole[-1] == steps[-1]) or not any(data_file(data_root, 0).parent.glob("global_*.pt")):
        return None
    missing = f"{data_file(data_root, steps[-1])} is missing or cut, because the run died while saving step {steps[-1]}"
    if not whole:
        raise CheckpointNotFoundError(
            f"{missing}, and no older step has its data position: to go on with step {steps[-1]} and begin the data "
            f"anew, set --ckpt-step {steps[-1]}"
        )
    logger.warning("%s: loading step %d", missing, whole[-1])
    return whole[-1]


def _is_whole(path: Path) -> bool:
    # torch.save writes the zip directory last, so a file that is cut off has none.
    return path.is_file() and zipfile.is_zipfile(path)
