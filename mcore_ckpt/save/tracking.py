"""Moves the tracker of the root to a step that was just committed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.io.files import make_folder
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import tracker
from mcore_ckpt.steps.listing import step_status
from mcore_ckpt.steps.node_tier import NodeTier

logger = logging.getLogger(__name__)


def is_own_name(trainer: Trainer, step: int, role_dir: Path) -> bool:
    """True if a role's folder in the root has the name that this package gives it, and not one of the trainer's."""
    return role_dir == file_names.step_dir(trainer.root, step) / trainer.role


def follow_nodes(trainer: Trainer, tier: NodeTier, step: int, role_dir: Path, check_root: Callable[[], object]) -> None:
    """Makes the tracker of the root name a step that the nodes have committed. Only rank 0 calls it.

    A trainer that names its folders itself resumes from the step that the tracker names, if there is a folder of that
    step. `recover` and `load` need no tracker, so other roots keep one that names a step in the root.

    Args:
        trainer: the trainer, which has the root.
        tier: rank 0's part of the fast tier.
        step, role_dir: the step, and where a save to the root would put it.
        check_root: raises if the root is no longer the folder that it was (`TrainerLock.check_root`).
    """
    if is_own_name(trainer, step, role_dir) or tier.config.durable_every is None:
        return
    step_path = role_dir if file_names.parse_step(role_dir.name) is not None else role_dir.parent
    try:
        check_root()
        status = replace(step_status(tier.role_dir(step).parent), in_node_folder=True)
        if status.is_complete:  # not while another role's commit is still to come
            make_folder(step_path)
            tracker.write_tracker(trainer.root, step)
    except (OSError, CheckpointError) as error:
        logger.warning("step %d is committed on the nodes, but the tracker could not be updated: %s", step, error)
