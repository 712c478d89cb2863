"""Holds what all saves of one manager share."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_ckpt.delivery import Delivery
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.save.host_images import HostImages
from mcore_ckpt.save.plan import SavePlanner
from mcore_ckpt.save.rank_reports import TensorNames
from mcore_ckpt.save.replica_check import ReplicaWarnings
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps.history import RunHistory
from mcore_ckpt.steps.space_watch import SpaceWatch
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.upload_queue import UploadQueue


@dataclass(frozen=True, eq=False)
class SaveContext:
    """The objects that all saves of one manager share.

    Attributes:
        trainer: the objects to save, and this rank's place.
        commits: this rank's agreement for rounds on the thread that finishes a save. The trainer's thread has an
            agreement of its own (`trainer.agreement`), because a wait blocks the store client of its agreement.
        host_images: the host memory for copies of the state, and the copies from the GPU to it.
        lock: the lock on the role in the root. Only rank 0 uses it.
        uploads: the queue of uploads to the remote store; None without a store, and on all ranks except rank 0.
        space_watch: foresees whether the next save will fit. Only rank 0 uses it.
        delivery: brings events to the listeners.
        history: knows the run, and the place of the next save among the commits. Only rank 0 uses it.
        planner: makes the plan of each save.
        names: the tensor names that rank 0 already knows.
        assets: the sizes of the files beside the HuggingFace weights at the last save, by path. Only rank 0 has them.
        replica_warnings: warns of replicas that have drifted apart. Only rank 0 uses it.
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
    replica_warnings: ReplicaWarnings = field(default_factory=ReplicaWarnings)
