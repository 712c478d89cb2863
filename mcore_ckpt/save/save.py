"""Runs one save, from the trainer's objects to a committed checkpoint.

It runs on three threads. Each line gives a thread, a method of `Save`, and the rooms that do the work:

    trainer's thread   Save(...)   state: read the small values, plan which shard is written where in which file
                       begin       capture: copy the shards into images of the files in host memory
    save's thread      finish      formats: write the files; checkpoint: build the manifest; steps: commit
                       upload      steps: queue the copy to the remote store
    deletion's thread  after_commit    steps: delete old steps
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint.manifest import Manifest, WrittenFile
from mcore_ckpt.errors import HungDiskError
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.interrupts import is_interrupt
from mcore_ckpt.io import _native
from mcore_ckpt.io.access import top_mode
from mcore_ckpt.io.device_waits import wait_for_gpu
from mcore_ckpt.io.disk_watch import Work
from mcore_ckpt.io.files import sync_names
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.save.capture import Capture, capture_in_place
from mcore_ckpt.save.context import SaveContext
from mcore_ckpt.save.copies import CopyHandle
from mcore_ckpt.save.drain import DrainHandle
from mcore_ckpt.save.group_lists import NO_GROUPS, keys_to_save
from mcore_ckpt.save.guards import why_not_lazy
from mcore_ckpt.save.hf_export import completed, export_together
from mcore_ckpt.save.host_images import ReservedImages
from mcore_ckpt.save.need import need_of_rank
from mcore_ckpt.save.new_manifest import build_manifest
from mcore_ckpt.save.old_steps import OldSteps, find_old_steps
from mcore_ckpt.save.plan import SavePlan, saves_model
from mcore_ckpt.save.rank_reports import rank_report
from mcore_ckpt.save.rank_times import SpanInSeconds, timeline_of, with_export
from mcore_ckpt.save.replica_check import DifferentReplicas, ReplicaSamples, compare_replicas, take_samples
from mcore_ckpt.save.save_events import SaveEvents
from mcore_ckpt.save.save_report import SaveReport
from mcore_ckpt.save.save_times import SaveTimes
from mcore_ckpt.save.small_files import SmallFiles, read_steps, sizes_of_assets
from mcore_ckpt.save.tracking import follow_nodes
from mcore_ckpt.state.main_weights import NO_WEIGHTS, is_gathered_by_megatron
from mcore_ckpt.state.model import sync_parameters
from mcore_ckpt.steps import tracker
from mcore_ckpt.steps.commit import remove_folder, remove_if_empty
from mcore_ckpt.steps.node_transaction import NodeAttempt, commit_on_nodes, make_staging
from mcore_ckpt.steps.retention import PreservationPolicy
from mcore_ckpt.steps.transaction import Attempt, await_opening, check_seen, commit_together
from mcore_ckpt.steps.upload_queue import UploadHandle

logger = logging.getLogger(__name__)

_NOT_READY = (
    "the disk hangs, and the host memory for a copy of the state is not ready yet, so nothing is saved. The training "
    "goes on"
)


class Save:
    """One save of this rank. Call `begin`, `finish`, `upload` and `after_commit`, in this order.

    The constructor checks and plans. What can fail on a single rank fails there, before the ranks' first round.

    Args:
        context: what the saves of the manager share.
        step: the step to save.
        extra_state: the trainer's own state, or None.
        roles: the roles that the step consists of.
        called: when the trainer called `save` (time.perf_counter()). That call may have waited for an earlier save.
        policy: which steps stay after the commit; None if the checkpoint is not part of a step below the root.
        events: tells the listeners of this save. Its beginning has been told.

    Raises:
        UnsupportedError: something cannot be saved completely.
        MemoryError: there is not enough memory for a copy of the state.
    """

    def __init__(
        self,
        context: SaveContext,
        step: int,
        extra_state: Mapping[str, Any] | None,
        roles: tuple[str, ...],
        called: float,
        policy: PreservationPolicy | None,
        events: SaveEvents,
    ) -> None:
        self._events = events
        self._times = SaveTimes(called)
        self._context, self._trainer, self._policy = context, context.trainer, policy
        self.step, self._roles = step, roles
        self._small = SmallFiles(self._trainer, extra_state)
        self._plan = context.planner.plan(self._trainer)
        self._nbytes = sum(plan.nbytes for plan in self._plan.files)
        self.need = need_of_rank(self._trainer, self._plan.files, self._small.sizes(), context.assets)
        self._is_async = self._trainer.config.async_save
        # Weights that are made on the GPU come in pieces, and the next piece takes the place of the last one.
        self._has_images = self._times.copies_first = self._is_async or self._plan.weights.is_cuda
        self._images = self._reserve_images()
        self._plan = self._plan.with_own_weights(self._without_image())
        self._weights_copied: _native.DeviceEvent | None = None
        # Reading one step number per parameter takes a while. Without images the state does not change until the save
        # ends, so the numbers can be read later, while the disk is writing.
        self._steps = read_steps(self._trainer) if self._has_images else None
        self._group_keys = keys_to_save(self._trainer)
        self._groups = NO_GROUPS
        self._samples = ReplicaSamples()
        self._reads_gpu = False
        self._different: tuple[DifferentReplicas, ...] = ()
        self._attempt: Attempt | None = None
        self._capture: Capture | Exception | None = None
        self._writer: FileWriter | None = None
        self._device_timeout_s = self._trainer.config.timeout_s
        self._old_steps: OldSteps | None = None
        self._stamped: Manifest | None = None  # on rank 0
        self._on_nodes: NodeAttempt | None = None
        self._retired: list[Path] = []
        self._in_root: Path | None = None
        self._start_drain: Callable[[], DrainHandle] | None = None

    def begin_on_nodes(self, on_nodes: NodeAttempt, in_root: Path, start_drain: Callable[[], DrainHandle]) -> None:
        """Does what `begin` does, for a save into the fast tier.

        Args:
            on_nodes: the save.
            in_root: where the step is in the root, if it is durable.
            start_drain: begins to copy the committed step to the root.
        """
        assert self._context.fast is not None
        self._on_nodes, self._in_root, self._start_drain = on_nodes, in_root, start_drain
        self._context.fast.begun(on_nodes.save_count, on_nodes.is_durable)
        with self._context.fast.copies.paused():
            self.begin(on_nodes.attempt)

    def begin(self, attempt: Attempt) -> None:
        """Copies the state. If the save is async, training may continue when this returns.

        Files that have no image, because host memory is still being prepared, are written to the disk before this
        returns.

        Raises nothing but what a signal handler raises, because the other ranks are on their way to `finish`. There
        this rank reports its failure.
        """
        self._attempt = attempt
        try:
            if self._plan.on_host or self._plan.weights.reads_host:
                # verl (0.9.1, `offload_megatron_optimizer`) and megatron's `offload_to_cpu` do not wait for their
                # copies, so a copy to the host memory that is read now may still be under way.
                wait_for_gpu(self._trainer.config.timeout_s)
            # Before all that may fail on one rank alone, because the ranks do it together: those that gather weights
            # would wait for one that does not.
            self._complete_weights()
            self._copy_state(attempt)
            if self._has_images:
                # The trainer may offload its tensors now.
                self._plan = replace(self._plan, tensors=(), weights=NO_WEIGHTS, copies={})
        except Exception as error:
            if is_interrupt(error):
                raise
            self._capture = error
            self._plan = replace(self._plan, weights=NO_WEIGHTS)
        self._times.mark("begun")

    def finish(self, stall_s: float | None = None) -> SaveReport:
        """Writes this rank's files, and commits the checkpoint together with the other ranks.

        Args:
            stall_s: how long the trainer was held up, in seconds. None: the trainer waits until this returns.

        Raises:
            CheckpointError: the save failed. All ranks raise the same type, and the previous checkpoint stays.
        """
        try:
            report = self._write_and_commit(stall_s)
        except BaseException as error:
            self._events.failed(error, self._times.phases(self._events.phase, time.perf_counter()))
            raise
        if self._on_nodes is None and self._trainer.agreement.is_coordinator and self._policy is not None:
            self._old_steps = self._find_old_steps(self._policy)
        return report

    def _find_old_steps(self, policy: PreservationPolicy) -> OldSteps | None:
        role_dir = self._opened_attempt.role_dir
        try:
            return self._context.commits.runner.run(lambda: find_old_steps(self._context, role_dir, self.step, policy))
        except HungDiskError as error:
            logger.warning("old steps stay until the next save: %s", error)
            return None

    def _write_and_commit(self, stall_s: float | None) -> SaveReport:
        attempt = self._opened_attempt
        written: list[WrittenFile] = []

        def write(staging: Path) -> Record:
            written.extend(self._write(staging))
            assert self._steps is not None
            self._groups = self._plan.groups.listed(self._group_keys)
            names = self._context.names.to_send(self._plan.files, self._trainer.agreement.rank, self._groups)
            times = self._times.rank_times(stall_s, self._bytes_of(written))
            return rank_report(
                self._trainer,
                written,
                self._plan.files,
                names,
                self._steps,
                self._groups.holds,
                self._replicas_record(),
                times,
            )

        def write_and_export(staging: Path) -> Record:
            exported = export_together(
                self._context.commits, self._trainer, staging, attempt.number, lambda: write(staging), self._manifest
            )
            self._times.mark("exported")
            written.extend(exported)
            return {"files": [asdict(file) for file in exported], "exported": self._times.since_call("exported")}

        exports = "hf_model" in self._trainer.config.save_contents
        commits, topic = self._context.commits, f"saving step {self.step} of {self._trainer.role}"
        try:
            await_opening(commits, topic, attempt)
            if self._on_nodes is not None:
                assert self._context.fast is not None
                commit_on_nodes(commits, topic, attempt, self._context.fast.tier, write, self._manifest)
            else:
                commit_together(
                    commits,
                    topic,
                    attempt,
                    write_and_export if exports else write,
                    self._manifest_with_export if exports else self._manifest,
                    self._move_tracker,
                    self._keep_lock,
                )
        finally:
            self._stop_writing()
            self._capture = None  # it keeps the host memory alive, which a larger buffer may replace from now on
        if self._stamped is not None:
            self._context.history.committed(self._stamped)
        self._context.names.mark_sent([*self._plan.files, self._groups])
        if self._trainer.agreement.is_coordinator:
            self._context.assets.update(sizes_of_assets(written))
        return self._report(stall_s, self._bytes_of(written))

    def spread(self) -> tuple[CopyHandle | None, DrainHandle | None]:
        """Begins to copy a committed step of the fast tier to other nodes and, if it is durable, to the root.

        Returns (None, None) without a fast tier.
        """
        on_nodes, fast = self._on_nodes, self._context.fast
        if on_nodes is None or fast is None:
            return None, None
        assert self._start_drain is not None
        assert self._in_root is not None
        if self._trainer.agreement.is_coordinator:
            check_root = self._context.lock.check_root
            follow_nodes(self._trainer, fast.tier, self.step, self._in_root, check_root)
        fast.committed(self.step, on_nodes.attempt.number, on_nodes.save_count)
        copies = fast.copies.add(self.step, on_nodes.attempt)
        if fast.tier.is_lead:
            self._retired = fast.retire_old(self.step)
        return copies, self._start_drain() if on_nodes.is_durable else None

    def upload(self) -> UploadHandle | None:
        """Queues the upload of the committed checkpoint to the remote store.

        Returns None without a store, on all ranks except rank 0, and if the checkpoint is not part of a step.
        """
        uploads, policy = self._context.uploads, self._policy
        if uploads is None or policy is None or self._on_nodes is not None:
            return None
        return uploads.committed(self.step, policy if self._trainer.config.prune_remote else None)

    @property
    def deletes(self) -> bool:
        """True if old steps are to be deleted after the commit. Known when `finish` has returned."""
        return self._old_steps is not None and bool(self._old_steps.found)

    def after_commit(self) -> None:
        """Deletes old steps. This may take long, so it begins only when all ranks know of the commit."""
        for folder in self._retired:
            remove_folder(folder)
            remove_if_empty(folder.parent)
        if self._old_steps is not None:
            self._old_steps.delete()

    def limit_device_wait(self, seconds: float) -> None:
        """Waits for a GPU for at most so many seconds from now on. An exiting interpreter calls it."""
        self._device_timeout_s = seconds
        if self._writer is not None:
            self._writer.limit_device_wait(seconds)

    def progress(self) -> tuple[int, int]:
        """Returns how many bytes of tensors this rank has written, and how many it must write in all."""
        return (0 if self._writer is None else self._writer.progress()), self._nbytes

    # -- capture --------------------------------------------------------------------------------------------

    def _copy_state(self, attempt: Attempt) -> None:
        """Copies the tensors, or writes those that have no image. No rank waits for another one."""
        if self._on_nodes is not None:
            self._context.folder_lock.check_root()
            make_staging(attempt, top_mode(self._trainer.config.shared_with_group))
        self._samples = take_samples(
            self._plan.replicated, attempt.number, self._trainer.config.verify_replicas, self._plan.copies
        )
        self._reads_gpu = any(tensor.is_cuda for members in self._plan.tensors for tensor in members.tensors)
        self._times.mark("planned")
        self._capture = self._captured()
        if self._plan.on_gpu and not self._has_images:
            # Threads read the tensors, with no stream that would put them behind the work of the training, and behind
            # that of the capture: strided tensors are copied in rows.
            wait_for_gpu(self._trainer.config.timeout_s)
        self._times.mark("captured")
        if self._is_async and len(self._images.files) < len(self._plan.files):
            self._write_in_place(attempt)
        if self._is_async and not self._plan.on_gpu:
            self._events.captured(time.perf_counter(), self._nbytes, time.perf_counter() - self._times["planned"])

    def _write_in_place(self, attempt: Attempt) -> None:
        """Writes the files that have no image, while the trainer waits. Raises HungDiskError if the disk hangs."""
        if attempt.is_late:
            raise HungDiskError(f"{attempt.staging}: {_NOT_READY}")
        disk = self._context.commits.runner
        writing = disk.start(lambda: self._start_writing(attempt.staging).wait_for_sources())
        if not writing.wait(deadlines.DISK_PATIENCE_S):
            disk.leave(writing)
            raise HungDiskError(f"{attempt.staging}: {_NOT_READY}")
        writing.result()

    def _complete_weights(self) -> None:
        """Gathers the weights that this rank has only in part, if they are saved. All ranks call it together.

        Those that are made from main parameters are copied at once, because all of them need too much memory.
        """
        chunks, plan = self._trainer.chunks, self._plan
        if saves_model(self._trainer):
            weights, copied = plan.weights, _part_of(plan, self._images.files)
            sync_parameters([each for each in chunks if is_gathered_by_megatron(each)] if weights.pieces else chunks)
            images = self._context.host_images
            self._weights_copied = images.copy_weights(weights, copied.files, copied.tensors, self._images.buffer)
            # The trainer needs the memory now.
            self._plan = replace(plan, weights=NO_WEIGHTS)

    def _without_image(self) -> list[int]:
        images = set(self._images.files)
        return [number for number in range(len(self._plan.files)) if number not in images]

    def _reserve_images(self) -> ReservedImages:
        images, files = self._context.host_images, self._plan.files
        if not self._has_images or not files:  # a rank may write small files alone
            return ReservedImages(None, ())
        if self._plan.on_gpu:
            return ReservedImages(images.reserve(files), tuple(range(len(files))))
        return images.reserve_ready(files)

    def _captured(self) -> Capture:
        """Copies the tensors of files that have an image. Other files are written directly from their tensors."""
        plan = self._plan
        in_place = _part_of(plan, self._without_image())
        capture = capture_in_place(in_place.files, in_place.tensors)
        # Drop the reference in `_images`, so that a larger buffer can replace this one once the capture is dropped.
        buffer, self._images = self._images.buffer, replace(self._images, buffer=None)
        if buffer is None:
            return capture
        copied = _part_of(plan, self._images.files)
        images, weights = self._context.host_images, self._weights_copied
        copies = images.capture(copied.files, copied.tensors, buffer, self._lazy(), weights)
        # The files that are written in place come first, because the trainer may be waiting for them.
        return Capture((*capture.writes, *copies.writes), copies.seconds)

    def _lazy(self) -> Sequence[tuple[int, int]] | None:
        """Returns the argument `lazy` of `HostImages.capture`."""
        if not self._plan.on_gpu:
            return None
        is_lazy = self._trainer.config.async_mode == "lazy" and why_not_lazy(self._trainer) is None
        return self._plan.buffers if is_lazy else None

    # -- write ----------------------------------------------------------------------------------------------

    def _start_writing(self, staging: Path) -> FileWriter:
        self._context.folder_lock.check_root()
        check_seen(staging)
        assert isinstance(self._capture, Capture), "begin comes first"
        self._times.mark("writing")
        self._writer = FileWriter(staging, self._capture.writes, self._context.commits, self._device_timeout_s)
        self._writer.limit_device_wait(self._device_timeout_s)  # it may have changed meanwhile, at the exit
        self._writer.start()
        return self._writer

    def _stop_writing(self) -> None:
        """Waits until no thread writes any more, unless the disk hangs."""
        if self._writer is not None:
            Work(self._writer.close, self._device_timeout_s).wait(deadlines.DISK_PATIENCE_S)

    def _write(self, staging: Path) -> list[WrittenFile]:
        """Writes this rank's files durably."""
        if isinstance(self._capture, Exception):
            raise self._capture
        writer = self._writer or self._start_writing(staging)
        # Write the small files while the disk is writing the large ones.
        written = self._small.write(staging)
        if self._steps is None:
            self._steps = read_steps(self._trainer)
        written += writer.finish()
        self._times.copy = copy = self._copy_span(writer.times()[0])
        # Each rank syncs the names that it may have made. On some shared file systems (CephFS with `wsync` off), a sync
        # on another host would not do that.
        sync_names(staging, {*(plan.path for plan in self._plan.files), *(file.path for file in written)})
        self._context.folder_lock.check_root()
        now = self._times.mark("written")
        if not self._is_async or self._plan.on_gpu:
            self._events.captured(copy[1], self._nbytes, copy[1] - copy[0])
        self._events.written(now, self._bytes_of(written), now - self._times["writing"])
        return written

    def _replicas_record(self) -> Record:
        """Returns what rank 0 compares with what other ranks have (`compare_replicas`)."""
        assert self._writer is not None
        # Samples that come from a GPU were queued before the copies of tensors, which have been written. A rank that
        # copies none, or only weights that it has made before, has not waited for the samples.
        has_arrived = self._reads_gpu
        mended = [(each.tensor, each.other, each.stored) for each in self._writer.mended]
        return {"crcs": self._samples.to_record(has_arrived), "names": self._samples.names(), "mended": mended}

    # -- commit, on rank 0 ----------------------------------------------------------------------------------

    def _manifest(self, records: Sequence[Record]) -> Manifest:
        self._keep_lock()
        attempt, names = self._opened_attempt, self._context.names
        manifest = build_manifest(
            self._trainer,
            names,
            attempt.staging,
            self._small.common,
            self._group_keys,
            self.step,
            self._roles,
            attempt.number,
            records,
            0 if self._on_nodes is None else self._on_nodes.save_count,
        )
        self._different = compare_replicas([record["replicas"] for record in records])
        self._context.replica_warnings.tell(self._different)
        manifest = self._stamped = self._context.history.stamp(manifest, attempt.role_dir)
        # Last, because the commit counts up to here.
        return replace(manifest, save_timeline=timeline_of(records, self._times.commit_span("written")))

    def _manifest_with_export(self, records: Sequence[Record]) -> Manifest:
        self._keep_lock()
        manifest = completed(self._trainer, self._opened_attempt.staging, records)
        assert manifest.save_timeline is not None, "_manifest has made it"
        timeline = with_export(manifest.save_timeline, records, self._times.commit_span("exported"))
        return replace(manifest, save_timeline=timeline)

    def _keep_lock(self) -> None:
        """Raises LockedError if another trainer has taken over the lock. Then this save must not be committed."""
        self._context.folder_lock.take(patience_s=0)

    def _move_tracker(self) -> None:
        if self._policy is not None:
            tracker.move_tracker(self._trainer.root, self.step, seen=self._opened_attempt.role_dir)

    # -- report ---------------------------------------------------------------------------------------------

    @property
    def _opened_attempt(self) -> Attempt:
        assert self._attempt is not None, "begin comes first"
        return self._attempt

    def _bytes_of(self, written: Sequence[WrittenFile]) -> int:
        """Returns how many bytes this rank has written, with its parts of files that several ranks write together."""
        return self._nbytes + sum(file.size for file in written if file.index is None)

    def _copy_span(self, last_arrived: float) -> SpanInSeconds:
        """Returns when the copy began and ended (time.perf_counter()).

        `last_arrived` is the number of seconds from the start of writing until the writer had all bytes.
        """
        assert isinstance(self._capture, Capture)
        planned, writing = self._times["planned"], self._times["writing"]
        if not self._has_images:
            return writing, writing + last_arrived
        if self._plan.on_gpu and last_arrived:
            return planned, writing + last_arrived
        is_copied = len(self._images.files) == len(self._plan.files)
        return planned, planned + self._capture.seconds if is_copied else self._times["begun"]

    def _report(self, stall_s: float | None, nbytes: int) -> SaveReport:
        now = time.perf_counter()
        report = self._times.report(self.step, self._opened_attempt.role_dir, nbytes, stall_s, now)
        report = replace(report, different_replicas=tuple(map(str, self._different)))
        self._events.committed(now, nbytes, report.stall_s, self._times.phases(self._events.phase, now))
        return report


def _part_of(plan: SavePlan, files: Sequence[int]) -> SavePlan:
    """Returns the part of a plan that is about the files with the given numbers."""
    return replace(
        plan, files=tuple(plan.files[number] for number in files), tensors=tuple(plan.tensors[n] for n in files)
    )
