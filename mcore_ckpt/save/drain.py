"""Copies a committed step of the fast tier to the root, beside the training, and commits it there.

Each rank copies the files that it has written, from its node's folder. No byte of the training state is read again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from weakref import WeakSet

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, WrittenFile
from mcore_ckpt.errors import CheckpointError, CommitError, HungDiskError
from mcore_ckpt.events import ErrorText
from mcore_ckpt.io import tuning
from mcore_ckpt.io.disk_watch import wait_for_thread
from mcore_ckpt.io.file_copies import copy_checked
from mcore_ckpt.io.files import make_folders, sync_names
from mcore_ckpt.io.room import Need
from mcore_ckpt.io.threads import for_each
from mcore_ckpt.processes import OwnEvent, emptied_in_child
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.save.context import SaveContext
from mcore_ckpt.save.old_steps import OldSteps
from mcore_ckpt.save.root_commit import commit_to_root, old_steps, upload
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import commit, tracker
from mcore_ckpt.steps.node_transaction import committed_manifest
from mcore_ckpt.steps.room import Saving
from mcore_ckpt.steps.transaction import Attempt, check_seen, open_together, opening_of
from mcore_ckpt.steps.upload_queue import UploadHandle

logger = logging.getLogger(__name__)


class DrainHandle:
    """The copy of one step to the root.

    Attributes:
        step: the step.
        path: where the checkpoint is, or will be, in the root.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        self._ended = OwnEvent("this DrainHandle")
        self._exception: CheckpointError | None = None
        self.upload: UploadHandle | None = None

    @property
    def done(self) -> bool:
        """True if the step is in the root, or could not be copied there."""
        return self._ended.is_set()

    @property
    def committed(self) -> bool:
        """True if the step is in the root."""
        return self.done and self._exception is None

    @property
    def exception(self) -> CheckpointError | None:
        """Why the step is not in the root. None while it is being copied, and if it is there."""
        return self._exception

    def wait(self, timeout: float | None = None) -> Path:
        """Waits until the step is in the root, and returns its folder.

        Raises:
            TimeoutError: it is still being copied after `timeout` seconds.
            CheckpointError: it could not be copied. Older steps in the root are intact.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"step {self.step} is still being copied to {self.path} after {timeout:g} s")
        if self._exception is not None:
            raise self._exception
        return self.path

    def end(self, error: CheckpointError | None, upload: UploadHandle | None = None) -> None:
        """Ends the copy. Only the thread that drains calls it."""
        self._exception, self.upload = error, upload
        self._ended.set()


def is_own_name(trainer: Trainer, step: int, role_dir: Path) -> bool:
    """True if a role's folder in the root has the name that this package gives it, and not one of the trainer's."""
    return role_dir == file_names.step_dir(trainer.root, step) / trainer.role


@dataclass(frozen=True, eq=False)
class Drain:
    """The copy of one step to the root, on this rank.

    Attributes:
        context: what the saves of the manager share.
        agreement: connects this rank with the other ranks, for rounds on the thread that drains.
        attempt: the step in this node's folder.
        saving: what is saved to the root.
        prepare: takes the root's lock and checks the room, on rank 0.
    """

    context: SaveContext
    agreement: Agreement
    attempt: Attempt
    saving: Saving
    prepare: Callable[[Saving, Need], None]

    def run(self) -> tuple[UploadHandle | None, OldSteps | None]:
        """Copies this rank's files and commits the checkpoint in the root. Every rank calls it.

        Returns:
            The upload and the old steps to delete; each is None if there is nothing to do, and on most ranks.

        Raises:
            CheckpointError: the step is not in the root. All ranks raise it.
        """
        trainer, step = self.context.trainer, self.saving.step
        topic = f"copying step {step} of {trainer.role} to {trainer.root}"
        try:
            manifest = self.agreement.runner.run(partial(committed_manifest, self.attempt))
        except BaseException as error:
            self.agreement.fail_next_round(topic, error, opening_of(self.attempt.number))
            raise
        mine = [file for file in manifest.files if file.rank == trainer.agreement.rank]
        need = Need.of((file.path, file.size) for file in mine)
        opened = open_together(
            self.agreement,
            topic,
            self.saving.role_dir,
            prepare=partial(self.prepare, self.saving),
            need=need,
            number=self.attempt.number,
            folder_mode=partial(trainer.folder_mode, self.saving.role_dir),
        )
        exports = "hf_model" in trainer.config.save_contents

        def copy(staging: Path) -> Record:
            return {"files": [asdict(file) for file in self._copy(staging, mine, exports)]}

        def describe(_: Sequence[Record]) -> Manifest:
            files = _copied(manifest.files, exports)
            commit.check_files(opened.staging, ((file.rank, _written(file)) for file in files))
            return replace(manifest, placement=None, files=files)

        move_tracker = partial(self._move_tracker, opened.role_dir)
        commit_to_root(self.context, self.agreement, topic, opened, copy, describe, move_tracker)
        return upload(self.context, self.saving), old_steps(self.context, self.agreement, self.saving)

    def _move_tracker(self, role_dir: Path) -> None:
        # Other trackers follow the nodes (`nodes._track`), and may name a newer step by now.
        if is_own_name(self.context.trainer, self.saving.step, role_dir):
            tracker.move_tracker(self.context.trainer.root, self.saving.step, seen=role_dir)

    def _copy(self, staging: Path, mine: Sequence[FileRecord], exports: bool) -> list[WrittenFile]:
        self.context.lock.check_root()
        check_seen(staging)
        files = _copied(mine, exports)
        for file in files:
            make_folders(staging, file.path)

        def copy(file: FileRecord) -> None:
            copy_checked(self.attempt.role_dir / file.path, staging / file.path, file.size, file.crc32)

        for_each(files, copy, min(tuning.PEER_THREADS, max(1, len(files))))
        sync_names(staging, [file.path for file in files])
        self.context.lock.check_root()
        return [_written(file) for file in files]


def _copied(files: Sequence[FileRecord], exports: bool) -> tuple[FileRecord, ...]:
    # An export writes the files beside the HuggingFace weights anew.
    return tuple(file for file in files if not (exports and file.kind == "huggingface"))


def _written(file: FileRecord) -> WrittenFile:
    return WrittenFile(file.path, file.kind, file.size, file.crc32, file.index)


class Drains:
    """Runs the drains of one manager on a thread of its own, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt: str | None = None
        self._thread: threading.Thread | None = None
        self._handle: DrainHandle | None = None
        self._agreement: Agreement | None = None
        _all_drains.add(self)

    @property
    def busy(self) -> bool:
        """True while a step is being copied to the root."""
        return self._attempt is not None

    @property
    def has_failed(self) -> bool:
        """True if the last step could not be copied to the root."""
        handle = self._handle
        return handle is not None and handle.exception is not None

    def needed(self) -> set[str]:
        """Returns the ids of saves that must not be deleted from this node's folder."""
        with self._lock:
            return set() if self._attempt is None else {self._attempt}

    def start(self, drain: Drain) -> DrainHandle:
        """Begins to copy a step to the root, after an earlier one. Every rank calls it."""
        # Rank 0 begins none while one is under way, but another rank may still be at the end of it.
        self.wait()
        handle = self._handle = DrainHandle(drain.saving.step, drain.saving.role_dir)
        self._agreement = drain.agreement
        with self._lock:
            self._attempt = drain.attempt.number
        thread = threading.Thread(target=self._run, args=(drain, handle), name="mcore_ckpt drain", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system grants no thread: do the work here, which is slower but does not fail
            self._run(drain, handle)
        else:
            self._thread = thread
        return handle

    def wait(self, step: int | None = None) -> None:
        """Waits until no step, or not this one, is being copied to the root.

        The deadlines of the ranks and of calls to the file system limit this wait.
        """
        thread, handle = self._thread, self._handle
        if thread is not None and (step is None or (handle is not None and handle.step == step)):
            thread.join()

    def finish(self) -> None:
        """Waits as `wait` does, but not long for other ranks. An exiting interpreter calls it."""
        if self._agreement is not None:
            self._agreement.limit_waits(deadlines.EXIT_WAIT_S)
        if self._thread is None:
            return
        try:
            wait_for_thread(self._thread, deadlines.EXIT_WAIT_S)
        except HungDiskError as error:
            logger.error("the interpreter ends before a step is in the root: %s", error)

    def _run(self, drain: Drain, handle: DrainHandle) -> None:
        error: CheckpointError | None = None
        uploaded = too_old = None
        try:
            uploaded, too_old = drain.run()
        except CheckpointError as failure:
            error = failure
        except Exception as failure:
            trace = ErrorText.of(failure).stacktrace
            logger.error("copying step %d to the root has failed unexpectedly\n%s", handle.step, trace)
            error = CommitError(f"{type(failure).__name__}: {failure}")
        finally:
            if error is not None:
                logger.error("step %d is not in the root, and stays in the fast tier: %s", handle.step, error)
            with self._lock:
                self._attempt = None
            handle.end(error, uploaded)
        if too_old is not None:
            try:
                drain.agreement.runner.run(too_old.delete)
            except HungDiskError as error:
                logger.warning("old steps stay until the next save to the root: %s", error)


_all_drains: WeakSet[Drains] = emptied_in_child(WeakSet())


def finish_drains() -> None:
    """Finishes all drains of this process. An exiting interpreter calls it, once no save can begin another one."""
    for drains in list(_all_drains):
        drains.finish()
