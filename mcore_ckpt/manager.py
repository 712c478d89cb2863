"""The one object a trainer holds."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_ckpt import layout
from mcore_ckpt.config import CheckpointConfig, check_roles
from mcore_ckpt.loading import LoadResult, load_checkpoint
from mcore_ckpt.saving import SaveReport, save_checkpoint
from mcore_ckpt.session import Session
from mcore_ckpt.staging.arena import Arena
from mcore_ckpt.staging.host_image import ImageCache
from mcore_ckpt.state.model import as_chunks, chunk_layers, read_model, unwrap
from mcore_ckpt.state.unsupported import (
    refuse_unsupported_experts,
    refuse_unsupported_model,
    refuse_unsupported_optimizer,
)
from mcore_ckpt.storage import commit, steps
from mcore_ckpt.storage.agreement import Agreement, Record, decide, same_everywhere
from mcore_ckpt.storage.manifest import StageRecord
from mcore_ckpt.topology import Topology, is_first_optimizer_instance, read_topology

logger = logging.getLogger(__name__)

LARGEST_STEP = 1 << 62  # what the manifest can hold

# Managers of one role, made one after the other in one process, must not read each other's keys.
_managers_made: dict[str, itertools.count[int]] = defaultdict(itertools.count)


class SaveHandle:
    """One save. Saves are synchronous: by the time there is a handle the checkpoint is committed."""

    def __init__(self, report: SaveReport) -> None:
        self.report = report

    @property
    def committed(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Returns the report once the checkpoint is committed."""
        return self.report


class CheckpointManager:
    """Saves and loads one role's training state.

    Made on every rank, with the same arguments, after megatron's setup: making it waits for the other ranks.

    Args:
        root: folder of all steps; the same shared folder on every rank.
        model: a megatron-core model or the list of its virtual chunks, bare or wrapped in DistributedDataParallel.
        optimizer: what `get_megatron_optimizer` returned, or None.
        lr_scheduler: `OptimizerParamScheduler` or any object with state_dict and load_state_dict, or None.
        role: the folder's name in each step: actor, critic, ...
        hf_config: a transformers config to write beside the checkpoint, or None.
        processing_class: a transformers tokenizer or processor to write beside it, or None.
        config: choices; see CheckpointConfig.

    Raises:
        UnsupportedError: the model or optimizer holds something that could only be half-saved; nothing has been
            touched.
        TypeError, ValueError: arguments that make no sense.

    Example:
        >>> manager = CheckpointManager("checkpoints", model, optimizer, lr_scheduler)  # doctest: +SKIP
        >>> manager.save(100, extra_state={"samples_seen": 51200}).wait()  # doctest: +SKIP
        >>> result = manager.load()  # doctest: +SKIP
    """

    def __init__(
        self,
        root: str | Path,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        *,
        role: str = "actor",
        hf_config: Any = None,
        processing_class: Any = None,
        config: CheckpointConfig | None = None,
    ) -> None:
        config = config or CheckpointConfig()
        chunks = as_chunks(model)
        if layout.check_role(role) not in (config.roles or (role,)):
            raise ValueError(f"config.roles is {config.roles}, which does not have this manager's role {role!r}")
        rank, coordinates, topology = read_topology(len(chunks))
        root = Path(root).absolute()
        agreement = _agreement(role, rank, topology.world_size, config.timeout_s)
        _set_up_together(agreement, root, role, config, chunks, optimizer, topology)
        self._session = Session(
            root=root,
            role=role,
            chunks=chunks,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            hf_config=hf_config,
            processing_class=processing_class,
            config=config,
            coordinates=coordinates,
            topology=topology,
            stages=tuple(_stage(coordinates.pp, vp, chunk) for vp, chunk in enumerate(chunks)),
            num_layers=unwrap(chunks[0]).config.num_layers,  # type: ignore[union-attr, arg-type]
            first_instance=is_first_optimizer_instance(topology),
            agreement=agreement,
            arena=Arena(),
            images=ImageCache(),
        )
        self._closed = False
        self._has_saved = False

    def save(
        self, step: int, extra_state: Mapping[str, Any] | None = None, *, roles: Sequence[str] | None = None
    ) -> SaveHandle:
        """Saves what `save_contents` names as step `step`. Every rank calls it, at the same point of training.

        Args:
            step: at least 0. An older checkpoint of the same step stays until the new one is committed.
            extra_state: this rank's data position, counters, ...: plain containers, numbers, strings, tensors. Ranks
                may differ.
            roles: the roles this step is made of, if not `config.roles`.

        Raises:
            CommitError: a rank failed, died or was late. The same on all ranks; the previous checkpoint stays.
            UnsupportedError: a value that cannot be stored without pickling a class; the message names the field.
        """
        topic = f"saving step {step} of {self._session.role}"
        with self._in_step(topic):
            self._check_save(step, extra_state)
            declared = check_roles(roles or self._session.config.roles or ())
            declared = check_roles([*declared, self._session.role])
            if not self._has_saved and self._session.agreement.is_coordinator:
                commit.sweep(self._session.root, self._session.role, alone=True)
            self._has_saved = True
        return SaveHandle(save_checkpoint(self._session, topic, step, extra_state, declared))

    def load(self, *, step: int | None = None, path: str | Path | None = None) -> LoadResult:
        """Loads what `load_contents` names: the newest complete step, `step`, or the role's folder `path`. Every rank
        calls it.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            CheckpointMismatchError: it does not fit this model, optimizer or layout; nothing has been changed.
            CheckpointCorruptError: it is damaged, and there is no other to take; the message says what state is left.
        """
        with self._in_step("finding a checkpoint"):
            self._check_open()
            self._check_contents("load_contents")
            if step is not None and path is not None:
                raise ValueError("step and path are both given: use one")
        return load_checkpoint(self._session, step, None if path is None else Path(path))

    def latest_step(self) -> int | None:
        """The newest complete step of this role, or None. What one rank sees: no agreement, no check of the bytes."""
        found = [s.step for s in steps.complete_steps(self._session.root) if self._session.role in s.committed]
        return found[-1] if found else None

    def wait(self) -> None:
        """Returns once no save is under way."""
        self._check_open()

    def close(self) -> None:
        """Frees the host memory saves use. The manager cannot be used after."""
        self._session.arena.release()
        self._closed = True

    @contextmanager
    def _in_step(self, topic: str) -> Iterator[None]:
        """What fails on this rank alone, before the first round, is told to the ranks that will wait there."""
        try:
            yield
        except Exception as error:
            self._session.agreement.withdraw(topic, error)
            raise

    def _check_save(self, step: int, extra_state: Mapping[str, Any] | None) -> None:
        self._check_open()
        self._check_contents("save_contents")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < LARGEST_STEP:
            raise ValueError(f"step is {step!r}: use an integer of at least 0")
        if extra_state is not None and not isinstance(extra_state, Mapping):
            raise TypeError(f"extra_state is a {type(extra_state).__name__}: use a dict")
        if extra_state is not None and "extra" not in self._session.config.save_contents:
            raise ValueError("extra_state is given, but save_contents has no 'extra': it would be lost")

    def _check_contents(self, field: str) -> None:
        if self._session.optimizer is None and "optimizer" in getattr(self._session.config, field):
            raise ValueError(f"{field} has 'optimizer', but there is none: hand one over or leave the word out")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this CheckpointManager is closed: make a new one")


def _set_up_together(
    agreement: Agreement,
    root: Path,
    role: str,
    config: CheckpointConfig,
    chunks: Sequence[Any],
    optimizer: Any,
    topology: Topology,
) -> None:
    """One rank's stage may hold what another's does not: all must refuse, or the others would wait for it later."""

    def work() -> Record:
        refuse_unsupported_model(chunks)
        refuse_unsupported_experts(topology, read_model(chunks))
        if optimizer is not None:
            refuse_unsupported_optimizer(optimizer)
        return {
            "root": str(root),
            "save_contents": config.save_contents,
            "load_contents": config.load_contents,
            "has_optimizer": optimizer is not None,
        }

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere(records, "the arguments of CheckpointManager")
        commit.sweep(root, role, alone=False)
        return {}

    decide(agreement, "setting up a CheckpointManager", work, combine)


def _stage(pp: int, vp: int, chunk: Any) -> StageRecord:
    layers = chunk_layers(chunk)
    return StageRecord(pp, vp, layers.decoder, layers.mtp)


def _agreement(role: str, rank: int, world_size: int, timeout_s: float) -> Agreement:
    namespace = f"mcore_ckpt/{role}/{next(_managers_made[role])}"
    return Agreement(_store(), rank, world_size, namespace, timeout_s)


def _store() -> Any:
    """A client of the job's key-value store that nobody else waits on; a store of its own for a single process."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return dist.HashStore()  # type: ignore[attr-defined]
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()
