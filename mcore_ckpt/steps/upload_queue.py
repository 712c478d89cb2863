"""Uploads committed checkpoints beside the training, one after the other, on a thread of its own."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, RemoteError
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import work_folders
from mcore_ckpt.steps.remote_steps import RemoteStep, RemoteSteps
from mcore_ckpt.steps.retention import Judged, PreservationPolicy, too_old
from mcore_ckpt.steps.upload import Upload, tidy_up

logger = logging.getLogger(__name__)


class UploadHandle:
    """The state of the upload of one committed checkpoint, for the trainer.

    Attributes:
        step: the step.
        exception: why the last try failed, or why there will be no try; None if nothing failed. After a failure of the
            store the upload is tried again after the next commit.
        nbytes: the bytes of the checkpoint's files; 0 until they are in the store.
        seconds: from the first byte to the last; 0 until then.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.exception: CheckpointError | None = None
        self.nbytes = 0
        self.seconds = 0.0
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """True if all of the checkpoint is in the store."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds, or without limit. True if the upload is done."""
        return self._done.wait(timeout)

    def finish(self, nbytes: int, seconds: float) -> None:
        """Marks the upload as done. The queue calls it."""
        self.exception, self.nbytes, self.seconds = None, nbytes, seconds
        self._done.set()


class UploadQueue:
    """Uploads one role's checkpoints to a remote store, on a thread that lives while there is work.

    Args:
        remote: the store.
        root: the folder of the local steps.
        role: the role whose checkpoints are uploaded.
        policy: which steps stay in the store.
    """

    def __init__(self, remote: RemoteSteps, root: Path, role: str, policy: PreservationPolicy) -> None:
        self._remote = remote
        self._root = root
        self._role = role
        self._policy = policy
        self._lock = threading.Lock()
        self._waiting: dict[int, UploadHandle] = {}  # committed locally, not yet in the store
        self._begun: dict[str, Upload] = {}  # by folder, so that a failed upload continues where it was
        self._pins: dict[int, bool] = {}  # of local steps, and of those that were local at the last upload
        self._latest = -1
        self._asked = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def committed(self, step: int, policy: PreservationPolicy | None = None) -> UploadHandle:
        """Queues a checkpoint that was just committed. Returns at once and raises nothing.

        Args:
            step: the step.
            policy: which steps stay in the store from now on; None for the same as before.
        """
        upload = UploadHandle(step)
        self._look_at_pins()
        with self._lock:
            self._policy = policy or self._policy
            self._latest = step
            self._waiting[step] = upload
            self._asked = True
            if self._thread is None:
                self._start()
        return upload

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` until the queue is idle. True if it is. Does not wait for uploads that failed."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def close(self, seconds: float) -> None:
        """Waits as `wait` does, then ends the upload that is under way. The next run continues it."""
        if not self.wait(seconds):
            logger.warning(
                "%s: an upload is still under way after %g s: it ends unfinished", self._remote.store.url, seconds
            )
        self._stop.set()
        _open.discard(self)

    def _start(self) -> None:
        # A daemon thread, because the interpreter would wait for others without limit. _finish_all waits with one.
        self._thread = threading.Thread(target=self._run, name="mcore_ckpt upload", daemon=True)
        _open.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system grants no more threads
            self._thread = None
            logger.warning("%s: no upload behind this commit: %s", self._remote.store.url, error)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._asked or self._stop.is_set():
                    self._thread = None
                    _open.discard(self)
                    return
                self._asked = False
            try:
                self._upload_missing()
            except Exception as error:
                reason = str(error) if isinstance(error, CheckpointError) else self._remote.store.redacted(error)
                logger.warning("the remote copy is behind, and is tried again behind the next commit: %s", reason)

    def _upload_missing(self) -> None:
        there = {step.step: step for step in self._remote.steps()}
        todo = self._todo(list(there.values()))
        for step, handle in list(self._waiting.items()):
            if step not in todo:
                self._give_up(step, handle, CheckpointError("older than those that are kept"))
        self._begun = {key: upload for key, upload in self._begun.items() if upload.manifest.step in todo}
        for step in todo:
            if self._asked or self._stop.is_set():
                return  # a newer step was committed and goes first; `_run` comes back for this one
            uploaded = self._upload(step, there.get(step, RemoteStep(step)))
            if uploaded is not None:
                seen, pins = self._look_at_pins(), dict(self._pins)
                tidy_up(self._remote, uploaded, self._begun, self._policy, pins, self._latest)
                self._pins = seen

    def _look_at_pins(self) -> dict[int, bool]:
        """Returns the pins of the local steps. Runs at each commit, after which an unpinned step may be deleted."""
        seen: dict[int, bool] = {}
        with suppress(OSError):
            seen = {status.step: status.pinned for status in steps.list_steps(self._root) if status.committed}
        self._pins = self._pins | seen
        return seen

    def _todo(self, there: list[RemoteStep]) -> list[int]:
        """Returns the steps to upload, the newest first: those committed here, and those that earlier runs left."""
        newest = max((step.step for step in there if self._role in step.committed), default=-1)
        local = [status for status in steps.list_steps(self._root) if self._role in status.committed]
        wanted = {status.step for status in local if status.is_complete and status.step > newest} | {*self._waiting}
        # A step that the policy would delete at once is not uploaded.
        both: dict[int, Judged] = {step.step: step for step in there}
        everywhere = [step for _, step in sorted((both | {step.step: step for step in local}).items())]
        wanted -= {step.step for step in too_old(everywhere, self._policy, self._latest)}
        return sorted(wanted, reverse=True)

    def _upload(self, step: int, there: RemoteStep) -> Manifest | None:
        """Uploads a step and returns its manifest; None if this step cannot be uploaded. Raises RemoteError."""
        handle = self._waiting.get(step, UploadHandle(step))
        started = time.monotonic()
        try:
            role_dir = _role_dir(self._root, step, self._role)
            attempt = read_manifest(role_dir).attempt
            with work_folders.kept_for_upload(role_dir, attempt):
                upload = Upload(self._remote.store, role_dir, self._stop)
                if not _is_there(upload.manifest, there):
                    upload = self._begun.setdefault(upload.key, upload)
                    upload.run()
        except RemoteError as error:
            handle.exception = error
            raise
        except (CheckpointNotFoundError, CheckpointCorruptError, OSError) as error:
            self._give_up(step, handle, error)
            return None
        self._begun.pop(upload.key, None)
        handle.finish(upload.manifest.nbytes, time.monotonic() - started)
        self._forget(step, handle)
        return upload.manifest

    def _give_up(self, step: int, handle: UploadHandle, error: Exception) -> None:
        handle.exception = CheckpointError(f"step {step} is not uploaded: {error}")
        self._forget(step, handle)
        logger.warning("%s: %s", self._remote.store.url, handle.exception)

    def _forget(self, step: int, handle: UploadHandle) -> None:
        with self._lock:
            # The same step may have been saved and committed again meanwhile.
            if self._waiting.get(step) is handle:
                del self._waiting[step]


def _role_dir(root: Path, step: int, role: str) -> Path:
    found = next((status for status in steps.list_steps(root) if status.step == step), None)
    return file_names.step_dir(root, step) / role if found is None else found.role_dir(role)


def _is_there(manifest: Manifest, there: RemoteStep) -> bool:
    found = there.found.get(manifest.role)
    return found is not None and found.attempt == manifest.attempt


# Keeps the queues alive: a trainer may drop its manager while an upload is under way.
_open: set[UploadQueue] = set()


@atexit.register
def _finish_all() -> None:
    until = time.monotonic() + deadlines.EXIT_WAIT_S
    for uploads in list(_open):
        uploads.close(max(0.0, until - time.monotonic()))
