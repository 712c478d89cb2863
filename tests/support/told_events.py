"""A training with good and failed saves, loads, deletions and uploads, for what listens to it."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import CheckpointConfig, CheckpointManager, SaveReport
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.save import rank_files
from tests.support.unsharded_model import Model

# The steps of `train`: saved, saved, failed.
GOOD, NEWEST, BAD = 10, 20, 30
# A step that `train` tries to load, and that does not exist.
ABSENT = 99
DISK_ERROR = "Input/output error"


@contextmanager
def broken_disk() -> Iterator[None]:
    """Lets saves fail when they have written their files."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, DISK_ERROR)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rank_files, "sync_names", fail)
        yield


def train(folder: Path, listener: Callable[[Any], object], **choices: Any) -> list[SaveReport]:
    """Saves GOOD and NEWEST, loads, fails to load ABSENT and to save BAD. Returns the reports of the good saves.

    One step stays, so GOOD is deleted. Both good ones are uploaded to a folder.
    """
    words = ("model",)
    config = CheckpointConfig(
        save_contents=words,
        load_contents=words,
        max_to_keep=1,
        remote=f"file://{folder}/remote",
        listeners=(listener,),
        **choices,
    )
    manager = CheckpointManager(folder / "local", Model(), config=config)
    reports = []
    for step in (GOOD, NEWEST):
        reports.append(manager.save(step).wait())
        manager.wait()
    manager.load()
    for fails in (lambda: manager.load(step=ABSENT), lambda: manager.save(BAD).wait()):
        with broken_disk(), pytest.raises(CheckpointError):
            fails()
    manager.close()
    return reports
