"""The trainer of one rank: the objects to save, the place in the layout, and the agreement with other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint.manifest import AdapterSettings, StageRecord
from mcore_ckpt.checkpoint.model_facts import Facts
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.io.access import mode_below
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.ranks.topology import RankCoordinates, Replicas, Topology
from mcore_ckpt.sharding.counterparts import Layers
from mcore_ckpt.state.attached_parts import AttachedParts


@dataclass(frozen=True, eq=False)
class Trainer:
    """Everything that saving and loading share, fixed for the lifetime of a CheckpointManager.

    Attributes:
        root: the folder of all steps.
        chunks: the virtual chunks of the model, bare or wrapped in DistributedDataParallel.
        optimizer, lr_scheduler: megatron's objects. Each is None if the trainer has no such object.
        hf_config, processing_class: transformers' config, and transformers' tokenizer or processor. Each is None if not
            given.
        replicas: the world ranks that hold the same tensors as this rank.
        stages: the layers of this rank's virtual pipeline stages.
        first_instance: whether this rank belongs to distributed-optimizer instance 0.
        layers: the parts that each layer of the model has. Empty until all ranks have reported their layers.
        adapters: the settings of the model's low-rank adapters. None if the model has no adapters, or until all ranks
            have reported their adapters.
        model: the facts of the model (`checkpoint/model_facts.py`), as far as this rank knows them.
        vocab_size: how many tokens the vocabulary has without padding. None if it is unknown.
        group_keys: the keys of the param groups of each chained optimizer, as they were when the manager was made
            (`param_groups.group_keys`).
        source_files: the assets of the model that the training started from, by path. Rank 0's first save fills this
            dict.
        gpu: the number of the GPU that this rank trains on (`thread_settings.gpu_of`); None without a GPU.
        parts: the parts of a step that are attached to the manager on this rank.
        agreement: connects this rank with the other ranks of the role, for rounds on the trainer's own thread.
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
    vocab_size: int | None
    gpu: int | None
    agreement: Agreement
    model: Facts = field(default_factory=dict)
    layers: Layers = field(default_factory=dict)
    adapters: AdapterSettings | None = None
    group_keys: tuple[tuple[str, ...], ...] = ()
    source_files: dict[str, bytes] = field(default_factory=dict)
    parts: AttachedParts = field(default_factory=AttachedParts)

    def folder_mode(self, role_dir: Path) -> int:
        """Returns the mode for making a role's folder and the folders in it, before the umask is applied."""
        return mode_below(self.root, role_dir, self.config.shared_with_group)
