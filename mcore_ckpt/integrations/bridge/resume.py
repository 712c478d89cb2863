"""Decides whether a run of Megatron-Bridge resumes from a checkpoint of ours or from Bridge's own."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import MANIFEST_FILE, megatron_dir
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, InvalidArgumentError
from mcore_ckpt.formats import load_safely
from mcore_ckpt.integrations.bridge.options import LOADED_FROM
from mcore_ckpt.integrations.kit.resume import Theirs, find
from mcore_ckpt.integrations.kit.together import decided_by_rank_0
from mcore_ckpt.steps import move_tracker, newest_complete, read_tracker

_TOPIC = "finding a checkpoint"
# The options that require a checkpoint in `load`.
_NEEDED = ("ckpt_step", "exit_on_missing_checkpoint")
# Bridge's tracker, which Bridge prefers to Megatron-LM's. The file has the counters of the newest checkpoint in
# Bridge's format.
_TRACKER = "latest_train_state.pt"


class Source(Enum):
    """Which checkpoint a run resumes from."""

    OURS = "load"  # a step of ours in checkpoint.load
    PRETRAINED = "pretrained_checkpoint"  # a step of ours in checkpoint.pretrained_checkpoint, only for its weights
    THEIRS = "theirs"  # whatever Bridge's own manager finds


def check_findable(checkpoint: Any, role: str, timeout_s: float) -> None:
    """Makes sure that Bridge asks for a load if there is a checkpoint.

    Every rank calls this function, before Bridge's `setup` decides whether to load. `setup` calls the manager only if
    there is a tracker in the folder (`_should_load_checkpoint`, 0.4 to 0.6), and otherwise begins from scratch without
    a warning. After a crash between the commit of the first step and the writing of the tracker, there is no tracker,
    so this function writes the tracker.

    Raises:
        InvalidArgumentError: an option names one checkpoint instead of the folder of all checkpoints.
        CheckpointNotFoundError: there is no checkpoint, although an option requires one.
        AgreementError: the ranks have different options, or a rank is missing.
    """

    def look() -> None:
        for name in LOADED_FROM:
            given = getattr(checkpoint, name)
            if given:
                _refuse_one_checkpoint(name, Path(given), role)
                _complete_tracker(Path(given))
        # If `load` has no checkpoint, Bridge takes the weights from `pretrained_checkpoint`. But if `ckpt_step` is set,
        # that step must be in `load`.
        fallback = checkpoint.pretrained_checkpoint
        if checkpoint.ckpt_step is not None or not (fallback and _has_checkpoint(Path(fallback))):
            _check_not_missing(checkpoint)

    decided_by_rank_0("bridge/begin", _TOPIC, _request(checkpoint), look, timeout_s)


def check_adapters_findable(checkpoint: Any, timeout_s: float) -> None:
    """Checks again for a missing checkpoint, once it is known that the run has adapters.

    Every rank calls this function. The adapters must be in `load`, because Bridge takes only the base model from
    `pretrained_checkpoint`.

    Raises CheckpointNotFoundError, AgreementError: see `check_findable`.
    """
    decided_by_rank_0(
        "bridge/adapters", _TOPIC, _request(checkpoint), lambda: _check_not_missing(checkpoint), timeout_s
    )


def _refuse_one_checkpoint(name: str, root: Path, role: str) -> None:
    if (root / MANIFEST_FILE).exists() or (root / role / MANIFEST_FILE).exists():
        raise InvalidArgumentError(
            f"checkpoint.{name} is {root}, which is one checkpoint: Bridge would not find it. Name the folder of all "
            "checkpoints, and the step with checkpoint.ckpt_step"
        )


def _complete_tracker(root: Path) -> None:
    from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists

    if not checkpoint_exists(str(root)) and newest_complete(root) is not None:
        move_tracker(root)


def _check_not_missing(checkpoint: Any) -> None:
    asked = [f"{name} is {getattr(checkpoint, name)}" for name in _NEEDED if _is_asked(getattr(checkpoint, name))]
    if asked and not (checkpoint.load and _has_checkpoint(Path(checkpoint.load))):
        raise CheckpointNotFoundError(
            f"checkpoint.load is {checkpoint.load}, which has no checkpoint, but checkpoint.{asked[0]}: name the "
            f"folder of all checkpoints in checkpoint.load, or leave out checkpoint.{asked[0].split()[0]} to begin "
            "without a checkpoint"
        )


def _is_asked(value: Any) -> bool:
    return value is not None and value is not False


def _has_checkpoint(root: Path) -> bool:
    """True if Bridge asks for a load from a folder. Bridge 0.4 and 0.5 do not ask for a HuggingFace folder."""
    from megatron.bridge.training.utils import checkpoint_utils

    is_huggingface = getattr(checkpoint_utils, "is_hf_checkpoint_dir", lambda path: False)
    return bool(checkpoint_utils.checkpoint_exists(str(root)) or is_huggingface(str(root)))


def find_source(checkpoint: Any, role: str, timeout_s: float) -> Source:
    """Returns where to resume from. Every rank calls this function, and all get rank 0's answer.

    Raises CheckpointNotFoundError: there are steps of ours, but none is complete; or the step `ckpt_step` is missing.
    """
    found = decided_by_rank_0(
        "bridge/load", _TOPIC, _request(checkpoint), lambda: _look(checkpoint, role).value, timeout_s
    )
    return Source(found)


def _request(checkpoint: Any) -> dict[str, str]:
    return {name: str(getattr(checkpoint, name)) for name in (*LOADED_FROM, *_NEEDED)}


def no_foreign_checkpoint(root: Path, step: int | None) -> None:
    """Finds no checkpoint in Bridge's format, because `find_source` has already decided."""


def _look(checkpoint: Any, role: str) -> Source:
    for name in LOADED_FROM:
        folder = getattr(checkpoint, name)
        if not folder:
            continue
        found = find(Path(folder), role, checkpoint.ckpt_step if name == "load" else None, _bridge_checkpoint)
        if found is not None:
            return Source.THEIRS if "theirs" in found else Source(name)
        if _has_checkpoint(Path(folder)):
            return Source.THEIRS
    return Source.THEIRS


def _bridge_checkpoint(root: Path, step: int | None) -> tuple[int, Callable[[], Theirs]] | None:
    """Finds the checkpoint in Bridge's format that Bridge's tracker names, or the checkpoint of a given step."""
    iteration = step if step is not None else _tracked(root)
    if iteration is None or not megatron_dir(root, iteration).is_dir():
        return None
    return iteration, lambda: Theirs(megatron_dir(root, iteration), {}, 1, 1)


def _tracked(root: Path) -> int | None:
    """Returns the iteration that Bridge would resume from; None without a tracker."""
    path = root / _TRACKER
    if not path.exists():
        return read_tracker(root)
    try:
        return int(load_safely(path, str(path))["step"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(
            f"{path}: names no iteration ({error}): remove this file to resume without it"
        ) from None
