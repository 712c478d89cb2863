"""Finds out whose checkpoint a run of Megatron-Bridge's resumes from: ours, or Bridge's own."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_ckpt.checkpoint import MANIFEST_FILE, megatron_dir
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, InvalidArgumentError
from mcore_ckpt.formats import load_safely
from mcore_ckpt.integrations.kit.resume import Theirs, find
from mcore_ckpt.ranks import agree, rendezvous
from mcore_ckpt.steps import complete_steps, move_tracker, read_tracker

# The options that name folders, in the order in which Bridge tries them.
_FOLDERS = ("load", "pretrained_checkpoint")
# Bridge's tracker, which it prefers to Megatron-LM's. It has the counters of the newest checkpoint of its own.
_TRACKER = "latest_train_state.pt"


class Source(Enum):
    """Where a run resumes from."""

    OURS = "load"  # a step of ours in checkpoint.load
    PRETRAINED = "pretrained_checkpoint"  # a step of ours there, for its weights
    THEIRS = "theirs"  # everything that Bridge's own manager decides


def check_findable(checkpoint: Any, role: str) -> None:
    """Makes sure that Bridge asks for a load if there is a checkpoint of ours. Every rank calls it, before `setup`.

    Bridge calls the manager only if it sees a tracker in the folder (`_should_load_checkpoint`, 0.4 to 0.6), and begins
    from scratch without a word if not. A crash between the commit of the first step and the tracker leaves none.

    Raises:
        InvalidArgumentError: an option names one checkpoint instead of the folder of all.
        CheckpointNotFoundError: `exit_on_missing_checkpoint` is set, and there is no checkpoint.
    """
    from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists

    for name in _FOLDERS:
        given = getattr(checkpoint, name)
        if not given:
            continue
        root = Path(given)
        if (root / MANIFEST_FILE).exists() or (root / role / MANIFEST_FILE).exists():
            raise InvalidArgumentError(
                f"checkpoint.{name} is {given}, which is one checkpoint: Bridge would not find it. Name the folder of "
                "all checkpoints, and the step with checkpoint.ckpt_step"
            )
        if _rank() == 0 and not checkpoint_exists(given) and complete_steps(root):
            move_tracker(root)
    load = checkpoint.load
    if not checkpoint.exit_on_missing_checkpoint or not load or checkpoint.pretrained_checkpoint:
        return
    # Not the tracker alone: rank 0 may be writing it at this moment.
    if not complete_steps(Path(load)) and not checkpoint_exists(load):
        raise CheckpointNotFoundError(
            f"{load}: there is no checkpoint, and checkpoint.exit_on_missing_checkpoint is set"
        )


def find_source(checkpoint: Any, role: str, timeout_s: float) -> Source:
    """Returns where to resume from. Every rank calls it, and all get what rank 0 has found.

    Raises CheckpointNotFoundError: there are steps of ours, but none is complete; or `ckpt_step` is missing.
    """
    topic = "finding a checkpoint"
    request = {name: str(getattr(checkpoint, name)) for name in (*_FOLDERS, "ckpt_step")}

    def answer() -> dict[str, str]:
        return {"source": _look(checkpoint, role).value}

    return Source(agree(rendezvous("bridge/load", timeout_s, topic), topic, request, answer)["source"])


def nothing_else(root: Path, step: int | None) -> None:
    """Finds no checkpoint in Bridge's format: `find_source` has decided already."""


def _look(checkpoint: Any, role: str) -> Source:
    from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists

    for name in _FOLDERS:
        folder = getattr(checkpoint, name)
        if not folder:
            continue
        found = find(Path(folder), role, checkpoint.ckpt_step if name == "load" else None, _bridge_checkpoint)
        if found is not None:
            return Source.THEIRS if "theirs" in found else Source(name)
        if checkpoint_exists(folder) or (Path(folder) / "config.json").exists():  # or a HuggingFace model
            return Source.THEIRS
    return Source.THEIRS


def _bridge_checkpoint(root: Path, step: int | None) -> tuple[int, Callable[[], Theirs]] | None:
    """Finds the checkpoint of Bridge's own that its tracker names, or of a step."""
    iteration = step if step is not None else _tracked(root)
    if iteration is None or not megatron_dir(root, iteration).is_dir():
        return None
    return iteration, lambda: Theirs(iteration, megatron_dir(root, iteration), {}, 1, 1)


def _tracked(root: Path) -> int | None:
    """Returns the iteration that Bridge would resume from; None without a tracker."""
    path = root / _TRACKER
    if not path.exists():
        return read_tracker(root)
    try:
        return int(load_safely(path, str(path))["step"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{path}: names no iteration ({error}): remove it to resume without it") from None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
