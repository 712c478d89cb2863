"""Runs one save on one rank: plans the files, copies the state into images of the files, and writes the files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.errors import HungDiskError
from mcore_ckpt.formats.huggingface.side_files import CONFIG_FILE
from mcore_ckpt.formats.native.file_plan import FilePlan
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.interrupts import is_interrupt
from mcore_ckpt.io import _native
from mcore_ckpt.io.device_waits import wait_for_gpu
from mcore_ckpt.io.disk_space import Need
from mcore_ckpt.io.disk_watch import Work
from mcore_ckpt.io.files import sync_names
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.save.capture import Capture, capture_in_place
from mcore_ckpt.save.context import SaveContext
from mcore_ckpt.save.destination import Destination, Place
from mcore_ckpt.save.file_contents import saves_model
from mcore_ckpt.save.guards import why_not_lazy
from mcore_ckpt.save.hf_export import least_exported_bytes
from mcore_ckpt.save.host_images import ReservedImages
from mcore_ckpt.save.part_files import PartFiles
from mcore_ckpt.save.plan import SavePlan
from mcore_ckpt.save.rank_reports import NO_GROUPS, keys_to_save, rank_report
from mcore_ckpt.save.replica_check import ReplicaReport, ReplicaSamples, take_samples
from mcore_ckpt.save.save_events import SaveEvents
from mcore_ckpt.save.save_times import SaveTimes
from mcore_ckpt.save.small_files import SmallFiles, read_steps, sizes_of_assets
from mcore_ckpt.state.main_weights import NO_WEIGHTS, is_gathered_by_megatron
from mcore_ckpt.state.model import sync_parameters
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps.transaction import check_seen

_NOT_READY = (
    "the disk hangs, and the host memory for a copy of the state is not ready yet, so nothing is saved. The training "
    "goes on"
)


class RankFiles:
    """The files of this rank in one save.

    Call `capture`, `start_writing`, `write`, `committed` and `close`, in this order. The constructor checks and plans:
    it does the work that can fail on a single rank, before the ranks' first round.

    Attributes:
        plan: says where each tensor is written. The plan refers to the tensors only until they are copied into images.
        need: the files that this rank will write.
        common: the state that all ranks share; empty on all ranks except rank 0.
        group_keys: the keys of the param groups in `common`, by optimizer.

    Raises UnsupportedError if something cannot be saved completely, and MemoryError if a copy of the state does not fit
    into host memory.
    """

    def __init__(
        self,
        context: SaveContext,
        extra_state: Mapping[str, Any] | None,
        destination: Destination,
        times: SaveTimes,
        events: SaveEvents,
    ) -> None:
        self._context, self._trainer, self._lock = context, context.trainer, destination.lock
        self._times, self._events = times, events
        self._small = SmallFiles(self._trainer, extra_state, destination.contents)
        self._parts = PartFiles(self._trainer, context.commits.runner, context.part_sizes, context.part_notes)
        self.common = self._small.common
        self.plan = context.planner.plan(self._trainer, destination.writers_of)
        self._nbytes = sum(plan.nbytes for plan in self.plan.files)
        small = self._small.sizes() | self._parts.sizes()
        self.need = need_of_rank(self._trainer, self.plan.files, small, context.assets)
        self._is_async = self._trainer.config.async_save
        # Weights that are made on the GPU come in pieces, and each piece overwrites the previous piece. So these
        # weights must be copied into images.
        self._has_images = times.copies_first = self._is_async or self.plan.weights.is_cuda
        self._images = self._reserve_images()
        self.plan = self.plan.with_own_weights(self._without_image())
        # Reading one step number per parameter takes a while. Without images the state does not change until the save
        # ends, so the numbers can be read later, while the disk is writing.
        self._steps = read_steps(self._trainer) if self._has_images else None
        self.group_keys = keys_to_save(self._trainer)
        self._groups = NO_GROUPS
        self._samples, self._reads_gpu = ReplicaSamples(), False
        self._captured: Capture | Exception = RuntimeError("capture comes first")
        self._writer: FileWriter | None = None
        self._written: list[WrittenFile] = []
        self._device_timeout_s = self._trainer.config.timeout_s

    def progress(self) -> tuple[int, int]:
        """Returns how many bytes of tensors this rank has written, and how many it must write in all."""
        return (0 if self._writer is None else self._writer.progress()), self._nbytes

    def limit_device_wait(self, seconds: float) -> None:
        """Limits each wait for a GPU, from now on, to this many seconds. An exiting interpreter calls this method."""
        self._device_timeout_s = seconds
        if self._writer is not None:
            self._writer.limit_device_wait(seconds)

    # -- capture --------------------------------------------------------------------------------------------

    def capture(self, place: Place) -> None:
        """Copies the state. If the save is async, training may continue when this returns.

        In an async save, some files have no image if host memory is still being prepared. These files are written to
        the disk before this returns.

        Raises only what a signal handler raises. Any other error is kept: the other ranks go on to the commit, and this
        rank reports the error there.
        """
        try:
            if self.plan.on_host or self.plan.weights.reads_host:
                # verl (0.9.1, `offload_megatron_optimizer`) and megatron's `offload_to_cpu` do not wait until their
                # copies to host memory are done. So wait here, because the save reads this host memory.
                wait_for_gpu(self._trainer.config.timeout_s)
            # The ranks gather weights together, and would wait for a rank that has failed. So the gathering comes
            # before all work that can fail on one rank alone.
            weights = self._complete_weights()
            place.prepare()
            if self._parts.capture(place.attempt):
                # The functions may have drawn random numbers. The checkpoint must have the random states that the
                # training goes on from.
                self._small.read_rng_again()
            self._copy_state(place, weights)
            if self._has_images:
                # Drop the references to the tensors, because the trainer may offload its tensors now.
                self.plan = replace(self.plan, tensors=(), weights=NO_WEIGHTS, copies={})
        except Exception as error:
            if is_interrupt(error):
                raise
            self._captured = error
            self.plan = replace(self.plan, weights=NO_WEIGHTS)
        self._times.mark("begun")

    def _copy_state(self, place: Place, weights: _native.DeviceEvent | None) -> None:
        """Copies the tensors, and writes the files that have no image. No rank waits for another rank."""
        number, verifies = place.attempt.number, self._trainer.config.verify_replicas
        self._samples = take_samples(self.plan.replicated, number, verifies, self.plan.copies)
        self._reads_gpu = any(tensor.is_cuda for members in self.plan.tensors for tensor in members.tensors)
        self._times.mark("planned")
        self._captured = self._copied(weights)
        if self.plan.on_gpu and not self._has_images:
            # The threads that read the tensors use no stream. So wait here until the GPU has done the work of the
            # training and of the capture, which makes strided tensors contiguous.
            wait_for_gpu(self._trainer.config.timeout_s)
        self._times.mark("captured")
        if self._is_async and len(self._images.files) < len(self.plan.files):
            self._write_in_place(place)
        if self._is_async and not self.plan.on_gpu:
            self._events.captured(time.perf_counter(), self._nbytes, time.perf_counter() - self._times["planned"])

    def _complete_weights(self) -> _native.DeviceEvent | None:
        """Gathers the weights that this rank has only in part, if the model is saved. All ranks call this together.

        Weights that are made from main parameters are copied as they are made, because all these weights together would
        need too much memory. Returns the event after the last copy.
        """
        if not saves_model(self._trainer):
            return None
        chunks, plan = self._trainer.chunks, self.plan
        weights, copied = plan.weights, _part_of(plan, self._images.files)
        sync_parameters([each for each in chunks if is_gathered_by_megatron(each)] if weights.pieces else chunks)
        images = self._context.host_images
        event = images.copy_weights(weights, copied.files, copied.tensors, self._images.buffer)
        # Drop the weights, because the trainer needs their memory now.
        self.plan = replace(plan, weights=NO_WEIGHTS)
        return event

    def _reserve_images(self) -> ReservedImages:
        images, files = self._context.host_images, self.plan.files
        if not self._has_images or not files:  # a rank may write only small files
            return ReservedImages(None, ())
        if self.plan.on_gpu:
            return ReservedImages(images.reserve(files), tuple(range(len(files))))
        return images.reserve_ready(files)

    def _without_image(self) -> list[int]:
        images = set(self._images.files)
        return [number for number in range(len(self.plan.files)) if number not in images]

    def _copied(self, weights: _native.DeviceEvent | None) -> Capture:
        """Copies the tensors of files that have an image. Other files are written directly from their tensors."""
        plan = self.plan
        in_place = _part_of(plan, self._without_image())
        capture = capture_in_place(in_place.files, in_place.tensors)
        # Drop the reference in `_images`, so that a larger buffer can replace this buffer once the capture is dropped.
        buffer, self._images = self._images.buffer, replace(self._images, buffer=None)
        if buffer is None:
            return capture
        copied = _part_of(plan, self._images.files)
        copies = self._context.host_images.capture(copied.files, copied.tensors, buffer, self._lazy(), weights)
        # The files that are written in place come first, because the trainer may be waiting for them.
        return Capture((*capture.writes, *copies.writes), copies.seconds)

    def _lazy(self) -> Sequence[tuple[int, int]] | None:
        """Returns the argument `lazy` of `HostImages.capture`."""
        if not self.plan.on_gpu:
            return None
        is_lazy = self._trainer.config.async_mode == "lazy" and why_not_lazy(self._trainer) is None
        return self.plan.buffers if is_lazy else None

    def _write_in_place(self, place: Place) -> None:
        """Writes the files that have no image, while the trainer waits. Raises HungDiskError if the disk hangs."""
        if place.attempt.is_late:
            raise HungDiskError(f"{place.attempt.staging}: {_NOT_READY}")
        disk = self._context.commits.runner
        writing = disk.start(lambda: self._start(place.attempt.staging).wait_for_sources())
        if not writing.wait(deadlines.DISK_PATIENCE_S):
            disk.leave(writing)
            raise HungDiskError(f"{place.attempt.staging}: {_NOT_READY}")
        writing.result()

    # -- write ----------------------------------------------------------------------------------------------

    def start_writing(self, place: Place) -> None:
        """Starts to write the images and the parts. Raises only what a signal handler raises, like `capture`."""
        if isinstance(self._captured, Exception):
            return
        try:
            if self._writer is None:
                self._context.commits.runner.run(partial(self._start, place.attempt.staging))
            self._parts.start(place.attempt.staging)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._captured = error

    def write(self, staging: Path, stall_s: float | None) -> Record:
        """Writes this rank's files durably, and returns its report for rank 0.

        Args:
            staging: the staging folder.
            stall_s: how long the trainer was held up, in seconds; None if the trainer still waits.

        Raises the error with which `capture` or `start_writing` failed, or the error of the writing.
        """
        if isinstance(self._captured, Exception):
            raise self._captured
        writer = self._writer
        assert writer is not None, "start_writing comes first"
        try:
            # Write the small files while the disk is writing the large files.
            written = self._small.write(staging)
            steps = read_steps(self._trainer) if self._steps is None else self._steps
            written += writer.finish()
            written += self._parts.finish()
        except BaseException:
            self._parts.stop()  # before rank 0 learns of the failure, and removes the staging folder
            raise
        self._times.copied = self._copied_at(writer.times()[0])
        # Each rank syncs the names that it may have made. On some shared file systems (CephFS with `wsync` off), a sync
        # on another host would not include these names.
        sync_names(staging, {*(plan.path for plan in self.plan.files), *(file.path for file in written)})
        self._lock.check_root()
        now, nbytes = self._times.mark("written"), self.bytes_of(written)
        if not self._is_async or self.plan.on_gpu:
            began, ended = self._times.spans(now)["copy"]
            self._events.captured(ended, self._nbytes, ended - began)
        self._events.written(now, nbytes, now - self._times["writing"])
        self._written = written
        self._groups = self.plan.groups.listed(self.group_keys)
        names = self._context.names.to_send(self.plan.files, self._trainer.agreement.rank, self._groups)
        replicas, times = self._replicas(writer), self._times.to_record(stall_s, nbytes)
        groups = self._groups.holds
        report = rank_report(
            *(self._trainer, written, self.plan.files, names, steps, groups, replicas, times),
            positions=self._small.positions,
            step_parts=self._parts.names,
        )
        return report.to_record()

    def _start(self, staging: Path) -> FileWriter:
        if isinstance(self._captured, Exception):
            raise self._captured
        self._lock.check_root()
        check_seen(staging)
        self._times.mark("writing")
        self._writer = FileWriter(staging, self._captured.writes, self._context.commits, self._device_timeout_s)
        self._writer.limit_device_wait(self._device_timeout_s)  # an exiting interpreter may just have lowered the limit
        self._writer.start()
        return self._writer

    def close(self) -> None:
        """Waits until no thread writes any more, or the disk hangs, and then frees the copies and the parts."""
        if self._writer is not None:
            Work(self._writer.close, self._device_timeout_s).wait(deadlines.DISK_PATIENCE_S)
        self._parts.close()
        # Drop the capture, which keeps the host memory alive. A larger buffer may replace that memory from now on.
        self._captured = RuntimeError("the save has ended")

    def committed(self, exported: Sequence[WrittenFile]) -> int:
        """Records, for later saves, which names rank 0 has received, and the sizes of the parts and assets.

        Returns how many bytes this rank has written.
        """
        self._parts.committed()
        self._context.names.mark_sent([*self.plan.files, self._groups])
        written = [*self._written, *exported]
        if self._trainer.agreement.is_coordinator:
            self._context.assets.update(sizes_of_assets(written))
        return self.bytes_of(written)

    def bytes_of(self, written: Sequence[WrittenFile]) -> int:
        """Returns how many bytes this rank has written, including its parts of files that several ranks share."""
        return self._nbytes + sum(file.size for file in written if file.index is None)

    def _replicas(self, writer: FileWriter) -> ReplicaReport:
        """Returns this rank's CRCs, which rank 0 compares with the CRCs of other ranks."""
        # Samples from a GPU were queued before the copies of tensors. These copies have been written, so the samples
        # have arrived, too. But a rank that copies no tensors, or only weights that were made before the samples were
        # queued, has not waited for the samples. So its samples from a GPU are left out.
        has_arrived = self._reads_gpu
        return self._samples.report(has_arrived, ((each.tensor, each.other, each.stored) for each in writer.mended))

    def _copied_at(self, last_arrived: float) -> float:
        """Returns when the copy ended (time.perf_counter()).

        `last_arrived` is the number of seconds from the start of writing until the writer had all bytes.
        """
        assert isinstance(self._captured, Capture)
        if not self._has_images or (self.plan.on_gpu and last_arrived):
            return self._times["writing"] + last_arrived
        is_copied = len(self._images.files) == len(self.plan.files)
        return self._times["planned"] + self._captured.seconds if is_copied else self._times["begun"]


def _part_of(plan: SavePlan, files: Sequence[int]) -> SavePlan:
    """Returns the part of a plan that is about the files with the given numbers."""
    return replace(
        plan, files=tuple(plan.files[number] for number in files), tensors=tuple(plan.tensors[n] for n in files)
    )


def need_of_rank(
    trainer: Trainer, plans: Iterable[FilePlan], small: Mapping[str, int], assets: Mapping[str, int]
) -> Need:
    """Returns the need of this rank. A file that several ranks write together counts for its owner.

    `small` has the sizes in bytes of this rank's small files, by path. `assets` has the sizes in bytes of the
    HuggingFace assets of the last save, by path.
    """
    owned = [plan for plan in plans if plan.share.owner == trainer.agreement.rank]
    files = {plan.path: plan.least_size for plan in owned} | dict(small)
    if trainer.agreement.is_coordinator:
        files |= assets or _least_assets(trainer)
    exported = least_exported_bytes(trainer, owned) if "hf_model" in trainer.config.save_contents else 0
    return Need.of(files.items()) + Need(loose=exported)


def _least_assets(trainer: Trainer) -> dict[str, int]:
    if trainer.hf_config is None and trainer.processing_class is None:
        return {}
    # The tokenizer's files have unknown sizes until the first save has written them. So count only the configuration.
    return {str(PurePath(file_names.HUGGINGFACE_DIR, CONFIG_FILE)): 1}
