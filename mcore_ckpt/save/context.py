"""Holds what the saves of a manager share until the manager is closed: threads, locks, memory, agreements."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mcore_ckpt.delivery import Delivery
from mcore_ckpt.errors import CheckpointError, HungDiskError
from mcore_ckpt.fast.saves import FastSaves
from mcore_ckpt.io.disk_watch import DiskWatch
from mcore_ckpt.processes import Home
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.save.background import is_deleting_here
from mcore_ckpt.save.host_images import HostImages
from mcore_ckpt.save.part_files import PartSizes
from mcore_ckpt.save.plan import SavePlanner
from mcore_ckpt.save.rank_reports import TensorNames
from mcore_ckpt.save.replica_check import ReplicaWarnings
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps.history import RunHistory
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.steps.retention import PreservationPolicy
from mcore_ckpt.steps.space_watch import SpaceWatch
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.upload_queue import UploadQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SaveContext:
    """The objects that all saves of one manager share.

    Only rank 0 takes the lock, and uses the space watch and the history.

    Attributes:
        commits: this rank's agreement for rounds on the thread that finishes a save. The trainer's thread has another
            agreement (`trainer.agreement`), because a waiting thread blocks its agreement's client of the key-value
            store.
        uploads: the queue of uploads to the remote store; None without a store, and on all ranks except rank 0.
        names: the tensor names that rank 0 already knows.
        assets: the sizes in bytes of the last save's HuggingFace assets, by path. Only rank 0 has these sizes.
        part_sizes: for each part of the step, the sizes in bytes of this rank's files in the last save.
        part_notes: the paths of this rank's notes on handed-over files that may still have links (`steps.handed_over`).
    """

    trainer: Trainer
    commits: Agreement
    host_images: HostImages
    lock: TrainerLock
    uploads: UploadQueue | None
    space_watch: SpaceWatch
    delivery: Delivery
    history: RunHistory
    planner: SavePlanner = field(default_factory=SavePlanner)
    names: TensorNames = field(default_factory=TensorNames)
    assets: dict[str, int] = field(default_factory=dict)
    part_sizes: PartSizes = field(default_factory=dict)
    part_notes: list[Path] = field(default_factory=list)
    replica_warnings: ReplicaWarnings = field(default_factory=ReplicaWarnings)


def context_of(
    trainer: Trainer,
    host_images: HostImages,
    lock: TrainerLock,
    remote: RemoteSteps | None,
    fast: FastSaves | None,
    disk: DiskWatch,
) -> SaveContext:
    """Makes the context of one manager's saves.

    Args:
        trainer, host_images, lock, fast: see `SaveContext` and `Closing`.
        remote: the steps in the remote store; None without a store.
        disk: watches the work of the trainer's thread.
    """
    config, agreement = trainer.config, trainer.agreement
    commits = agreement.for_thread("saves")
    # The thread of an async save reads only host copies of the state, so it needs no CUDA settings.
    own = DiskWatch(config.timeout_s, who=f"rank {agreement.rank}: ", beside=disk)
    commits.runner = own if config.async_save else disk
    delivery = Delivery(config.listeners)
    uploads = _upload_queue(trainer, remote, delivery)
    space_watch = SpaceWatch(trainer.root, is_deleting_here)
    history = _history(trainer, remote, fast)
    return SaveContext(trainer, commits, host_images, lock, uploads, space_watch, delivery, history)


def _upload_queue(trainer: Trainer, remote: RemoteSteps | None, delivery: Delivery) -> UploadQueue | None:
    """Returns the queue of uploads; None without a remote store, and on all ranks except rank 0."""
    if remote is None or not trainer.agreement.is_coordinator:
        return None
    config = trainer.config
    policy = PreservationPolicy.of(config) if config.prune_remote else PreservationPolicy()
    return UploadQueue(remote, trainer.root, trainer.role, policy, delivery)


def _history(trainer: Trainer, remote: RemoteSteps | None, fast: FastSaves | None) -> RunHistory:
    if fast is None:
        return RunHistory(trainer.root, trainer.role, trainer.root, None, remote)
    history = RunHistory(trainer.root, trainer.role, fast.tier.home, fast.tier.folder, remote)
    history.seen(each.head for each in fast.earlier)
    return history


@dataclass(frozen=True, eq=False)
class Closing:
    """The resources of one manager, which are given back when the manager ends.

    None of these objects may refer to the manager's `SaveContext`, which could otherwise never be garbage-collected.
    """

    agreements: tuple[Agreement, ...]
    host_images: HostImages
    lock: TrainerLock
    uploads: UploadQueue | None
    upload_timeout_s: float
    delivery: Delivery
    history: RunHistory
    fast: FastSaves | None
    home: Home

    @staticmethod
    def of(context: SaveContext, fast: FastSaves | None) -> Closing:
        """Returns the `Closing` of a context and a fast tier.

        When the last manager or save that uses the context is gone, everything is given back, unless `close` was called
        before.
        """
        closing = Closing(
            (context.trainer.agreement, context.commits),
            context.host_images,
            context.lock,
            context.uploads,
            context.trainer.config.upload_timeout_s,
            context.delivery,
            context.history,
            fast,
            Home(),
        )
        # The finalizer need not run at exit: exit handlers finish what is under way, and the system frees memory and
        # locks.
        weakref.finalize(context, closing._after_context).atexit = False
        return closing

    def close(self) -> None:
        """Gives everything back. A second call, and a call in a forked child, does nothing."""
        with ExitStack() as last:  # the last callback runs first, and all run even if one fails
            for agreement in self.agreements:
                last.callback(agreement.close)
            last.callback(self.delivery.close)
            # The uploads end before the lock is released, because the role's next trainer removes half-uploaded steps
            # as leftovers.
            last.callback(self._release, self.lock.release)
            last.callback(self._release, self.history.release)
            if self.fast is not None:
                last.callback(self.fast.close)
            if self.uploads is not None:
                last.callback(self.uploads.close, self.upload_timeout_s)
            last.callback(self.host_images.close)

    def _release(self, release: Callable[[], None]) -> None:
        """Releases a lock. If the disk hangs, the lock stays until this process has ended."""
        try:
            self.agreements[0].runner.run(release)
        except HungDiskError as error:
            logger.warning("a lock stays until this process has ended: %s", error)

    def _after_context(self) -> None:
        """Gives back what a dropped manager held. The garbage collector calls this, on any thread and at any moment.

        So everything that waits, or takes a lock that this thread may hold, is done on another thread.
        """
        if not self.home.is_here or self.agreements[0].is_closed:
            return
        if self.fast is not None:
            self.fast.tier.stop_serving()
        with suppress(RuntimeError):  # the system grants no thread
            threading.Thread(target=self._close_quietly, name="mcore_ckpt close", daemon=True).start()

    def _close_quietly(self) -> None:
        with suppress(CheckpointError):  # there is no caller who could receive the error
            self.close()
