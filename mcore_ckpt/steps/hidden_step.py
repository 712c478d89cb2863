"""Hides a step before its files are deleted, so that no part of it ever looks like a step.

Between the last check and the rename, a trainer may open or commit a save in the step, or the step may be pinned. So
the step is checked again after the rename, and gets its name back if anything has changed. Until the second check the
step has `.owner.json`, so no other process removes the step as a leftover. A crash leaves the step where it was, or
leaves a `.deleted-...` folder, which does not count as a step. The next start of a trainer or `prune` removes that
folder.

A link in the place of a step stays: removing the link would free nothing, and its target may belong to another run. The
removal of leftovers does not follow links, either. If a role's folder is a link, a save replaces the link by a folder
and leaves the target as it is. A step that cannot be deleted (protected, a mount point, another user's) stays whole.
Other steps are still deleted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.io.files import sync_dir
from mcore_ckpt.steps.commit import new_attempt, remove_folder
from mcore_ckpt.steps.owner import write_owner
from mcore_ckpt.steps.work_folders import replaced_checkpoints


@dataclass(frozen=True)
class HiddenStep:
    """A step under a hidden name.

    `replaced` maps the earlier path of each replaced checkpoint next to the step to its hidden path.
    """

    usual: Path
    path: Path
    replaced: Mapping[Path, Path] = field(default_factory=dict)

    def put_back(self) -> None:
        """Gives the step its name back. Raises OSError."""
        os.rename(self.path, self.usual)
        _put_back(self.replaced)

    def remove(self) -> list[Path]:
        """Removes the files. Returns the folders that could not be removed as a whole."""
        for folder in (self.path, *self.replaced.values()):
            remove_folder(folder)
        return [folder for folder in (self.path, *self.replaced.values()) if os.path.lexists(folder)]


def hide_step(step_path: Path) -> HiddenStep:
    """Hides the checkpoints that a step has replaced, and then the step, by renaming. The caller must sync the names.

    The replaced checkpoints are next to the step if the step's folder is also the folder of a role. If such a
    checkpoint stayed, it would take the place of the deleted step.

    Raises OSError: nothing is hidden.
    """
    replaced: dict[Path, Path] = {}
    try:
        for folder in replaced_checkpoints(step_path):
            hidden = file_names.deleted_dir(step_path, new_attempt())
            # The caller may still put the folder back, with the step. Until the caller decides, the owner file keeps
            # other processes from removing the folder.
            with suppress(OSError):
                if not folder.is_symlink():
                    write_owner(folder)
            os.rename(folder, hidden)
            replaced[folder] = hidden
        if replaced:
            # Without this sync, the rename of the step might survive a power loss, and the renames of the replaced
            # checkpoints might not.
            sync_dir(step_path.parent)
        path = file_names.deleted_dir(step_path, new_attempt())
        os.rename(step_path, path)
    except OSError:
        _put_back(replaced)
        raise
    return HiddenStep(step_path, path, replaced)


def _put_back(replaced: Mapping[Path, Path]) -> None:
    for usual, hidden in replaced.items():
        with suppress(OSError):  # another process has removed the folder, or has made a folder of the earlier name
            os.rename(hidden, usual)
