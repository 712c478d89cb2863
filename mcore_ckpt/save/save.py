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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, WrittenFile
from mcore_ckpt.checkpoint.plain_files import check_plain, pickle_unchecked, write_plain
from mcore_ckpt.delivery import Delivery
from mcore_ckpt.events import Deleted
from mcore_ckpt.formats.huggingface.assets import save_assets, written_assets
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.io.files import sync_names
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.save.capture import Capture, capture_in_place
from mcore_ckpt.save.hf_export import completed, export_together
from mcore_ckpt.save.host_images import HostImages, ReservedImages
from mcore_ckpt.save.need import need_of_rank
from mcore_ckpt.save.new_manifest import build_manifest, read_common
from mcore_ckpt.save.plan import SavePlan, SavePlanner, saves_model
from mcore_ckpt.save.rank_reports import TensorNames, rank_report
from mcore_ckpt.save.rank_times import SpanInSeconds, timeline_of, with_export
from mcore_ckpt.save.save_events import SaveEvents
from mcore_ckpt.save.save_report import SaveReport
from mcore_ckpt.save.save_times import SaveTimes
from mcore_ckpt.state.main_weights import NO_WEIGHTS, is_gathered_by_megatron
from mcore_ckpt.state.model import gradients_share_memory, sync_parameters
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import read_step
from mcore_ckpt.state.plain import to_plain
from mcore_ckpt.state.rng import read_rng
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import tracker
from mcore_ckpt.steps.listing import StepStatus, list_steps
from mcore_ckpt.steps.retention import PreservationPolicy, delete_step, too_old
from mcore_ckpt.steps.room import RoomWatch, Saved
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.transaction import Attempt, check_seen, commit_together
from mcore_ckpt.steps.upload_queue import UploadHandle, UploadQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlainState:
    """The small part of the state, as it was when the save was requested.

    Attributes:
        files: this rank's small files by path, each with its kind and its bytes. The bytes have not been checked yet.
        common: the state that all ranks share (`read_common`), on rank 0.
    """

    files: dict[str, tuple[str, bytes]]
    common: dict[str, Any]

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of the small files by path. The numbers of steps, which are not in `common`, add little."""
        sizes = {path: len(data) for path, (_, data) in self.files.items()}
        return sizes | ({file_names.COMMON_FILE: len(pickle_unchecked(self.common))} if self.common else {})


@dataclass(frozen=True, eq=False)
class SaveContext:
    """The objects that all saves of one manager share.

    Attributes:
        trainer: the objects to save, and this rank's place.
        commits: this rank's agreement for rounds on the thread that finishes a save. The trainer's thread has an
            agreement of its own (`trainer.agreement`), because a wait blocks the store client of its agreement.
        host_images: the host memory for copies of the state, and the copies from the GPU to it.
        lock: the lock on the role. Only rank 0 uses it.
        uploads: the queue of uploads to the remote store; None without a store, and on all ranks except rank 0.
        room: foresees whether the next save will fit. Only rank 0 uses it.
        delivery: brings events to the listeners.
        planner: makes the plan of each save.
        names: the tensor names that rank 0 already knows.
        assets: the sizes of the files beside the HuggingFace weights at the last save, by path. Only rank 0 has them.
    """

    trainer: Trainer
    commits: Agreement
    host_images: HostImages
    lock: TrainerLock
    uploads: UploadQueue | None
    room: RoomWatch
    delivery: Delivery
    planner: SavePlanner = field(default_factory=SavePlanner)
    names: TensorNames = field(default_factory=TensorNames)
    assets: dict[str, int] = field(default_factory=dict)


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
        self._plain = _read_plain(self._trainer, extra_state)
        self._plan = context.planner.plan(self._trainer)
        self._nbytes = sum(plan.nbytes for plan in self._plan.files)
        self.need = need_of_rank(self._trainer, self._plan.files, self._plain.sizes(), context.assets)
        self._is_async = self._trainer.config.async_save
        self._has_images = self._times.copies_first = self._is_async or self._plan.on_gpu
        self._images = self._reserve_images()
        # Reading one step number per parameter takes a while. Without images the state does not change until the save
        # ends, so the numbers can be read later, while the disk is writing.
        self._steps = _read_steps(self._trainer) if self._has_images else None
        self._attempt: Attempt | None = None
        self._capture: Capture | Exception | None = None
        self._writer: FileWriter | None = None
        self._old_steps: list[StepStatus] = []
        self._saved: Saved | None = None

    def begin(self, attempt: Attempt) -> None:
        """Copies the state. If the save is async, training may continue when this returns.

        Files that have no image, because host memory is still being prepared, are written to the disk before this
        returns.

        Raises nothing, because the other ranks are on their way to `finish`. There this rank reports its failure.
        """
        self._attempt = attempt
        try:
            if (self._plan.on_host or self._plan.weights.buckets) and torch.cuda.is_available():
                # verl (0.9.1, `offload_megatron_optimizer`) and megatron's `offload_to_cpu` do not wait for their
                # copies, so a copy to the host memory that is read now may still be under way.
                torch.cuda.synchronize()
            self._complete_weights()
            self._times.mark("planned")
            self._capture = self._captured()
            self._times.mark("captured")
            if self._is_async and len(self._images.files) < len(self._plan.files):
                self._start_writing(attempt.staging).wait_for_sources()
            if self._is_async and not self._plan.on_gpu:
                self._tell_captured(time.perf_counter(), time.perf_counter() - self._times["planned"])
            if self._has_images:
                # The trainer may offload its tensors now, and needs the memory of weights made from main parameters.
                self._plan = replace(self._plan, tensors=(), weights=NO_WEIGHTS)
        except Exception as error:
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
        self._find_old_steps()
        return report

    def _write_and_commit(self, stall_s: float | None) -> SaveReport:
        attempt = self._opened_attempt
        written: list[WrittenFile] = []

        def write(staging: Path) -> Record:
            written.extend(self._write(staging))
            assert self._steps is not None
            names = self._context.names.to_send(self._plan.files, self._trainer.agreement.rank)
            times = self._times.rank_times(stall_s, self._bytes_of(written))
            return rank_report(self._trainer, written, self._plan.files, names, self._steps, times)

        def write_and_export(staging: Path) -> Record:
            exported = export_together(
                self._context.commits, self._trainer, staging, attempt.number, lambda: write(staging), self._manifest
            )
            self._times.mark("exported")
            written.extend(exported)
            return {"files": [asdict(file) for file in exported], "exported": self._times.since_call("exported")}

        exports = "hf_model" in self._trainer.config.save_contents
        try:
            commit_together(
                self._context.commits,
                f"saving step {self.step} of {self._trainer.role}",
                attempt,
                write_and_export if exports else write,
                self._manifest_with_export if exports else self._manifest,
                self._move_tracker,
            )
        finally:
            if self._writer is not None:
                self._writer.close()
            self._capture = None  # it keeps the host memory alive, which a larger buffer may replace from now on
        self._context.names.mark_sent(self._plan.files)
        if self._trainer.agreement.is_coordinator:
            self._context.assets.update(_sizes_of_assets(written))
        return self._report(stall_s, self._bytes_of(written))

    def upload(self) -> UploadHandle | None:
        """Queues the upload of the committed checkpoint to the remote store.

        Returns None without a store, on all ranks except rank 0, and if the checkpoint is not part of a step.
        """
        uploads, policy = self._context.uploads, self._policy
        if uploads is None or policy is None:
            return None
        return uploads.committed(self.step, policy if self._trainer.config.prune_remote else None)

    @property
    def deletes(self) -> bool:
        """True if old steps are to be deleted after the commit. Known when `finish` has returned."""
        return bool(self._old_steps)

    def after_commit(self) -> None:
        """Deletes old steps. Then `RoomWatch` looks, on a thread of its own, whether the next save will fit.

        This may take long, so it begins only when all ranks know of the commit.
        """
        for status in self._old_steps:
            started = time.perf_counter()
            obstacle = delete_step(status)
            if obstacle is not None:
                logger.info("step %d is too old, but stays for now: %s", status.step, obstacle)
            else:
                self._tell_deleted(status, time.perf_counter() - started)
        if self._saved is not None:
            self._context.room.foresee(self._saved)

    def progress(self) -> tuple[int, int]:
        """Returns how many bytes of tensors this rank has written, and how many it must write in all."""
        return (0 if self._writer is None else self._writer.progress()), self._nbytes

    # -- capture --------------------------------------------------------------------------------------------

    def _complete_weights(self) -> None:
        """Gathers the weights that this rank has only in part, if they are saved. All ranks call it together."""
        chunks, weights = self._trainer.chunks, self._plan.weights
        if saves_model(self._trainer):
            sync_parameters([each for each in chunks if is_gathered_by_megatron(each)] if weights.buckets else chunks)
            weights.fill()

    def _reserve_images(self) -> ReservedImages:
        if not self._has_images:
            return ReservedImages(None, ())
        images, files = self._context.host_images, self._plan.files
        if self._plan.on_gpu:
            return ReservedImages(images.reserve(files), tuple(range(len(files))))
        return images.reserve_ready(files)

    def _captured(self) -> Capture:
        """Copies the tensors of files that have an image. Other files are written directly from their tensors."""
        plan, images = self._plan, set(self._images.files)
        in_place = _part_of(plan, [number for number in range(len(plan.files)) if number not in images])
        capture = capture_in_place(in_place.files, in_place.tensors)
        # Drop the reference in `_images`, so that a larger buffer can replace this one once the capture is dropped.
        buffer, self._images = self._images.buffer, replace(self._images, buffer=None)
        if buffer is None:
            return capture
        copied = _part_of(plan, self._images.files)
        copies = self._context.host_images.capture(copied.files, copied.tensors, buffer, self._lazy())
        # The files that are written in place come first, because the trainer may be waiting for them.
        return Capture((*capture.writes, *copies.writes), copies.seconds)

    def _lazy(self) -> Sequence[tuple[int, int]] | None:
        """Returns the argument `lazy` of `HostImages.capture`."""
        if not self._plan.on_gpu:
            return None
        if not self._is_async:
            return ()  # nothing changes the state meanwhile, so writing need not wait for the copies
        is_lazy = self._trainer.config.async_mode == "lazy" and not gradients_share_memory(self._trainer.chunks)
        return self._plan.buffers if is_lazy else None

    # -- write ----------------------------------------------------------------------------------------------

    def _start_writing(self, staging: Path) -> FileWriter:
        check_seen(staging)
        assert isinstance(self._capture, Capture), "begin comes first"
        self._times.mark("writing")
        self._writer = FileWriter(staging, self._capture.writes, self._context.commits)
        self._writer.start()
        return self._writer

    def _write(self, staging: Path) -> list[WrittenFile]:
        """Writes this rank's files durably."""
        if isinstance(self._capture, Exception):
            raise self._capture
        writer = self._writer or self._start_writing(staging)
        # Write the small files while the disk is writing the large ones.
        written = self._write_small(staging)
        if self._steps is None:
            self._steps = _read_steps(self._trainer)
        written += writer.finish()
        self._times.copy = copy = self._copy_span(writer.times()[0])
        # Each rank syncs the names that it may have made. On some shared file systems (CephFS with `wsync` off), a sync
        # on another host would not do that.
        sync_names(staging, {*(plan.path for plan in self._plan.files), *(file.path for file in written)})
        now = self._times.mark("written")
        if not self._is_async or self._plan.on_gpu:
            self._tell_captured(copy[1], copy[1] - copy[0])
        self._events.written(now, self._bytes_of(written), now - self._times["writing"])
        return written

    def _write_small(self, staging: Path) -> list[WrittenFile]:
        written = [
            write_plain(staging, path, kind, check_plain(data)) for path, (kind, data) in self._plain.files.items()
        ]
        exports = "hf_model" in self._trainer.config.save_contents
        if self._trainer.agreement.is_coordinator and not exports:
            written += _write_assets(self._trainer, staging)
        return written

    # -- commit, on rank 0 ----------------------------------------------------------------------------------

    def _manifest(self, records: Sequence[Record]) -> Manifest:
        self._keep_lock()
        attempt, names = self._opened_attempt, self._context.names
        manifest = build_manifest(
            self._trainer,
            names,
            attempt.staging,
            self._plain.common,
            self.step,
            self._roles,
            attempt.number,
            records,
        )
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
        self._context.lock.take(patience_s=0)

    def _find_old_steps(self) -> None:
        """Finds the steps to delete after this commit, and warns if there are none and the next save will not fit.

        They are chosen now and not when the deletion begins, because a later save with another policy may be committed
        by then.
        """
        if not self._trainer.agreement.is_coordinator or self._policy is None:
            return
        deletes = False
        if self._policy.max_to_keep is not None:
            try:
                statuses = list_steps(self._trainer.root)
                self._old_steps = too_old(statuses, self._policy, self.step)
                deletes = bool(too_old(_with_whole(statuses, self.step), self._policy, self.step))
            except OSError as error:
                logger.warning("the checkpoint is committed, but old steps could not be deleted: %s", error)
                deletes = True  # by the next save, or by another process
        self._saved = self._context.room.committed(self._opened_attempt.role_dir, self.step, deletes)

    def _move_tracker(self) -> None:
        if self._policy is None:
            return
        trainer = self._trainer
        is_own_name = self._opened_attempt.role_dir == file_names.step_dir(trainer.root, self.step) / trainer.role
        _update_tracker(trainer, self.step, only=None if is_own_name else self.step)

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
        if self._plan.on_gpu:
            return planned, writing + last_arrived
        is_copied = len(self._images.files) == len(self._plan.files)
        return planned, planned + self._capture.seconds if is_copied else self._times["begun"]

    def _report(self, stall_s: float | None, nbytes: int) -> SaveReport:
        now = time.perf_counter()
        report = self._times.report(self.step, self._opened_attempt.role_dir, nbytes, stall_s, now)
        self._events.committed(now, nbytes, report.stall_s, self._times.phases(self._events.phase, now))
        return report

    # -- events ---------------------------------------------------------------------------------------------

    def _tell_captured(self, at: float, seconds: float) -> None:
        self._events.captured(at, self._nbytes, seconds)

    def _tell_deleted(self, status: StepStatus, seconds: float) -> None:
        trainer = self._trainer
        self._context.delivery.post(
            Deleted(
                step=status.step,
                role=trainer.role,
                rank=trainer.agreement.rank,
                path=status.path,
                time=time.time(),
                seconds=seconds,
            )
        )


def _part_of(plan: SavePlan, files: Sequence[int]) -> SavePlan:
    """Returns the part of a plan that is about the files with the given numbers."""
    return replace(
        plan, files=tuple(plan.files[number] for number in files), tensors=tuple(plan.tensors[n] for n in files)
    )


def _read_plain(trainer: Trainer, extra_state: Mapping[str, Any] | None) -> PlainState:
    contents = trainer.config.save_contents
    with_optimizer, place = "optimizer" in contents, trainer.coordinates.place
    files: dict[str, tuple[str, bytes]] = {}
    if "extra" in contents:
        files[file_names.rng_file(*place)] = ("rng", pickle_unchecked(read_rng()))
    if extra_state is not None:
        values = to_plain(extra_state, "extra_state")
        files[file_names.extra_file(*place)] = ("extra", pickle_unchecked(values))
    return PlainState(
        files,
        common=read_common(trainer) if with_optimizer and trainer.agreement.is_coordinator else {},
    )


def _read_steps(trainer: Trainer) -> list[float | int | None]:
    """Returns the number of steps of each chained optimizer.

    Raises UnsupportedError if the parameters of one have done different numbers of steps.
    """
    if "optimizer" not in trainer.config.save_contents:
        return []
    return [read_step(part) for part in optimizer_parts(trainer.optimizer)]


def _write_assets(trainer: Trainer, staging: Path) -> list[WrittenFile]:
    folder = staging / file_names.HUGGINGFACE_DIR
    return written_assets(folder, save_assets(folder, trainer.hf_config, trainer.processing_class))


def _sizes_of_assets(written: Sequence[WrittenFile]) -> dict[str, int]:
    # The weights of an export are of the same kind of files, but are planned anew at each save.
    assets = (file for file in written if file.kind == "huggingface")
    return {file.path: file.size for file in assets if not file.path.endswith(".safetensors")}


def _with_whole(statuses: Sequence[StepStatus], step: int) -> list[StepStatus]:
    """Returns the statuses as they will be when all roles of a step are committed."""
    return [
        replace(status, committed=status.committed | status.declared) if status.step == step else status
        for status in statuses
    ]


def _update_tracker(trainer: Trainer, step: int, only: int | None) -> None:
    newest = tracker.move_tracker(trainer.root, only)
    if newest is not None and newest > step:
        logger.warning(
            "step %d is saved, but load() will load the newer step %d: to continue from the saved step, delete the "
            "newer one",
            step,
            newest,
        )
