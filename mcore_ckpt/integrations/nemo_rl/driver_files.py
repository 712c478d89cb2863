"""Protects, with a manifest, the files that NeMo-RL's driver writes into a step.

The driver (2026-08) writes `training_info.json`, `train_dataloader.pt`, `replay_buffer.pt` and `rollouts.pt` (the
frontier of the collector) into `tmp_step_{N}`, next to the weights. At the end it renames the folder
(`CheckpointManager._rename_checkpoint`). So a killed driver leaves no half step. But NeMo-RL does not make these files
durable, and does not check them. After a power loss, a renamed step may have empty files. If a file is missing, NeMo-RL
goes on with an empty buffer, without an error.

    step_{N}/
    ├── manifest.json                   a role of plain files: their sizes and CRCs
    ├── training_info.json, train_dataloader.pt, replay_buffer.pt, rollouts.pt, ...
    └── policy/weights/policy/          the weights, a checkpoint with its own manifest
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import MANIFEST_FILE, find_damage
from mcore_ckpt.config import TIMEOUT_S
from mcore_ckpt.errors import CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.integrations.kit.free_names import free_name
from mcore_ckpt.io import DiskWatch, in_function_of_trainer, sync_dir
from mcore_ckpt.steps import seal_role

logger = logging.getLogger(__name__)

DRIVER_ROLE = "driver"
# The folders in which workers save a model: <step>/<model>/<one of these>.
_WORKERS_FOLDERS = ("weights", "optimizer")


def keep_driver_files(timeout_s: float = TIMEOUT_S) -> None:
    """Lets NeMo-RL's driver write a manifest into each step before the rename, and resume only from a whole step.

    This function changes two methods of NeMo-RL's CheckpointManager in the driver's process. The changed methods raise
    HungDiskError once a single call to the disk has lasted `timeout_s` seconds. Otherwise the driver, and with it the
    whole training, would wait for ever.

    Raises ImportError: NeMo-RL is not installed.
    """
    try:
        from nemo_rl.utils.checkpoint import CheckpointManager
    except ImportError as error:
        raise ImportError(f"mcore_ckpt.integrations.nemo_rl needs NeMo-RL: {error}") from error
    rename: Any = CheckpointManager._rename_checkpoint
    whole: set[Path] = set()
    damaged: set[Path] = set()
    watch = DiskWatch(timeout_s, who=f"{DRIVER_ROLE}: ")

    def seal_and_rename(self: Any, checkpoint_path: Any) -> None:
        folder = Path(checkpoint_path)
        _seal_if_possible(folder)
        set_aside(step for step in damaged if step.parent == Path(self.checkpoint_dir))
        with in_function_of_trainer():  # NeMo-RL's method may wait for something other than a disk
            rename(self, checkpoint_path)
        sync_dir(folder.parent)

    @functools.wraps(rename)
    def watched_rename(self: Any, checkpoint_path: Any) -> None:
        watch.run(lambda: seal_and_rename(self, checkpoint_path))

    def get_latest_checkpoint_path(self: Any) -> str | None:
        root = Path(self.checkpoint_dir)
        found = watch.run(lambda: newest_whole(root, lambda step: step in whole, damaged.add))
        if found is not None:
            whole.add(found)  # check once: the driver asks again, and a replay buffer may be large
        return None if found is None else str(found)

    CheckpointManager._rename_checkpoint = watched_rename
    CheckpointManager.get_latest_checkpoint_path = get_latest_checkpoint_path


def seal(folder: Path) -> None:
    """Lists the driver's files in a manifest.

    If this function raises OSError or CommitError, the step is not renamed. If this function raises UnsupportedError,
    the step is durable and gets its name without a manifest. The error names a file that a manifest cannot list.
    """
    (folder / MANIFEST_FILE).unlink(missing_ok=True)  # from an earlier try of this save
    paths = sorted(path.relative_to(folder).as_posix() for path in _files(folder, 0))
    seal_role(folder, DRIVER_ROLE, _step_of(folder), paths)


def _seal_if_possible(folder: Path) -> None:
    # Rename the step even without a manifest. Otherwise the step is lost: NeMo-RL deletes the folder when it saves this
    # step again.
    try:
        seal(folder)
    except UnsupportedError as error:
        logger.warning("%s has no manifest, so a resume does not check the driver's files: %s", folder, error)


def set_aside(steps: Iterable[Path]) -> None:
    """Renames steps that are not whole to `damaged_step_{N}`, where NeMo-RL does not see them. Raises OSError.

    A driver that has gone on from an older step calls this function when it saves. Otherwise NeMo-RL would count these
    steps as the newest, and delete whole steps in their place (`CheckpointManager.remove_old_checkpoints`). NeMo-RL
    would also fail at a damaged `training_info.json`.
    """
    for step in sorted(steps):
        if step.exists():
            target = free_name(step.with_name(f"damaged_{step.name}"))
            os.rename(step, target)
            logger.warning("%s is not whole, so it has the name %s from now on", step, target.name)


def newest_whole(
    root: Path,
    is_known: Callable[[Path], bool] = lambda step: False,
    skip: Callable[[Path], object] = lambda step: None,
) -> Path | None:
    """Returns the newest `step_{N}` whose files are whole; None if there is no step at all.

    A step that NeMo-RL has saved without this package has no manifest, and is not checked. For our weights, this
    function checks only the sizes of the files, because a load checks the bytes.

    Args:
        root: NeMo-RL's `checkpoint_dir`.
        is_known: True for a step that has been checked already.
        skip: a function that is called with each step that is not whole, the newest first.

    Raises CheckpointNotFoundError: there are steps, but none is whole. The message has the reason for each.
    """
    steps = [path for path in root.glob("step_*") if re.fullmatch(r"step_\d+", path.name) and path.is_dir()]
    reasons = []
    for step in sorted(steps, key=_step_of, reverse=True):
        problem = None if is_known(step) else _problem(step)
        if problem is None:
            return step
        logger.warning("%s is skipped, and older steps are tried: %s", step, problem)
        reasons.append(problem)
        skip(step)
    if reasons:
        raise CheckpointNotFoundError("\n  ".join([f"{root}: no step is whole", *reasons]))
    return None


def _problem(step: Path) -> str | None:
    damages = find_damage(step) if (step / MANIFEST_FILE).exists() else []
    for manifest in sorted(step.glob(f"*/weights/*/{MANIFEST_FILE}")):
        damages += find_damage(manifest.parent, read_bytes=False)
    return damages[0].problem if damages else None


def _files(folder: Path, depth: int) -> Iterator[Path]:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            if depth != 1 or entry.name not in _WORKERS_FOLDERS:
                yield from _files(Path(entry.path), depth + 1)
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _step_of(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])
