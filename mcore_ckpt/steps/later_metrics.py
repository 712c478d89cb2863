"""Sets metrics of a step that are known only after its save, such as the result of an evaluation.

Such metrics are in a small file in the step's folder, not in the manifest, because readers hold locks on the manifest.
The file's name has the id of the save, so a later save of the step does not get the metrics of an earlier save.
"""

from __future__ import annotations

import logging
import time
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

# The seconds between two looks of `set_metrics` at a save that may still be under way.
_POLL_S = 0.2


def set_metrics(
    root: str | Path, step: int, metrics: Mapping[str, float], *, role: str | None = None, wait_s: float = 0.0
) -> None:
    """Adds metrics to a committed step, durably. Any process may call this function, also while trainers run.

    A metric that the step already has gets the new value; NaN or infinity removes a value that an earlier call has set.
    If two processes set metrics of one step at the same moment, one process may undo the change of the other.

    Args:
        root: the folder of the steps.
        step: the step's number.
        metrics: finite numbers by name, such as {"reward": 0.7}.
        role: the role whose checkpoint has the metrics. None stands for the step's only model, or for its only role.
        wait_s: how long to wait, in seconds, until a background save of the step has committed the role or, if `role`
            is None, all roles of the step. If some roles are still missing after this time, only the committed roles
            count. If the step is saved again, wait for that save by its handle instead: until that save has ended, the
            earlier checkpoint is found.

    Raises:
        CheckpointNotFoundError: there is no such step, or the step lacks the role or has no committed role.
        InvalidArgumentError, InvalidTypeError: a name or a value is not allowed, or the step has several models and
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
    check_value("wait_s", wait_s, float, {"least": 0})
    status, head = _committed(place, step, role, wait_s)
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
        manifest: the manifest of the role's checkpoint.
    """
    found = dict(manifest.metrics)
    # If the role's folder is the step's own folder, the file is in the role's folder, so look there, too.
    for place in (role_dir.parent, role_dir):
        found |= read_later_metrics(file_names.metrics_file(place, manifest.role, manifest.attempt))
    return found


def _committed(root: Path, step: int, role: str | None, wait_s: float) -> tuple[StepStatus, ManifestSummary]:
    """Returns the status of a step, and the summary of a role's manifest, as soon as the role is committed.

    If `role` is None, waits for all roles of the step, because the step may get a second model.
    """
    deadline = time.monotonic() + wait_s
    while True:
        is_last_look = time.monotonic() >= deadline
        status = next(iter(list_steps(root, only=step)), None)
        if status is not None and _is_there(status, role, is_last_look):
            return status, _head_of(status, role)
        if is_last_look:
            there = "" if status is None or not status.committed else f", only {', '.join(sorted(status.committed))}"
            raise CheckpointNotFoundError(
                f"{root}: there is no committed step {step}{f' of {role}' if role else ''}{there}: `mcore-ckpt list "
                f"{root}` shows which there are. If its save is under way, wait for it (`handle.wait()`), or set wait_s"
            )
        time.sleep(_POLL_S)


def _is_there(status: StepStatus, role: str | None, is_last_look: bool) -> bool:
    if role is not None:
        return role in status.committed
    return bool(status.committed) and (is_last_look or status.is_complete)


def _head_of(status: StepStatus, role: str | None) -> ManifestSummary:
    """Returns the summary of a committed role's manifest. If `role` is None, the step must have only one model."""
    there = [head for head in status.heads if role in (None, head.role)]
    # Roles without contents, such as the data position of a driver, are not models, so they do not count.
    models = [head for head in there if head.contents]
    if len(models or there) > 1:
        names = ", ".join(sorted(head.role for head in there))
        raise InvalidArgumentError(f"step {status.step} has the roles {names}: name one of them as role")
    return (models or there)[0]
