"""UploadQueue beside the training: the thread, what is still to go, and what the trainer may learn of it."""

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
    """The upload of one committed checkpoint, as its handle shows it.

    Attributes:
        step: the step.
        exception: why the last try failed, or why there will be none; None if it has not failed. A store that has
            failed is tried again behind the next commit.
        nbytes: of the checkpoint's files; 0 until they are in the store.
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
        """Whether the checkpoint is in the store, whole."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is `done` within `timeout` seconds."""
        return self._done.wait(timeout)

    def finish(self, nbytes: int, seconds: float) -> None:
        self.exception, self.nbytes, self.seconds = None, nbytes, seconds
        self._done.set()


class UploadQueue:
    """Copies one role's checkpoints to a remote store, one after the other, on a thread that lives while there is work.

    Args:
        remote: the store.
        root: the folder of the local steps.
        role: whose checkpoints.
        policy: what is to stay there.
    """

    def __init__(self, remote: RemoteSteps, root: Path, role: str, policy: PreservationPolicy) -> None:
        self._remote = remote
        self._root = root
        self._role = role
        self._policy = policy
        self._lock = threading.Lock()
        self._waiting: dict[int, UploadHandle] = {}  # committed here, and not in the store yet
        self._begun: dict[str, Upload] = {}  # by folder: what a failed one has sent need not go again
        self._pins: dict[int, bool] = {}  # of steps that are here, or were when the store was told last
        self._latest = -1
        self._asked = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def committed(self, step: int, policy: PreservationPolicy | None = None) -> UploadHandle:
        """A checkpoint is there: it goes to the store, beside the training. Returns at once, raises nothing.

        `policy`: what is to stay there from now on; None: as before.
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
        """Whether nothing is under way any more within `seconds`. What has failed is not waited for."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def close(self, seconds: float) -> None:
        """Waits as `wait`, and then ends what is under way: the next run goes on with it."""
        if not self.wait(seconds):
            logger.warning(
                "%s: an upload is still under way after %g s: it ends unfinished", self._remote.store.url, seconds
            )
        self._stop.set()
        _open.discard(self)

    def _start(self) -> None:
        # A daemon, or the interpreter would wait for it without an end in sight: _finish_all does, with one.
        self._thread = threading.Thread(target=self._run, name="mcore_ckpt upload", daemon=True)
        _open.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # a system that grants no thread
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
        for step, told in list(self._waiting.items()):
            if step not in todo:
                self._give_up(step, told, CheckpointError("older than those that are kept"))
        self._begun = {key: upload for key, upload in self._begun.items() if upload.manifest.step in todo}
        for step in todo:
            if self._asked or self._stop.is_set():
                return  # a newer one has come meanwhile, and is worth more: this one's turn comes again
            uploaded = self._upload(step, there.get(step, RemoteStep(step)))
            if uploaded is not None:
                seen, pins = self._look_at_pins(), dict(self._pins)
                tidy_up(self._remote, uploaded, self._begun, self._policy, pins, self._latest)
                self._pins = seen

    def _look_at_pins(self) -> dict[int, bool]:
        """Of the steps that are here. At each commit, too: behind it one that was just unpinned may be deleted."""
        seen: dict[int, bool] = {}
        with suppress(OSError):
            seen = {status.step: status.pinned for status in steps.list_steps(self._root) if status.committed}
        self._pins = self._pins | seen
        return seen

    def _todo(self, there: list[RemoteStep]) -> list[int]:
        """Steps to upload, the newest first: those committed here, and what earlier runs have left."""
        newest = max((step.step for step in there if self._role in step.committed), default=-1)
        local = [status for status in steps.list_steps(self._root) if self._role in status.committed]
        wanted = {status.step for status in local if status.is_complete and status.step > newest} | {*self._waiting}
        # What the policy would delete at once need not go.
        both: dict[int, Judged] = {step.step: step for step in there}
        everywhere = [step for _, step in sorted((both | {step.step: step for step in local}).items())]
        wanted -= {step.step for step in too_old(everywhere, self._policy, self._latest)}
        return sorted(wanted, reverse=True)

    def _upload(self, step: int, there: RemoteStep) -> Manifest | None:
        """What is in the store now; None if this step cannot be. Raises RemoteError: so will be what comes after."""
        told = self._waiting.get(step, UploadHandle(step))
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
            told.exception = error
            raise
        except (CheckpointNotFoundError, CheckpointCorruptError, OSError) as error:
            self._give_up(step, told, error)
            return None
        self._begun.pop(upload.key, None)
        told.finish(upload.manifest.nbytes, time.monotonic() - started)
        self._forget(step, told)
        return upload.manifest

    def _give_up(self, step: int, told: UploadHandle, error: Exception) -> None:
        told.exception = CheckpointError(f"step {step} is not uploaded: {error}")
        self._forget(step, told)
        logger.warning("%s: %s", self._remote.store.url, told.exception)

    def _forget(self, step: int, told: UploadHandle) -> None:
        with self._lock:
            # Another save of the same step may have been committed meanwhile.
            if self._waiting.get(step) is told:
                del self._waiting[step]


def _role_dir(root: Path, step: int, role: str) -> Path:
    found = next((status for status in steps.list_steps(root) if status.step == step), None)
    return file_names.step_dir(root, step) / role if found is None else found.role_dir(role)


def _is_there(manifest: Manifest, there: RemoteStep) -> bool:
    found = there.found.get(manifest.role)
    return found is not None and found.attempt == manifest.attempt


# Keeps them alive: a trainer may have dropped its manager with an upload under way.
_open: set[UploadQueue] = set()


@atexit.register
def _finish_all() -> None:
    until = time.monotonic() + deadlines.EXIT_WAIT_S
    for uploads in list(_open):
        uploads.close(max(0.0, until - time.monotonic()))
