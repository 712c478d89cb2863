"""One save: trainer -> state (named shards) -> staging (host image) -> storage (files, manifest, commit)."""

from __future__ import annotations

import datetime
import logging
import platform
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt import layout
from mcore_ckpt.errors import CommitError
from mcore_ckpt.hf.assets import save_assets
from mcore_ckpt.session import Session
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.plan import MODEL, PARAM, ShardKey, runs
from mcore_ckpt.staging.host_image import fill_image
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.model import read_model, sync_parameters
from mcore_ckpt.state.plain import to_plain
from mcore_ckpt.state.rng import read_rng
from mcore_ckpt.state.scheduler import read_scheduler
from mcore_ckpt.state.shards import LocalShard, ParameterState
from mcore_ckpt.storage import commit, steps
from mcore_ckpt.storage.agreement import Record
from mcore_ckpt.storage.dtypes import dtype_name
from mcore_ckpt.storage.files import sync_dir, sync_file
from mcore_ckpt.storage.index import Alias
from mcore_ckpt.storage.manifest import FileRecord, IndexPlace, Manifest, StageRecord
from mcore_ckpt.storage.requests import TensorWrite, WriteRequest, WrittenFile
from mcore_ckpt.storage.transaction import commit_together
from mcore_ckpt.storage.writer import write_image, write_plain
from mcore_ckpt.topology import RankCoordinates

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveReport:
    """What a save did on this rank.

    Attributes:
        step: the step saved.
        path: the checkpoint's folder.
        nbytes: written by this rank.
        seconds: from the call to the commit.
    """

    step: int
    path: Path
    nbytes: int
    seconds: float


def save_checkpoint(
    session: Session, topic: str, step: int, extra_state: Mapping[str, Any] | None, roles: tuple[str, ...]
) -> SaveReport:
    """Writes and commits one checkpoint. Every rank calls it with the same step.

    Raises:
        CommitError: a rank failed, died or was late; raised on all ranks, and the previous checkpoint stays.
        UnsupportedError: something that cannot be saved whole.
    """
    started = time.monotonic()
    role_dir = layout.step_dir(session.root, step) / session.role
    written: list[WrittenFile] = []
    common: dict[str, Any] = {}

    def write(staging: Path) -> Record:
        # Before gigabytes are written: what may have to be refused.
        plain = None if extra_state is None else to_plain(extra_state, "extra_state")
        optimizer_steps = _optimizer_steps(session)
        if session.agreement.is_coordinator and "optimizer" in session.config.save_contents:
            common.update(_common_state(session))
        written.extend(_write_all(session, staging, plain))
        return _report(session, written, optimizer_steps)

    commit_together(
        session.agreement,
        topic,
        role_dir,
        lambda: sync_parameters(session.chunks),
        write,
        lambda staging, attempt, records: _describe(session, staging, common, step, roles, attempt, records),
        lambda: _update_tracker(session, step),
    )
    if session.agreement.is_coordinator:
        _delete_old(session, step)
    return SaveReport(step, role_dir, sum(file.size for file in written), time.monotonic() - started)


def _update_tracker(session: Session, step: int) -> None:
    """The checkpoint is in place: a failure here is told, but is not the save's."""
    try:
        newest = steps.update_tracker(session.root)
    except OSError as error:
        logger.warning("the checkpoint is committed, but the tracker could not be updated: %s", error)
        return
    if newest is not None and newest > step:
        logger.warning(
            "step %d is saved, but load() takes the newer step %d: delete that one to go on from here", step, newest
        )


def _delete_old(session: Session, step: int) -> None:
    """After all ranks know of the commit: deleting may take long."""
    if session.config.max_to_keep is None:
        return
    try:
        steps.delete_old_steps(session.root, session.config.max_to_keep, commit.new_attempt(), step)
    except OSError as error:
        logger.warning("the checkpoint is committed, but old steps could not be deleted: %s", error)


# -- this rank's files ------------------------------------------------------------------------------------


def _write_all(session: Session, staging: Path, extra_state: dict[str, Any] | None) -> list[WrittenFile]:
    contents = session.config.save_contents
    model = read_model(session.chunks)
    requests: list[WriteRequest] = []
    if "model" in contents:
        requests += _model_requests(session, model)
    if "optimizer" in contents:
        requests.append(_optimizer_request(session, model))
    written = []
    for request in requests:
        host = fill_image(request, session.images, session.arena)
        written.append(write_image(staging, request, host.image, host.buffer))
    if "extra" in contents:
        written += _write_extra(session.coordinates, staging, extra_state)
    if session.agreement.is_coordinator:
        written += _write_assets(session, staging)
    for folder in {(staging / file.path).parent for file in written}:
        sync_dir(folder)
    return written


def _model_requests(session: Session, model: Iterable[LocalShard]) -> list[WriteRequest]:
    at, apart = session.coordinates, session.topology.experts_apart
    own = [shard for shard in model if not shard.replica]
    dense = [shard for shard in own if not (apart and shard.expert)]
    experts = [shard for shard in own if apart and shard.expert]
    requests = []
    if at.writes_dense:
        requests.append(_model_request(layout.model_file(at.tp, at.pp), "model", dense))
    if at.writes_experts and experts:
        requests.append(_model_request(layout.expert_file(at.etp, at.pp, at.ep), "experts", experts))
    return requests


def _model_request(path: str, kind: str, shards: Iterable[LocalShard]) -> WriteRequest:
    writes = (TensorWrite((s.key.name,), s.key, s.region, s.tensor, tuple(s.tensor.shape)) for s in shards)
    return WriteRequest(path, kind, tuple(writes))


def _optimizer_request(session: Session, model: Sequence[LocalShard]) -> WriteRequest:
    at = session.coordinates
    parts = optimizer_state.read_optimizer(session.optimizer, model, session.first_instance)
    writes: list[TensorWrite] = []
    aliases: list[Alias] = []
    for part, states in zip(optimizer_state.optimizer_parts(session.optimizer), parts, strict=True):
        for state in states:
            if _writes_state(session, part, state):
                _add_state(state, "model" in session.config.save_contents, writes, aliases)
    path = layout.optimizer_file(at.pp, at.tp, at.cp, at.dp)
    return WriteRequest(path, "optimizer", tuple(writes), tuple(aliases), tree=("state",))


def _writes_state(session: Session, part: optimizer_state.OptimizerPart, state: ParameterState) -> bool:
    if state.replica:
        return False
    if part.is_sharded:
        return True
    apart = session.topology.experts_apart and state.expert
    return session.coordinates.writes_experts if apart else session.coordinates.writes_dense


def _add_state(state: ParameterState, model_is_saved: bool, writes: list[TensorWrite], aliases: list[Alias]) -> None:
    tensors = dict(state.moments)
    if state.is_model_view and model_is_saved:
        key = ShardKey(state.name, PARAM)
        aliases.append(Alias(key, MODEL, state.region, dtype_name(state.main.dtype)))
    else:
        tensors = {PARAM: state.main, **tensors}
    for kind, tensor in tensors.items():
        key = ShardKey(state.name, kind)
        writes.append(TensorWrite(("state", state.name, kind), key, state.region, tensor, (state.region.numel,)))


def _write_extra(at: RankCoordinates, staging: Path, extra_state: dict[str, Any] | None) -> list[WrittenFile]:
    place = (at.pp, at.tp, at.cp, at.dp)
    written = [write_plain(staging, layout.rng_file(*place), "rng", read_rng())]
    if extra_state is not None:
        written.append(write_plain(staging, layout.extra_file(*place), "extra", extra_state))
    return written


def _write_assets(session: Session, staging: Path) -> list[WrittenFile]:
    paths = save_assets(staging / layout.HUGGINGFACE_DIR, session.hf_config, session.processing_class)
    written = []
    for path in paths:
        sync_file(path)
        data = path.read_bytes()
        name = path.relative_to(staging).as_posix()
        written.append(WrittenFile(name, "huggingface", len(data), zlib.crc32(data)))
    return written


# -- what ranks tell rank 0, and what it makes of it -------------------------------------------------------


def _optimizer_steps(session: Session) -> list[float | int | None]:
    if "optimizer" not in session.config.save_contents:
        return []
    return [optimizer_state.read_step(part) for part in optimizer_state.optimizer_parts(session.optimizer)]


def _report(session: Session, written: Iterable[WrittenFile], optimizer_steps: list[float | int | None]) -> Record:
    return {
        "files": [asdict(file) for file in written],
        "coordinates": asdict(session.coordinates),
        "stages": [asdict(stage) for stage in session.stages],
        "steps": optimizer_steps,
    }


def _describe(
    session: Session,
    staging: Path,
    common: dict[str, Any],
    step: int,
    roles: tuple[str, ...],
    attempt: str,
    records: Sequence[Record],
) -> Manifest:
    """Rank 0's part before the commit: the file all ranks share, and the manifest."""
    files = [(rank, _written(item)) for rank, record in enumerate(records) for item in record["files"]]
    commit.check_files(staging, files)
    if "optimizer" in session.config.save_contents:
        for number, part in enumerate(common["optimizers"]):
            part["step"] = _common_step(number, [record["steps"][number] for record in records])
        files.append((session.agreement.rank, write_plain(staging, layout.COMMON_FILE, "common", common)))
    names = sorted({name for _, file in files for name in file.names}, key=natural_order)
    position = {name: number for number, name in enumerate(names)}
    stages = {
        (s["pp"], s["vp"]): StageRecord(s["pp"], s["vp"], tuple(s["decoder"]), tuple(s["mtp"]))
        for r in records
        for s in r["stages"]
    }
    return Manifest(
        step=step,
        role=session.role,
        roles=roles,
        attempt=attempt,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions=_versions(),
        contents=session.config.save_contents,
        topology=session.topology,
        ranks=tuple(RankCoordinates(**record["coordinates"]) for record in records),
        stages=tuple(stage for _, stage in sorted(stages.items())),
        tensors=tuple(names),
        files=tuple(_file_record(rank, file, position) for rank, file in files),
    )


def _written(item: Record) -> WrittenFile:
    index = IndexPlace(**item["index"]) if item["index"] else None
    return WrittenFile(item["path"], item["kind"], item["size"], item["crc32"], index, tuple(item["names"]))


def _file_record(rank: int, file: WrittenFile, position: Mapping[str, int]) -> FileRecord:
    holds = tuple(runs(position[name] for name in file.names))
    return FileRecord(file.path, file.kind, rank, file.size, file.crc32, file.index, holds)


def _common_state(session: Session) -> dict[str, Any]:
    """What all ranks share of optimizer and scheduler, but for the steps, which rank 0 may not know."""
    return {
        "optimizers": [
            {
                "kind": optimizer_state.kind_of(part),
                "param_groups": optimizer_state.read_param_groups(part),
                "grad_scaler": optimizer_state.read_grad_scaler(part),
            }
            for part in optimizer_state.optimizer_parts(session.optimizer)
        ],
        "lr_scheduler": read_scheduler(session.lr_scheduler),
    }


def _common_step(part: int, by_rank: Sequence[float | int | None]) -> float | int | None:
    """The step of one chained optimizer: ranks that own nothing do not know it."""
    known = {step for step in by_rank if step is not None}
    if len(known) > 1:
        told = {step: by_rank.index(step) for step in sorted(known)}
        raise CommitError(
            f"optimizer {part} has done different numbers of steps on different ranks: {told} (step: first rank)"
        )
    return known.pop() if known else None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name, package in (("mcore_ckpt", "mcore_ckpt"), ("megatron_core", "megatron-core")):
        try:
            versions[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions
