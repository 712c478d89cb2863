"""Helps a driver, which is a single process, to commit its own role of a step, and then to delete old steps."""

from __future__ import annotations

import logging
from pathlib import Path

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.io import DiskWatch
from mcore_ckpt.ranks import Agreement, single_process_agreement
from mcore_ckpt.steps import PreservationPolicy, delete_old_steps, list_steps, rules_of_others

logger = logging.getLogger(__name__)


def driver_agreement(role: str, timeout_s: float) -> Agreement:
    """Returns an agreement of this process alone, even if it belongs to a process group.

    A commit raises HungDiskError once a single call to the disk has lasted `timeout_s` seconds. Otherwise the driver,
    and with it the whole training, would wait for ever.
    """
    agreement = single_process_agreement(role, timeout_s)
    agreement.runner = DiskWatch(timeout_s, who=f"{role}: ")
    return agreement


def delete_after_driver(root: Path, role: str, config: CheckpointConfig, step: int) -> None:
    """Deletes old steps, if the driver's role has made this step complete. Steps that other roles' rules keep stay.

    The models' processes delete old steps before this step is complete, so they do not count this step. Logs errors of
    the disk, and raises nothing else.
    """
    policy = PreservationPolicy.of(config)
    if policy.max_to_keep is None and policy.optimizer_for_last is None:
        return
    try:
        if any(status.is_complete for status in list_steps(root, step)):
            delete_old_steps(root, policy, step, others=rules_of_others(root, role))
    except OSError as error:
        logger.warning("%s: old steps could not be deleted: %s", root, error)
