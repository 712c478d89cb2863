"""Exports a HuggingFace folder under exactly the name that AReaL documents. The folder appears once it is complete."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from pathlib import Path

import torch.distributed as dist

from mcore_ckpt.checkpoint import HUGGINGFACE_DIR
from mcore_ckpt.io import sync_dir
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.steps import remove_sibling_leftovers

logger = logging.getLogger(__name__)

# Hidden folders of an export, by the end of their names: `export.staging-...` is being saved; `export` is saved, but
# not yet moved into place; `replaced` is an older export that was moved aside.
_HIDDEN = re.compile(
    r"\.{1,2}(?P<name>epoch\d+epochstep\d+globalstep\d+)\.(?P<what>export|replaced|export\.staging-.*)"
)
_looked_at: set[Path] = set()


class HfExport:
    """One export, which begins when this object is made. Every rank makes such an object and calls `end`.

    The model is first saved next to its final folder, as a checkpoint that holds only `hf_model`. Then rank 0 moves the
    folder with the weights into place.

    The `save_contents` of `manager` must have only `hf_model`. `end` closes the manager.

    Raises CheckpointError: the save failed. Nothing has been exported.
    """

    def __init__(self, manager: CheckpointManager, path: Path) -> None:
        self._manager = manager
        self._path = path
        self._saved_as = path.with_name(f".{path.name}.export")
        self._not_moved: Exception | None = None
        self._mover: threading.Thread | None = None
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        if is_first:
            _finish_earlier(path.parent)
        try:
            self._handle = manager.save(0, path=self._saved_as)
        except BaseException:
            manager.close()
            raise
        if is_first:
            # The thread is not a daemon, so that the process does not exit before the export is in place.
            self._mover = threading.Thread(target=self._move_when_saved, name="mcore_ckpt export")
            self._mover.start()

    def end(self) -> None:
        """Waits until the folder is in place. Raises CheckpointError on all ranks if the export failed."""
        try:
            if self._mover is not None:
                self._mover.join()
            self._handle.wait()
            self._manager.agree(f"putting {self._path} in place", {"path": str(self._path)}, self._move_result)
        finally:
            self._manager.close()

    def _move_when_saved(self) -> None:
        try:
            self._handle.wait()
            _put(self._saved_as / HUGGINGFACE_DIR, self._path)
            shutil.rmtree(self._saved_as, ignore_errors=True)
        except Exception as error:  # `end` raises it on all ranks
            self._not_moved = error

    def _move_result(self) -> dict[str, str]:
        if self._not_moved is not None:
            raise self._not_moved
        return {}


def _finish_earlier(root: Path) -> None:
    """Finishes or removes exports that dead processes left below a folder. A process does this once for a folder."""
    if root in _looked_at:
        return
    _looked_at.add(root)
    for entry in sorted(root.iterdir()) if root.is_dir() else ():
        hidden = _HIDDEN.fullmatch(entry.name)
        if hidden is None:
            continue
        try:
            _finish(entry, hidden["what"], root / hidden["name"])
        except OSError as error:  # if only rank 0 raised, the other ranks would wait in the export
            logger.warning("%s is left as it is: %s", entry, error)


def _finish(entry: Path, what: str, path: Path) -> None:
    if what.startswith("export.staging"):
        remove_sibling_leftovers(path.with_name(f".{path.name}.export"))
        return
    if what == "replaced" and not path.exists():
        os.rename(entry, path)
        return
    if what == "export" and (entry / HUGGINGFACE_DIR).is_dir():
        logger.warning(
            "%s: this export was complete, but not yet in place when its process died: putting it in place now", path
        )
        _put(entry / HUGGINGFACE_DIR, path)
    shutil.rmtree(entry, ignore_errors=True)


def _put(folder: Path, path: Path) -> None:
    """Moves a folder into place. An older folder is first moved aside, and deleted last, so that weights never mix."""
    replaced = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        os.rename(path, replaced)
    os.rename(folder, path)
    sync_dir(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)
