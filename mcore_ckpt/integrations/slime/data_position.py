"""Keeps weights and the position in the prompts' data together, which slime saves one after the other.

slime's driver saves the model, then `<save>/rollout/global_dataset_state_dict_{rollout id}.pt` (`RolloutDataSource`,
2026-08). If it dies in between, slime loads the newest weights, finds no file for them, and silently uses the data from
its beginning again.
"""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path
from typing import Any

from mcore_ckpt.steps import complete_steps

logger = logging.getLogger(__name__)


def data_file(root: Path, rollout_id: int) -> Path:
    """Returns the file in which slime saves the data position of a rollout."""
    return root / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def newest_with_data(root: Path, role: str, args: Any) -> int | None:
    """Returns the newest complete step that has its data position, if the newest step of all lacks it.

    The driver reads the data position of the step that the actors return, so both go back together.

    Args:
        root: the folder of all steps.
        role: the role that is loaded.
        args: slime's arguments.

    Returns:
        None if the newest step is the right one: it has its data position, no step has one, or none is needed.
    """
    if not args.rollout_global_dataset or args.finetune:
        return None
    steps = [status.step for status in complete_steps(root) if role in status.committed]
    whole = [step for step in steps if _is_whole(data_file(root, step))]
    if not whole or whole[-1] == steps[-1]:
        return None
    logger.warning(
        "%s is missing or cut, because the run died while saving step %d: loading step %d",
        data_file(root, steps[-1]),
        steps[-1],
        whole[-1],
    )
    return whole[-1]


def _is_whole(path: Path) -> bool:
    # torch.save writes the zip directory last, so a file that is cut off has none.
    return path.is_file() and zipfile.is_zipfile(path)
