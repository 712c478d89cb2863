"""Commits, as a role of each step, the files that verl's driver writes into the step, and restores these files.

    <root>/global_step_{N}/
    ├── actor/  critic/     committed by the workers
    ├── data.pt             the driver writes it once the workers have returned, and reads it at a start
    ├── transfer_queue/     the same, in asynchronous modes (verl 0.9)
    └── driver/             the same files, with a manifest of their sizes and CRCs: committed after the workers

`driver/transfer_queue/` has hard links, so that these files take disk space only once. verl overwrites `data.pt` in
place when it saves a step again, so the role has a copy of this file.
"""

from __future__ import annotations

import logging
from pathlib import Path

from mcore_ckpt.checkpoint import TRACKER_FILE, find_damage
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats import companions_of
from mcore_ckpt.integrations.verl.place import Place
from mcore_ckpt.integrations.verl.resume import step_to_go_back_to
from mcore_ckpt.io import for_each
from mcore_ckpt.steps import (
    RoleReader,
    RoleWriter,
    holds_something,
    list_steps,
    read_tracker,
    remove_entry,
    remove_tracker,
    replace_entry,
    step_status,
    write_tracker,
)

logger = logging.getLogger(__name__)

DRIVER = "driver"
"""The name of the role."""
_QUEUE = "transfer_queue"

# The number of threads that sync files. There can be many files, because TransferQueue writes one file for each value
# that it has put on an SSD.
_THREADS = 8


def add_files(step_path: Path, files: RoleWriter) -> None:
    """Adds all files that the driver has written into a step. Raises OSError."""
    found = _files_in(companions_of(step_path))
    for_each(sorted(found), lambda path: files.add(path, found[path], _shares(path)), min(_THREADS, len(found)))


def _files_in(entries: dict[str, Path]) -> dict[str, Path]:
    """Returns the files of a step's entries, by their paths relative to the step."""
    below = {
        f"{name}/{file.relative_to(entry).as_posix()}": file
        for name, entry in entries.items()
        for file in entry.rglob("*")
        if file.is_file()
    }
    return {name: entry for name, entry in entries.items() if entry.is_file()} | below


def _shares(path: str) -> bool:
    # A file in a folder can be a hard link, because TransferQueue writes a new folder and renames it. `data.pt` must be
    # a copy, because `torch.save` overwrites the file in place.
    return "/" in path


def put_back(step_path: Path) -> None:
    """Restores the committed files in a step's folder, because verl's driver is about to read them.

    After a power loss, or if the driver died while it saved the step again, the step's files can differ from the
    committed files. A `transfer_queue/` that was not committed is removed, because verl would read it, too. A step
    without this role is left as it is.

    Raises:
        CheckpointCorruptError: a committed file is damaged.
        OSError: a file cannot be put back.
    """
    status = step_status(step_path)
    if DRIVER not in status.committed - status.given_up:
        return
    damages = find_damage(status.role_dir(DRIVER))
    if damages:
        raise CheckpointCorruptError(damages[0].problem)
    committed = RoleReader(status.role_dir(DRIVER))
    paths = [file.path for file in committed.manifest.files]
    # verl would also read a queue that the committed save did not have.
    for name in sorted({_QUEUE, *(path.partition("/")[0] for path in paths)}):
        own = [path for path in paths if path.partition("/")[0] == name]
        is_same = _files_in({name: step_path / name}).keys() == set(own)
        _remove_leftovers(step_path, name)
        if not (is_same and all(committed.is_same(path, step_path / path) for path in own)):
            done = "replaced by the committed copy, because it differs" if own else "removed: it is not committed"
            logger.warning("%s: is %s", step_path / name, done)
            _replace(step_path, name, own, committed)


def _replace(step_path: Path, name: str, paths: list[str], committed: RoleReader) -> None:
    new, old = _places_beside(step_path, name)
    for path in paths:
        target = new / path
        target.parent.mkdir(parents=True, exist_ok=True)
        committed.put(path, target, _shares(path))
    replace_entry(step_path / name, new / name if paths else None, old)
    _remove_leftovers(step_path, name)


def _places_beside(step_path: Path, name: str) -> tuple[Path, Path]:
    """Returns the path at which a replacement is made, and the path to which the replaced entry is moved."""
    return step_path / f".{name}.committed", step_path / f".{name}.replaced"


def _remove_leftovers(step_path: Path, name: str) -> None:
    """Removes what a replacement has left, even if the process died during the replacement."""
    for left in _places_beside(step_path, name):
        remove_entry(left)


def correct_tracker(root: Path) -> None:
    """Makes the tracker name a complete step if the driver died during a save. Raises OSError.

    Without `async_save` verl writes the tracker in place, before it calls the driver's callback. So the tracker may be
    empty, or name a step that the driver has not committed. verl could not resume in either case.
    """
    tracker_path, tracked = root / TRACKER_FILE, read_tracker(root)
    if not tracker_path.exists() or (tracked is not None and not _lacks_driver(root, tracked)):
        return
    step = step_to_go_back_to(Place.of(root / f"global_step_{tracked or 0}" / "actor", "actor"))
    if step is not None:
        logger.warning("%s: names step %d from now on, because the driver died during a save", tracker_path, step)
        write_tracker(root, step)
    elif all(DRIVER in status.missing for status in list_steps(root) if holds_something(status)):
        logger.warning("%s: is removed, because no save was ever completed", tracker_path)
        remove_tracker(root)


def _lacks_driver(root: Path, step: int) -> bool:
    return any(DRIVER in status.missing for status in list_steps(root, step))
