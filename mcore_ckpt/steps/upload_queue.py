"""Uploads committed checkpoints in the background, one after the other, on a separate thread.

Rank 0 alone sends the files of all ranks, with a few threads. The speed is limited by one node's network and one Python
process (some hundred MB/s). But the ranks need not communicate, so a rank that is late, dead or in another state does
no harm, and nothing in training depends on the upload. If every node sent its own files, each node would call
`Upload.run` for a part of the files, and rank 0 would wait for all nodes before `_check_all_there`. This would be worth
the effort if uploads took longer than the time between saves.

The commit of a checkpoint starts its upload, on a thread that ends when there is no more work. Neither training nor the
next save waits for the upload. The thread uploads complete steps of the local root that `max_to_keep` would keep. It
uploads such a step only if the step was committed after the store's newest step, or if this process has committed the
step and the store does not have it yet. The newest step goes first, and a step that is committed meanwhile goes before
the steps that still wait. So a store that is slower than the saves has gaps, but does not fall behind more and more. A
step that is being uploaded has a mark (`.{role}.uploading-...`), so no process deletes it. Otherwise, with
`max_to_keep=1`, a slow store would never get a whole step.

A request that fails is tried six times over half a minute. Then a warning is logged. After the next commit, whose
upload goes first, the failed upload is tried again, and sends only the files that have not arrived. A process that is
killed leaves an attempt without a manifest: the next upload of the role deletes this attempt.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.delivery import Delivery
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, RemoteError
from mcore_ckpt.events import Deleted, ErrorText, Failed, Uploaded
from mcore_ckpt.io.disk_space import Need
from mcore_ckpt.io.worker import Handle, NoThreadError, Worker
from mcore_ckpt.processes import emptied_in_child
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import work_folders
from mcore_ckpt.steps.remote_steps import OtherRunError, RemoteStep, RemoteSteps
from mcore_ckpt.steps.retention import PreservationPolicy, Step, too_old
from mcore_ckpt.steps.role_rules import rules_of_others
from mcore_ckpt.steps.runs import read_root_run
from mcore_ckpt.steps.upload import Upload, shortage_of, tidy_up
from mcore_ckpt.steps.worth import Weighed

logger = logging.getLogger(__name__)


class UploadHandle(Handle[bool]):
    """The upload of one committed checkpoint, for the trainer.

    The upload ends only when the whole checkpoint is in the store.

    The attribute `exception` says why the last try failed, or why the step is not uploaded at all. If the store failed,
    the upload is tried again after the next commit.

    Attributes:
        nbytes: the size of the checkpoint's files in bytes; 0 until the files are in the store.
        seconds: how long the successful try took; 0 until the files are in the store.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} is still being uploaded")
        self.step = step
        self.nbytes = 0
        self.seconds = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the upload is done, at most `timeout` seconds if given. Returns True if it is done."""
        return self._ended.wait(timeout)

    def has_failed(self, error: CheckpointError) -> None:
        """Notes why the last try failed, or why the step is not uploaded at all. Only the queue calls this method."""
        self._exception = error

    def finish(self, nbytes: int, seconds: float) -> None:
        """Marks the upload as done. Only the queue calls this method."""
        self._exception, self.nbytes, self.seconds = None, nbytes, seconds
        self.end(True)


class UploadQueue:
    """Uploads one role's checkpoints to a remote store, on a thread that runs only while there is work.

    `policy` says which steps stay in the store. `delivery` brings events to the listeners; None if there are no
    listeners.
    """

    def __init__(
        self, remote: RemoteSteps, root: Path, role: str, policy: PreservationPolicy, delivery: Delivery | None = None
    ) -> None:
        self._remote = remote
        self._root = root
        self._role = role
        self._policy = policy
        self._delivery = delivery or Delivery()
        self._lock = threading.Lock()
        self._waiting: dict[int, UploadHandle] = {}  # committed locally, not yet in the store
        self._begun: dict[str, Upload] = {}  # by folder in the store; a failed upload continues where it stopped
        self._pins: dict[int, bool] = {}  # for steps that are local now or were local at the last upload
        self._metrics: dict[int, Mapping[str, float]] = {}  # of the steps in `_pins`
        self._latest = -1
        self._asked = False
        self._warned = False
        # `must_finish` is False, because `_finish_all` waits for uploads at exit, but at most `EXIT_WAIT_S` seconds.
        self._uploads = Worker("mcore_ckpt upload", must_finish=False)
        self._looks_at_space = Worker("mcore_ckpt space", must_finish=False)
        self._stop = threading.Event()
        _open.add(self)

    def committed(self, step: int, policy: PreservationPolicy | None = None) -> UploadHandle:
        """Queues a checkpoint that was just committed. Returns immediately and raises nothing.

        `policy` says which steps stay in the store from now on; None keeps the previous policy.
        """
        upload = UploadHandle(step)
        self._look_at_pins()
        with self._lock:
            self._policy = policy or self._policy
            self._latest = step
            self._waiting[step] = upload
            self._asked = True
        try:
            self._uploads.add(self._upload_if_asked)
        except NoThreadError as error:
            logger.warning("%s: no upload after this commit: %s", self._remote.store.url, error)
        return upload

    def expect(self, need: Need) -> None:
        """Warns if a checkpoint that is about to be saved will not fit into the store. Returns immediately.

        The check runs on another thread, because a network file system that hangs must not hold up the training. At
        most one such thread runs. If the thread is still checking for an earlier save, it then checks for the newest
        save, too.
        """
        with suppress(NoThreadError):
            self._looks_at_space.add(partial(self._look_at_space, need), instead=True)

    def _look_at_space(self, need: Need) -> None:
        shortage = shortage_of(self._remote.store, need)
        if shortage is not None and not self._warned:
            logger.warning(
                "%s: the checkpoint that is being saved will not fit into the remote store: %s. It is saved "
                "locally. Delete files in the store",
                self._remote.store.url,
                shortage,
            )
        self._warned = shortage is not None

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` until no upload is under way.

        Returns True if no upload is under way. Failed uploads may be left.
        """
        return self._uploads.wait_at_most(seconds)

    def close(self, seconds: float) -> None:
        """Waits like `wait`, then stops an upload that is still under way.

        The next process of the training repeats that upload.
        """
        if not self.wait(seconds):
            logger.warning(
                "%s: an upload is still under way after %g s, and ends unfinished", self._remote.store.url, seconds
            )
        self._stop.set()
        _open.discard(self)

    def _upload_if_asked(self) -> None:
        """Uploads the missing steps, unless an earlier call has done so since the last commit."""
        with self._lock:
            if not self._asked or self._stop.is_set():
                return
            self._asked = False
        started = time.monotonic()
        try:
            self._upload_missing()
        except Exception as error:
            reason = str(error) if isinstance(error, CheckpointError) else self._remote.store.redacted(error)
            logger.warning("the remote copy is out of date, and is tried again after the next commit: %s", reason)
            self._tell_failed(self._latest, ErrorText.redacted(error, reason), time.monotonic() - started)

    def _upload_missing(self) -> None:
        own = read_root_run(self._root)
        try:
            if own is not None:
                self._remote.claim(own)
        except OtherRunError as error:
            for step, handle in list(self._waiting.items()):
                self._give_up(step, handle, error)
            return
        there = {step.step: step for step in self._remote.steps()}
        todo = self._todo(list(there.values()))
        for step, handle in list(self._waiting.items()):
            if step not in todo:
                self._give_up(step, handle, CheckpointError("it is older than the steps that are kept"))
        self._begun = {key: upload for key, upload in self._begun.items() if upload.manifest.step in todo}
        for step in todo:
            if self._asked or self._stop.is_set():
                return  # a newer step was committed: the next call uploads that step first, then the rest of `todo`
            uploaded = self._upload(step, there.get(step, RemoteStep(step)))
            if uploaded is not None:
                seen, pins = self._look_at_pins(), dict(self._pins)
                tidy_up(
                    self._remote,
                    uploaded,
                    self._begun,
                    self._too_old,
                    pins,
                    self._metrics,
                    self._tell_deleted,
                )
                self._pins = seen

    def _look_at_pins(self) -> dict[int, bool]:
        """Returns which local steps are pinned, and updates `_pins` and `_metrics`.

        Each commit calls this method, because retention may delete a step, with its pin and its metrics, after the
        commit.
        """
        seen: dict[int, bool] = {}
        with suppress(OSError):
            there = [status for status in steps.list_steps(self._root) if status.committed]
            seen = {status.step: status.pinned for status in there}
            self._metrics = {status.step: status.metrics for status in there}
        self._pins = self._pins | seen
        return seen

    def _too_old(self, statuses: Sequence[Step]) -> list[Step]:
        """Returns the steps that the rules of no role keep in the store.

        The step that was saved last stays even if, after a rollback, it is not the newest step.
        """
        try:
            others = rules_of_others(self._root, self._role)
        except OSError as error:
            logger.warning("old steps in the store stay until the next upload: %s", error)
            return []
        return too_old(statuses, self._policy, self._latest, others=others)

    def _todo(self, there: list[RemoteStep]) -> list[int]:
        """Returns the steps to upload, the newest first.

        These are the steps that this process has committed, and the steps that earlier processes have not uploaded: the
        complete local steps that were committed after all steps of this role in the store.
        """
        # Look at the last commit first, and stop at the first step that has all its files.
        ours = sorted((each for each in there if self._role in each.committed), key=lambda each: -each.commit.number)
        last = next((each.commit.number for each in ours if each.has(self._role)), -1)
        local = [status for status in steps.list_steps(self._root) if self._role in status.committed]
        wanted = {each.step for each in local if each.is_complete and each.commit.number > last} | {*self._waiting}
        # A step that the policy would delete immediately after the upload is not uploaded.
        both: dict[int, Weighed] = {step.step: step for step in there}
        everywhere = [step for _, step in sorted((both | {step.step: step for step in local}).items())]
        wanted -= {step.step for step in self._too_old(everywhere)}
        number = {status.step: status.commit.number for status in local}
        return sorted(wanted, key=lambda step: (number.get(step, 0), step), reverse=True)

    def _upload(self, step: int, there: RemoteStep) -> Manifest | None:
        """Uploads this role's checkpoint of a step and returns its manifest; None if the upload is not possible.

        Raises RemoteError: the store failed.
        """
        handle = self._waiting.get(step, UploadHandle(step))
        started = time.monotonic()
        try:
            role_dir = _role_dir(self._root, step, self._role)
            attempt = read_manifest(role_dir).attempt
            with work_folders.kept_for_upload(role_dir, attempt):
                upload = Upload(self._remote.store, role_dir, self._stop)
                if not _is_there(upload.manifest, there):
                    begun = self._begun.get(upload.key)
                    if begun is not None and begun.manifest.files == upload.manifest.files:
                        upload = begun  # otherwise retention has removed the optimizer since the first try
                    self._begun[upload.key] = upload
                    upload.run()
        except RemoteError as error:
            handle.has_failed(error)
            raise
        except (CheckpointNotFoundError, CheckpointCorruptError, OSError) as error:
            self._give_up(step, handle, error)
            return None
        self._begun.pop(upload.key, None)
        seconds = time.monotonic() - started
        self._tell_uploaded(step, upload, seconds)
        handle.finish(upload.manifest.nbytes, seconds)
        self._forget(step, handle)
        return upload.manifest

    def _give_up(self, step: int, handle: UploadHandle, error: Exception) -> None:
        failure = CheckpointError(f"step {step} is not uploaded: {self._remote.store.plain(error)}")
        handle.has_failed(failure)
        self._forget(step, handle)
        logger.warning("%s: %s", self._remote.store.url, failure)
        self._tell_failed(step, ErrorText.redacted(failure, str(failure)), 0.0)

    def _tell_uploaded(self, step: int, upload: Upload, seconds: float) -> None:
        path = self._remote.store.url_of(upload.key)
        self._tell(Uploaded, step, path, nbytes=upload.manifest.nbytes, seconds=seconds)

    def _tell_deleted(self, step: int, seconds: float) -> None:
        path = self._remote.store.url_of(file_names.step_name(step))
        self._tell(Deleted, step, path, seconds=seconds, place="remote")

    def _tell_failed(self, step: int, error: ErrorText, seconds: float) -> None:
        self._tell(Failed, step, self._remote.store.url, operation="upload", error=error, seconds=seconds)

    def _tell(self, event: type[Uploaded | Deleted | Failed], step: int, path: str, **more: Any) -> None:
        self._delivery.post(event(step=step, role=self._role, rank=0, path=path, time=time.time(), **more))

    def _forget(self, step: int, handle: UploadHandle) -> None:
        with self._lock:
            # If the step was committed again meanwhile, a new handle is in the place of this handle, and must stay.
            if self._waiting.get(step) is handle:
                del self._waiting[step]


def _role_dir(root: Path, step: int, role: str) -> Path:
    found = next(iter(steps.list_steps(root, step)), None)
    return file_names.step_dir(root, step) / role if found is None else found.role_dir(role)


def _is_there(manifest: Manifest, there: RemoteStep) -> bool:
    found = there.found.get(manifest.role)
    return found is not None and found.attempt == manifest.attempt and there.has(manifest.role)


# Weak references are enough, because a running thread keeps its queue alive, even if a trainer has dropped its manager.
_open: WeakSet[UploadQueue] = emptied_in_child(WeakSet())


@atexit.register
def _finish_all() -> None:
    until = time.monotonic() + deadlines.EXIT_WAIT_S
    for uploads in list(_open):
        uploads.close(max(0.0, until - time.monotonic()))
