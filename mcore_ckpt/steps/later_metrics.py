"""Sets metrics of a step that are known only after its save, such as the result of an evaluation.

Such metrics are in a small file in the step's folder, not in the manifest, because readers hold locks on the manifest.
The file's name has the id of the save, so a later save of the step does not get the metrics of an earlier one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, ManifestSummary
from mcore_ckpt.checkpoint.metrics import read_later_metrics, read_metrics
from mcore_ckpt.errors import CheckpointNotFoundError, InvalidArgumentError
from mcore_ckpt.field_checks import check_value
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io.files import replace_file
from mcore_ckpt.steps.listing import StepStatus, list_steps
from mcore_ckpt.urls import local_path

logger = logging.getLogger(__name__)


def set_metrics(root: str | Path, step: int, metrics: Mapping[str, float], *, role: str | None = None) -> None:
    """Adds metrics to a committed step, durably. Any process may call it, also while trainers run.

    A metric that the step already has gets the new value; NaN or infinity removes a value that was set earlier in this
    way. If two processes set metrics of one step at the same moment, one process may undo the change of the other.

    Args:
        root: the folder of the steps.
        step: the step's number.
        metrics: finite numbers by name, such as {"reward": 0.7}.
        role: the role whose checkpoint has the metrics. None stands for the step's only role.

    Raises:
        CheckpointNotFoundError: there is no such step, or it has no committed role.
        InvalidArgumentError, InvalidTypeError: a name or a value is not allowed, or the step has several roles and
            none is named.
        OSError: the metrics cannot be written.

    Example:
        >>> set_metrics("checkpoints", 12000, {"reward": 0.7})  # doctest: +SKIP
    """
    place = local_path(root, "root")
    check_value("step", step, int, {"least": 0})
    found, missing = read_metrics(metrics)
    if missing:
        logger.warning("step %d: %s is not set, because it is not a finite number", step, ", ".join(missing))
    status = next(iter(list_steps(place, only=step)), None)
    if status is None or not status.committed:
        raise CheckpointNotFoundError(
            f"{place}: there is no committed step {step}: `mcore-ckpt list {place}` shows which there are"
        )
    head = _head_of(status, role)
    path = file_names.metrics_file(status.place, head.role, head.attempt)
    known = {name: value for name, value in read_later_metrics(path).items() if name not in missing}
    read_metrics(together := {**known, **found})  # the old and the new metrics together may be too many
    try:
        replace_file(path, fields.encode(together))
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{status.path}: was deleted before its metrics could be set") from None


def metrics_of(role_dir: Path, manifest: Manifest) -> dict[str, float]:
    """Returns all metrics of a role's checkpoint: the manifest's, and the metrics that were set later. Raises nothing.

    Args:
        role_dir: the role's folder.
        manifest: its manifest.
    """
    found = dict(manifest.metrics)
    # If the role's folder is the step's own folder, the file is in it.
    for place in (role_dir.parent, role_dir):
        found |= read_later_metrics(file_names.metrics_file(place, manifest.role, manifest.attempt))
    return found


def _head_of(status: StepStatus, role: str | None) -> ManifestSummary:
    """Returns the summary of a committed role's manifest. If `role` is None, the step must have only one role."""
    there = ", ".join(sorted(status.committed))
    if role is None and len(status.committed) > 1:
        raise InvalidArgumentError(f"step {status.step} has the roles {there}: name one of them as role")
    found = [head for head in status.heads if role in (None, head.role)]
    if not found:
        raise CheckpointNotFoundError(f"{status.path}: {role} is not committed, only {there}")
    return found[0]
