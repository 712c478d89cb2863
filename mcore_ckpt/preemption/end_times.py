"""Finds out when the machine will be taken away even if no request to stop comes.

Without a request, a machine is taken away at the end of a Slurm job, or of reserved capacity.
"""

from __future__ import annotations

import logging
import math
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

logger = logging.getLogger(__name__)

# Variables that have the end in seconds since the epoch. verl reads the last two ("elastic server instance", verl 0.9,
# utils/checkpoint/checkpoint_manager.py, should_save_ckpt_esi).
_VARIABLES = (
    "SLURM_JOB_END_TIME",
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
_SCONTROL_S = 10.0


@dataclass(frozen=True)
class EndTime:
    """The time at which the machine goes.

    Attributes:
        at: the time (`time.monotonic()`).
        source: where the time comes from, for messages.
    """

    at: float
    source: str


def find_end(given_s: float | None, environment: Mapping[str, str]) -> EndTime | None:
    """Returns when the machine goes; None if that is not known.

    An end that has passed does not count. Either such an end belongs to another job, whose environment this process has
    inherited, or the scheduler lets this job run past its end. If such an end counted, each start of the training would
    stop without a save.

    Args:
        given_s: in how many seconds the machine goes; `math.inf`: never. None: take the time from the environment. If
            the environment has no future time, take the time of a Slurm job from `scontrol`.
        environment: the variables of the environment.
    """
    if given_s is not None:
        return None if given_s == math.inf else EndTime(time.monotonic() + given_s, "training_ends_in_s")
    for name in _VARIABLES:
        end = _end_at(environment[name], name) if name in environment else None
        if end is not None:
            return end
    return _of_scontrol(environment["SLURM_JOB_ID"]) if "SLURM_JOB_ID" in environment else None


def is_named(environment: Mapping[str, str]) -> bool:
    """True if the environment names an end or a Slurm job. The end itself may be unknown nevertheless (`find_end`)."""
    return any(name in environment for name in (*_VARIABLES, "SLURM_JOB_ID"))


def _end_at(text: str, source: str) -> EndTime | None:
    try:
        left_s = float(text) - time.time()
    except ValueError:
        logger.warning(
            "%s is %r, which is not a time, so it is ignored: set it to seconds since the epoch", source, text
        )
        return None
    if left_s <= 0:
        logger.warning(
            "%s says that the time of this training has ended %.0f s ago, so it is ignored: give training_ends_in_s",
            *(source, -left_s),
        )
        return None
    return EndTime(time.monotonic() + left_s, source) if math.isfinite(left_s) else None


def _of_scontrol(job: str) -> EndTime | None:
    command = ["scontrol", "show", "job", job, "--oneliner"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_S).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the end of Slurm's job %s is not known, because scontrol does not answer: %s", job, error)
        return None
    found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b", told)
    return None if found is None else _end_at(str(datetime.fromisoformat(found[1]).timestamp()), "scontrol")
