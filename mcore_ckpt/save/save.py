"""One save: trainer -> state (named shards) -> staging (host image) -> storage (files, manifest, commit)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.checkpoint.plain_files import pickle_plain, write_plain
from mcore_ckpt.formats.huggingface.assets import save_assets, written_assets
from mcore_ckpt.formats.native.writer import ImageWriter
from mcore_ckpt.io.files import sync_dir
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.save.capture import Capture, capture_in_place
from mcore_ckpt.save.hf_export import completed, export_together
from mcore_ckpt.save.host_images import HostImages
from mcore_ckpt.save.plan import SavePlanner
from mcore_ckpt.save.rank_reports import TensorNames, build_manifest, read_common, report
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.model import gradients_share_memory, sync_parameters
from mcore_ckpt.state.plain import to_plain
from mcore_ckpt.state.rng import read_rng
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import tracker
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.transaction import Attempt, check_seen, commit_together
from mcore_ckpt.steps.upload_queue import UploadHandle, UploadQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveReport:
    """What a save did on this rank. Times are in seconds.

    Attributes:
        step: the step saved.
        path: the checkpoint's folder.
        nbytes: written by this rank.
        seconds: from the call of `save` to the commit.
        stall_s: until `save` returned.
        plan_s: what neither copied, nor wrote, nor waited for the commit: checks, the plan, the ranks' meeting.
        copy_s: until the state had been copied out; of a state that is written from where it is, while others wrote.
        write_s: from the first write until all of this rank's files were on the disk.
        export_s: from then until its part of the HuggingFace model was, waiting for slower ranks included; 0 without.
        commit_s: from then until the checkpoint was in place, waiting for slower ranks included.
    """

    step: int
    path: Path
    nbytes: int
    seconds: float
    stall_s: float
    plan_s: float
    copy_s: float
    write_s: float
    export_s: float
    commit_s: float

    @property
    def copy_gb_per_s(self) -> float:
        """10**9 bytes a second."""
        return self.nbytes / self.copy_s / 1e9 if self.copy_s else 0.0

    @property
    def disk_gb_per_s(self) -> float:
        """10**9 bytes a second."""
        return self.nbytes / self.write_s / 1e9 if self.write_s else 0.0


@dataclass(frozen=True)
class PlainState:
    """The small part of the state, as it was when the save was asked for."""

    rng: dict[str, Any] | None
    extra: dict[str, Any] | None
    common: dict[str, Any]


@dataclass(frozen=True, eq=False)
class SaveContext:
    """What the saves of one manager share.

    Attributes:
        trainer: the objects to save, and this rank's place.
        commits: this rank's seat for rounds on the thread that ends a save. A wait blocks its client, so the trainer's
            own thread has another seat (`trainer.agreement`).
        host_images: host memory for the copies, and the copies from the GPU.
        lock: the lock on the role; used on rank 0 alone.
        uploads: the queue of uploads to the remote store; None without a store, and on other ranks than 0.
        planner: keeps the plan from save to save.
        names: which tensor names rank 0 knows already.
    """

    trainer: Trainer
    commits: Agreement
    host_images: HostImages
    lock: TrainerLock
    uploads: UploadQueue | None
    planner: SavePlanner = field(default_factory=SavePlanner)
    names: TensorNames = field(default_factory=TensorNames)


class Save:
    """One save of this rank, in the order `Save(...)`, `begin`, `finish`.

    Making one checks and plans: whatever can fail on one rank alone, before the ranks meet. `called` is when the
    trainer asked for it (time.perf_counter()): it may have waited for an earlier save since. `policy` is what of the
    steps stays after the commit; None: the checkpoint is not part of a step below the root.

    Raises:
        UnsupportedError: something that cannot be saved whole.
        MemoryError: no memory for a copy of the state.
    """

    def __init__(
        self,
        context: SaveContext,
        step: int,
        extra_state: Mapping[str, Any] | None,
        roles: tuple[str, ...],
        called: float,
        policy: PreservationPolicy | None,
    ) -> None:
        self._called, self._started = called, time.perf_counter()
        trainer = context.trainer
        self._context = context
        self._trainer = trainer
        self.step = step
        self._roles = roles
        self._policy = policy
        self._plain = _read_plain(trainer, extra_state)
        self._plan = context.planner.plan(trainer)
        self._exports = "hf_model" in trainer.config.save_contents
        self._in_place = not trainer.config.async_save and not self._plan.on_gpu
        self._address = 0 if self._in_place else context.host_images.reserve(self._plan.files)
        # One number per parameter takes a while to look at; a state that stays as it is has it done under the writing.
        self._steps = None if self._in_place else _read_steps(trainer)
        self._attempt: Attempt | None = None
        self._capture: Capture | Exception | None = None
        self._writer: ImageWriter | None = None
        self._nbytes = sum(plan.nbytes for plan in self._plan.files)
        self._times: dict[str, float] = {}

    def begin(self, attempt: Attempt) -> None:
        """Copies the state. When this returns, training may go on if the save is async.

        Raises nothing: the other ranks are on their way to `finish`, which is where they are told.
        """
        self._attempt = attempt
        try:
            sync_parameters(self._trainer.chunks)
            if self._plan.on_host and torch.cuda.is_available():
                # Offloading copies without waiting (verl 0.9.1, `offload_megatron_optimizer`; megatron's
                # `offload_to_cpu`): what is in host memory now may still be on its way there.
                torch.cuda.synchronize()
            self._times["planned"] = time.perf_counter()
            self._capture = self._captured()
            if not self._in_place:
                self._plan = replace(self._plan, tensors=())  # the trainer may offload them now
        except Exception as error:
            self._capture = error
        self._times["captured"] = time.perf_counter()

    def _captured(self) -> Capture:
        host_images, plan, config = self._context.host_images, self._plan, self._trainer.config
        if self._in_place:
            return capture_in_place(plan.files, plan.tensors)
        # Synchronous saves of a GPU's state: nothing changes it meanwhile, so writing need not wait for the copies.
        if not config.async_save:
            return host_images.capture(plan.files, plan.tensors, self._address, lazy=())
        lazy = config.async_mode == "lazy" and not gradients_share_memory(self._trainer.chunks)
        return host_images.capture(plan.files, plan.tensors, self._address, plan.buffers if lazy else None)

    def finish(self, stall_s: float | None = None) -> SaveReport:
        """Writes and commits.

        Args:
            stall_s: how long the trainer was held up; None: until this returns.

        Raises:
            CheckpointError: on all ranks the same type; the previous checkpoint stays.
        """
        trainer, attempt = self._trainer, self._attempt
        assert attempt is not None, "begin comes first"
        written: list[WrittenFile] = []

        def write(staging: Path) -> Record:
            check_seen(staging)
            written.extend(self._write(staging))
            names = self._context.names.to_tell(self._plan.files)
            assert self._steps is not None
            return report(trainer, written, self._plan.files, names, self._steps)

        def write_and_export(staging: Path) -> Record:
            exported = export_together(
                self._context.commits, trainer, staging, attempt.number, lambda: write(staging), self._describe
            )
            self._times["exported"] = time.perf_counter()
            written.extend(exported)
            return {"files": [asdict(file) for file in exported]}

        commit_together(
            self._context.commits,
            f"saving step {self.step} of {trainer.role}",
            attempt,
            write_and_export if self._exports else write,
            self._complete if self._exports else self._describe,
            self._move_tracker,
        )
        self._context.names.were_told(self._plan.files)
        # Of a file shared by several ranks, this rank's part.
        return self._report(stall_s, self._nbytes + sum(file.size for file in written if file.index is None))

    def upload(self) -> UploadHandle | None:
        """Lets the committed checkpoint go to the remote store. None where there is none, and but on rank 0."""
        uploads, policy = self._context.uploads, self._policy
        if uploads is None or policy is None:
            return None
        return uploads.committed(self.step, policy if self._trainer.config.prune_remote else None)

    def after_commit(self) -> None:
        """Deletes what is too old: after all ranks know of the commit, because it may take long."""
        if self._trainer.agreement.is_coordinator and self._policy is not None:
            _delete_old(self._trainer.root, self._policy, self.step)

    def _move_tracker(self) -> None:
        if self._policy is None:
            return
        assert self._attempt is not None
        trainer = self._trainer
        is_own_name = self._attempt.role_dir == file_names.step_dir(trainer.root, self.step) / trainer.role
        _update_tracker(trainer, self.step, only=None if is_own_name else self.step)

    def progress(self) -> tuple[int, int]:
        """Bytes of tensors that this rank has written, and has to write."""
        return (0 if self._writer is None else self._writer.progress()), self._nbytes

    def _write(self, staging: Path) -> list[WrittenFile]:
        """This rank's files, durably."""
        if isinstance(self._capture, Exception):
            raise self._capture
        assert self._capture is not None
        self._times["writing"] = time.perf_counter()
        with ImageWriter(staging, self._capture.writes, self._context.commits) as writer:
            self._writer = writer
            writer.start()
            # While the disk has the large ones:
            written = self._write_small(staging)
            if self._steps is None:
                self._steps = _read_steps(self._trainer)
            written += writer.finish()
            self._times["copied"] = self._copy_seconds(writer.times()[0])
        for folder in {(staging / file.path).parent for file in written}:
            sync_dir(folder)
        self._times["written"] = time.perf_counter()
        return written

    def _copy_seconds(self, last_arrived: float) -> float:
        """Until the state was copied out; `last_arrived` is when the writer had the last of it, since it began."""
        assert isinstance(self._capture, Capture)
        if self._in_place:
            return last_arrived
        if not self._plan.on_gpu:
            return self._capture.seconds
        return self._times["writing"] - self._times["planned"] + last_arrived

    def _write_small(self, staging: Path) -> list[WrittenFile]:
        place, written = self._trainer.coordinates.place, []
        for path, kind, value in (
            (file_names.rng_file(*place), "rng", self._plain.rng),
            (file_names.extra_file(*place), "extra", self._plain.extra),
        ):
            if value is not None:
                written.append(write_plain(staging, path, kind, pickle_plain(value)))
        if self._trainer.agreement.is_coordinator and not self._exports:
            written += _write_assets(self._trainer, staging)
        return written

    def _describe(self, records: Any) -> Any:
        assert self._attempt is not None
        self._keep_place()
        return build_manifest(
            self._trainer,
            self._context.names,
            self._attempt.staging,
            self._plain.common,
            self.step,
            self._roles,
            self._attempt.number,
            records,
        )

    def _complete(self, records: Any) -> Any:
        assert self._attempt is not None
        self._keep_place()
        return completed(self._trainer, self._attempt.staging, records)

    def _keep_place(self) -> None:
        """Raises LockedError if a trainer elsewhere has taken this one for dead: then it must put nothing in place."""
        self._context.lock.take(patience_s=0)

    def _report(self, stall_s: float | None, nbytes: int) -> SaveReport:
        times, now = self._times, time.perf_counter()
        seconds = now - self._called
        assert self._attempt is not None
        return SaveReport(
            step=self.step,
            path=self._attempt.role_dir,
            nbytes=nbytes,
            seconds=seconds,
            stall_s=seconds if stall_s is None else stall_s,
            plan_s=times["planned"] - self._started + times["writing"] - times["captured"],
            copy_s=times["copied"],
            write_s=times["written"] - times["writing"],
            export_s=times.get("exported", times["written"]) - times["written"],
            commit_s=now - times.get("exported", times["written"]),
        )


def _read_plain(trainer: Trainer, extra_state: Mapping[str, Any] | None) -> PlainState:
    contents = trainer.config.save_contents
    with_optimizer = "optimizer" in contents
    return PlainState(
        rng=read_rng() if "extra" in contents else None,
        extra=None if extra_state is None else to_plain(extra_state, "extra_state"),
        common=read_common(trainer) if with_optimizer and trainer.agreement.is_coordinator else {},
    )


def _read_steps(trainer: Trainer) -> list[float | int | None]:
    """What each of the optimizer's parts has done. Raises UnsupportedError if its parameters differ."""
    if "optimizer" not in trainer.config.save_contents:
        return []
    return [optimizer_state.read_step(part) for part in optimizer_state.optimizer_parts(trainer.optimizer)]


def _write_assets(trainer: Trainer, staging: Path) -> list[WrittenFile]:
    folder = staging / file_names.HUGGINGFACE_DIR
    return written_assets(folder, save_assets(folder, trainer.hf_config, trainer.processing_class))


def _update_tracker(trainer: Trainer, step: int, only: int | None) -> None:
    newest = tracker.move_tracker(trainer.root, only)
    if newest is not None and newest > step:
        logger.warning(
            "step %d is saved, but load() takes the newer step %d: delete that one to go on from here", step, newest
        )


def _delete_old(root: Path, policy: PreservationPolicy, step: int) -> None:
    if policy.max_to_keep is None:
        return
    try:
        delete_old_steps(root, policy, step)
    except OSError as error:
        logger.warning("the checkpoint is committed, but old steps could not be deleted: %s", error)
