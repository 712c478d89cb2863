"""Removes the optimizer from old checkpoints that stay (`optimizer_for_last`), and the leftovers of such removals.

A new manifest without the optimizer takes the place of the old one in one rename. Once the new manifest is durable, the
optimizer's folder gets a hidden name, and its files are removed. So a crash at any moment leaves a checkpoint that has
all files of its manifest, and perhaps files that no manifest lists. The next start of a trainer or `prune` removes the
unlisted files.

The checkpoint keeps its `attempt`, because it still comes from the same save. Later checkpoints name this `attempt` as
their parent. The copy in a remote store keeps its optimizer, and still counts as a copy of the checkpoint. `dropped` in
the manifest distinguishes the checkpoint from this copy.

A save may put a new checkpoint into the place of the role's folder at any moment. So this module opens the folder once
and renames manifest and optimizer in the opened folder, and it removes files only below a name that no other folder
has.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, decode_manifest, encode_readable
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import remove_abandoned_files, write_file
from mcore_ckpt.io.removal import remove_tree
from mcore_ckpt.steps.commit import new_attempt
from mcore_ckpt.steps.listing import StepStatus
from mcore_ckpt.steps.owner import Life, life_of, write_owner
from mcore_ckpt.steps.read_lock import unread
from mcore_ckpt.steps.step_obstacles import obstacle_to
from mcore_ckpt.steps.work_folders import is_in_use

logger = logging.getLogger(__name__)

_BELOW = f"{file_names.OPTIMIZER_DIR}/"


def without_optimizer(manifest: Manifest) -> Manifest:
    """Returns the manifest of the same checkpoint without its optimizer."""
    return replace(
        manifest,
        contents=tuple(word for word in manifest.contents if word != "optimizer"),
        files=tuple(file for file in manifest.files if not file.path.startswith(_BELOW)),
        dropped=(*manifest.dropped, "optimizer"),
    )


def drop_optimizer(status: StepStatus, roles: Sequence[str]) -> str | None:
    """Removes the optimizer of some roles of a step, unless the step is in use, pinned or has changed.

    Returns the reason why an optimizer stays; None if all these optimizers are gone. Raises nothing, for the reason
    that `retention.delete_step` gives.
    """
    try:
        return drop_or_raise(status, roles)
    except (OSError, ValueError) as error:
        logger.warning("%s keeps its optimizer, because it cannot be removed: %s", status.path, error)
        return f"it cannot be removed: {error}"


def drop_or_raise(status: StepStatus, roles: Sequence[str], dry_run: bool = False) -> str | None:
    """Does the same as `drop_optimizer`, but raises OSError or ValueError if an optimizer cannot be removed.

    A dry run removes nothing.
    """
    try:
        with unread(map(status.role_dir, roles)) as alone:
            obstacle = obstacle_to(status, status.path) if alone else "it is being read"
            if obstacle is None:
                obstacle = next(filter(None, (_drop(status, role, dry_run) for role in roles)), None)
            return obstacle
    except FileNotFoundError:
        return "another process is deleting or replacing it"
    except CheckpointCorruptError as error:
        return str(error)


def _drop(status: StepStatus, role: str, dry_run: bool) -> str | None:
    role_dir = status.role_dir(role)
    with _opened(role_dir) as folder:
        manifest = _manifest_in(folder, role_dir)
        if manifest.attempt != status.says[role].attempt:
            return "it has just changed"
        if manifest.placement is not None:
            return "other nodes have a part of it"
        if dry_run:
            return None
        if "optimizer" in manifest.contents:
            # Until the files are gone, the owner file shows other processes that a process works here, or died here.
            # The name of the file is durable before the manifest is replaced, so that the next start finds the file
            # even after a power loss.
            write_owner(role_dir)
            os.fsync(folder)
            manifest = without_optimizer(manifest)
            _replace_manifest(folder, role_dir, manifest)
        if is_in_use(status.path, status.path):
            return "it is being copied, so the next start of a trainer removes the files"
        _remove_unlisted(folder, role_dir, manifest)
    return None


def remove_dropped(role_dir: Path, alone: bool = False) -> list[Path]:
    """Removes the optimizer files that a process left when it died during a removal. `alone` is as in `is_leftover`.

    Returns the folders that this function has tried to remove. Raises nothing.
    """
    with suppress(OSError, ValueError, CheckpointCorruptError):
        life = life_of(role_dir)
        if life is Life.ALIVE or (life is Life.UNKNOWN and not alone):
            return []
        remove_abandoned_files(role_dir / file_names.MANIFEST_FILE, 0.0)
        with _opened(role_dir) as folder:
            manifest = _manifest_in(folder, role_dir)
            if manifest.dropped:
                return _remove_unlisted(folder, role_dir, manifest)
    return []


def find_dropped(role_dir: Path) -> list[Path]:
    """Returns the folders that `remove_dropped` would remove. Raises nothing."""
    with suppress(OSError, ValueError, CheckpointCorruptError):
        names = os.listdir(role_dir)
        suspects = [name for name in names if file_names.is_dropped_dir(name)]
        suspects += [name for name in names if name == file_names.OPTIMIZER_DIR]
        if not suspects or life_of(role_dir) in (Life.ALIVE, Life.UNKNOWN):
            return []
        with _opened(role_dir) as folder:
            manifest = _manifest_in(folder, role_dir)
        if manifest.dropped and not _lists_optimizer(manifest):
            return [role_dir / name for name in sorted(suspects)]
    return []


def _lists_optimizer(manifest: Manifest) -> bool:
    return any(file.path.startswith(_BELOW) for file in manifest.files)


@contextmanager
def _opened(role_dir: Path) -> Iterator[int]:
    folder = os.open(role_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def _manifest_in(folder: int, role_dir: Path) -> Manifest:
    """Reads the manifest in an open folder.

    Raises OSError, CheckpointCorruptError, and ValueError if the manifest is damaged.
    """
    descriptor = os.open(file_names.MANIFEST_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, "rb") as file:
        data = file.read(limits.MANIFEST_BYTES + 1)
    if len(data) > limits.MANIFEST_BYTES:
        raise CheckpointCorruptError(f"{role_dir / file_names.MANIFEST_FILE}: is too large")
    return decode_manifest(data)


def _replace_manifest(folder: int, role_dir: Path, manifest: Manifest) -> None:
    temporary = f".{file_names.MANIFEST_FILE}.{uuid.uuid4().hex}"
    try:
        write_file(role_dir / temporary, [encode_readable(manifest)])
        os.rename(temporary, file_names.MANIFEST_FILE, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        (role_dir / temporary).unlink(missing_ok=True)
    os.fsync(folder)


def _remove_unlisted(folder: int, role_dir: Path, manifest: Manifest) -> list[Path]:
    """Removes an optimizer's folder that the manifest no longer lists. Returns the folders that it tried to remove."""
    if _lists_optimizer(manifest):
        return []
    if file_names.OPTIMIZER_DIR in os.listdir(folder):
        hidden = file_names.dropped_dir(role_dir, new_attempt()).name
        os.rename(file_names.OPTIMIZER_DIR, hidden, src_dir_fd=folder, dst_dir_fd=folder)
    found = [role_dir / name for name in os.listdir(folder) if file_names.is_dropped_dir(name)]
    for path in found:
        remove_tree(path)
    if not any(map(os.path.lexists, found)):
        os.fsync(folder)
        with suppress(FileNotFoundError):
            os.unlink(file_names.OWNER_FILE, dir_fd=folder)
    return found
