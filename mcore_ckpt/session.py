"""What a save and a load both need of one trainer: its parts, where this rank stands, whom to ask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.staging.staging import Staging
from mcore_ckpt.storage.agreement import Agreement
from mcore_ckpt.storage.manifest import StageRecord
from mcore_ckpt.storage.remote import Remote
from mcore_ckpt.storage.trainer_lock import TrainerLock
from mcore_ckpt.topology import RankCoordinates, Replicas, Topology
from mcore_ckpt.uploading import Uploads


@dataclass(frozen=True, eq=False)
class Session:
    """Everything a CheckpointManager was given and has found out, fixed for its life.

    `agreement` is the trainer's thread's, `commits` that of the thread that ends a save: a wait blocks its client.
    `lock` is of use on rank 0 alone, `uploads` is rank 0's alone.
    """

    root: Path
    role: str
    chunks: tuple[torch.nn.Module, ...]
    optimizer: Any
    lr_scheduler: Any
    hf_config: Any
    processing_class: Any
    config: CheckpointConfig
    coordinates: RankCoordinates
    topology: Topology
    replicas: Replicas
    stages: tuple[StageRecord, ...]
    first_instance: bool
    num_layers: int
    vocab_size: int | None
    agreement: Agreement
    commits: Agreement
    staging: Staging
    lock: TrainerLock
    remote: Remote | None
    uploads: Uploads | None
