"""Reads and checks what a trainer asks to save: the step, its folder, its roles and metrics, and which steps stay."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.metrics import read_metrics
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import CommitError, InvalidArgumentError, InvalidTypeError
from mcore_ckpt.field_checks import check_value
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.state.trainer_functions import call_of_trainer
from mcore_ckpt.steps.retention import PreservationPolicy
from mcore_ckpt.steps.space_watch import Saving
from mcore_ckpt.urls import local_path

logger = logging.getLogger(__name__)

LARGEST_STEP = 10**18  # steps are smaller than this, because the tracker has 18 digits (file_names.parse_tracker)


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """The arguments of one call of `CheckpointManager.save`, checked and completed.

    `called` is when the trainer called `save` (time.perf_counter()). After that, `save` may have waited for an earlier
    save. Only the `metrics` of rank 0 count.
    """

    saving: Saving
    roles: tuple[str, ...]
    metrics: Mapping[str, float]
    extra_state: Mapping[str, Any] | None
    called: float


def read_request(
    trainer: Trainer,
    step: int,
    extra_state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None,
    roles: Sequence[str] | None,
    path: str | Path | None,
    max_to_keep: int | None,
    metrics: Mapping[str, float] | None,
    prepared: Callable[[], object] | None,
    called: float,
) -> SaveRequest:
    """Reads and checks the arguments of `CheckpointManager.save`, and raises the errors that `save` documents."""
    if callable(extra_state):
        extra_state = call_of_trainer(extra_state, "extra_state could not be read", CommitError)
    check_step(step)
    _check_extra_state(trainer, extra_state)
    role_dir, counts = _find_folder(trainer.root, trainer.role, step, path)
    policy = _policy(trainer.config, max_to_keep)
    declared = file_names.check_roles(roles or trainer.config.roles or ())
    declared = file_names.check_roles([*declared, trainer.role])
    found = {} if metrics is None else _metrics(trainer, step, metrics)
    saving = Saving(role_dir, step, policy if counts else None, prepared)
    return SaveRequest(saving, declared, found, extra_state, called)


def _metrics(trainer: Trainer, step: int, metrics: object) -> dict[str, float]:
    found, missing = read_metrics(metrics)
    if missing and trainer.agreement.is_coordinator:
        logger.warning("step %d is saved without %s, because it is not a finite number", step, ", ".join(missing))
    return found


def check_step(step: object) -> None:
    """Raises InvalidArgumentError or InvalidTypeError if a step cannot have this number."""
    check_value("step", step, int, {"least": 0})
    if isinstance(step, int) and step >= LARGEST_STEP:
        raise InvalidArgumentError(f"step is {step}: use a number below {LARGEST_STEP}")


def _check_extra_state(trainer: Trainer, extra_state: object) -> None:
    if extra_state is not None and not isinstance(extra_state, Mapping):
        raise InvalidTypeError(f"extra_state is a {type(extra_state).__name__}: use a dict")
    if "extra" in trainer.config.save_contents:
        return
    if extra_state is not None:
        raise InvalidArgumentError(
            "extra_state is given, but it would not be saved, because save_contents has no 'extra': add the word, "
            "or pass no extra_state"
        )
    if saved := trainer.parts.saved:
        raise InvalidArgumentError(
            f"part {saved[0]!r} is attached, but it would not be saved, because save_contents has no 'extra': add the "
            "word, or detach the part"
        )


def _find_folder(root: Path, role: str, step: int, path: str | Path | None) -> tuple[Path, bool]:
    """Returns the checkpoint's folder, and whether it is part of a step below the root.

    `path` is the folder that the caller asks for; None stands for the usual folder. Raises InvalidArgumentError if the
    folder cannot be used.
    """
    role_dir = (
        file_names.step_dir(root, step) / role if path is None else Path(os.path.abspath(local_path(path, "path")))
    )
    if role_dir.resolve() in (root.resolve(), *root.resolve().parents):
        raise InvalidArgumentError(
            f"path {role_dir} is the folder of all steps, or above it: pass the checkpoint's own folder"
        )
    of = file_names.step_root(role_dir, role, step)
    if of is not None and of.resolve() == root.resolve():
        return role_dir, True
    if file_names.parse_step(role_dir.parent.name) is not None and role_dir.parent.parent.resolve() == root.resolve():
        raise InvalidArgumentError(
            f"path {role_dir} is in a step's folder, so its name would be taken for a role: use {role}"
        )
    return role_dir, False


def _policy(config: CheckpointConfig, max_to_keep: int | None) -> PreservationPolicy:
    check_value("max_to_keep", max_to_keep, int | None, {"least": 1, "or_none": "for config.max_to_keep"})
    return PreservationPolicy.of(config, max_to_keep)
