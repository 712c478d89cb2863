"""Finds the newest step that also has its data position, which slime saves after the weights.

slime's driver saves the model, then `<save>/rollout/global_dataset_state_dict_{rollout id}.pt` (`RolloutDataSource`,
2026-08). If the driver dies in between, slime loads the newest weights, finds no data position for them, and silently
starts the data from the beginning. With our data source the position is a role of the step instead (`rollout_role`).
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Sequence
from pathlib import Path

from mcore_ckpt.checkpoint import find_damage
from mcore_ckpt.errors import CheckpointNotFoundError
from mcore_ckpt.integrations.slime.rollout_role import ROLLOUT_ROLE
from mcore_ckpt.steps import StepStatus, complete_steps

logger = logging.getLogger(__name__)


def data_file(root: Path, rollout_id: int) -> Path:
    """Returns the file in which slime saves the data position of a rollout."""
    return root / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def newest_with_data(root: Path, role: str, data_root: Path, reads_role: bool) -> int | None:
    """Returns the step to go back to if the newest complete step lacks its data position; otherwise None.

    The step to go back to is the newest complete step that has its data position. The driver reads the data position of
    the step that the actors return, so weights and data go back to the same step. The driver looks for the data
    position in `data_root` (`--load`), and in the step if `reads_role` is set. None means that the newest step can
    be loaded, because it has its data position, or because no step ever had a data position.

    Raises CheckpointNotFoundError: there are data positions, but no complete step has its data position; or the newest
    step has its data position in a place where the driver would not look.
    """
    steps = [status for status in complete_steps(root) if role in status.committed]
    if not steps or _has_data(steps[-1], data_root) or not _has_any(steps, data_root):
        if steps and not reads_role:
            _check_is_read(steps[-1], data_root)
        return None
    newest = steps[-1]
    if ROLLOUT_ROLE in newest.committed:
        missing = f"{newest.role_dir(ROLLOUT_ROLE)} is damaged"
        advice = f"set --ckpt-step {newest.step} and leave out --data-source-path"
    else:
        path = data_file(data_root, newest.step)
        missing = f"{path} is missing or cut, because the run died while saving step {newest.step}"
        advice = f"set --ckpt-step {newest.step}"
    for older in reversed(steps[:-1]):
        if _has_data(older, data_root):
            logger.warning("%s: loading the older step %d", missing, older.step)
            return older.step
    raise CheckpointNotFoundError(
        f"{missing}, and no older step has its data position: to go on with step {newest.step} and begin the data "
        f"anew, {advice}"
    )


def _check_is_read(status: StepStatus, data_root: Path) -> None:
    """Raises CheckpointNotFoundError if slime's data source would not find the data position of a step."""
    source, target = status.role_dir(ROLLOUT_ROLE), data_file(data_root, status.step)
    if ROLLOUT_ROLE in status.committed and not _is_whole(target):
        raise CheckpointNotFoundError(
            f"{source}: the step's data position is in this folder, but slime's own data source does not look there: "
            f"name the data source of mcore_ckpt by --data-source-path again, or copy the file {target.name} to "
            f"{target.parent}"
        )


def _has_data(status: StepStatus, data_root: Path) -> bool:
    if ROLLOUT_ROLE in status.committed:
        return not find_damage(status.role_dir(ROLLOUT_ROLE))
    return _is_whole(data_file(data_root, status.step))


def _has_any(steps: Sequence[StepStatus], data_root: Path) -> bool:
    beside = data_file(data_root, 0).parent.glob("global_*.pt")
    return any(beside) or any(ROLLOUT_ROLE in status.committed for status in steps)


def _is_whole(path: Path) -> bool:
    # torch.save writes the zip directory last, so a file that is cut off has no directory.
    return path.is_file() and zipfile.is_zipfile(path)
