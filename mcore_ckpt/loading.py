"""One load: the walk of a save back.

Whatever can be known from manifest, indexes, sizes and the small files is checked, and agreed by all ranks, before a
byte of the training state changes.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt import layout
from mcore_ckpt.errors import (
    AgreementError,
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from mcore_ckpt.knobs import READ_CHUNK_BYTES
from mcore_ckpt.session import Session
from mcore_ckpt.sharding.plan import ReadRange, ShardKey, StoredShard, WantedShard, plan_reads
from mcore_ckpt.staging.copy import as_bytes
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.model import gather_parameters, read_model
from mcore_ckpt.state.optimizer import OptimizerPart
from mcore_ckpt.state.rng import write_rng
from mcore_ckpt.state.scheduler import check_scheduler, keeps_own_rates, write_scheduler
from mcore_ckpt.state.shards import LocalShard, ParameterState
from mcore_ckpt.storage import steps
from mcore_ckpt.storage.agreement import Record, decide
from mcore_ckpt.storage.dtypes import dtype_name, torch_dtype
from mcore_ckpt.storage.index import OPAQUE, FileIndex
from mcore_ckpt.storage.manifest import FileRecord, Manifest, StageRecord
from mcore_ckpt.storage.reader import RangeReader, open_file, read_index, read_manifest, read_plain

logger = logging.getLogger(__name__)

_MODEL = "model"
_PARAM = "param"


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank.

    Attributes:
        path: the checkpoint's folder.
        nbytes: read by this rank from files of tensors.
        seconds: from the call to the last agreement.
        skipped: why newer checkpoints were not taken, the newest first.
    """

    path: Path
    nbytes: int
    seconds: float
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class LoadResult:
    """`extra_state` is what this rank handed to `save`, or None."""

    step: int
    extra_state: dict[str, Any] | None
    report: LoadReport


@dataclass(frozen=True, eq=False)
class _Fill:
    """One tensor to fill: where its bytes are, and how to get at its memory once it may change."""

    reads: tuple[ReadRange, ...]
    target: Callable[[], torch.Tensor]
    finish: Callable[[torch.Tensor], None] | None = None


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Everything known, checked, and not yet applied."""

    manifest: Manifest
    role_dir: Path
    fills: tuple[_Fill, ...]
    unstepped: tuple[tuple[OptimizerPart, ParameterState], ...]
    common: dict[str, Any] | None
    rng: dict[str, Any] | None
    extra_state: dict[str, Any] | None


def load_checkpoint(session: Session, step: int | None, path: Path | None) -> LoadResult:
    """Loads the newest complete checkpoint, or the one asked for.

    A checkpoint that turns out bad is passed over for the next older one, by all ranks together, unless one was asked
    for or `strict` is set.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointMismatchError: it does not fit; nothing has changed.
        CheckpointCorruptError: it is damaged, and there is no other to take. The message says whether anything has
            changed.
    """
    started = time.monotonic()
    found = decide(session.agreement, "finding a checkpoint", dict, lambda _: _candidates(session, step, path))
    candidates = [(int(number), Path(folder)) for number, folder in found["candidates"]]
    skipped: list[str] = []
    changed = False
    for number, (saved_step, role_dir) in enumerate(candidates):
        try:
            prepared = _prepare_together(session, role_dir)
            changed = True
            nbytes = _apply_together(session, prepared)
        except CheckpointCorruptError as error:
            if session.config.strict or number == len(candidates) - 1:
                raise _final(error, skipped, changed) from error
            logger.warning("step %d cannot be loaded, taking the next older one: %s", saved_step, error)
            skipped.append(str(error))
            continue
        report = LoadReport(role_dir, nbytes, time.monotonic() - started, tuple(skipped))
        return LoadResult(prepared.manifest.step, prepared.extra_state, report)
    raise AssertionError("unreachable: there is at least one candidate, and the last one returns or raises")


def _final(error: CheckpointCorruptError, skipped: Sequence[str], changed: bool) -> CheckpointCorruptError:
    state = (
        "Model and optimizer are now undefined: load another checkpoint before training on"
        if changed
        else "Nothing has been changed"
    )
    newer = "".join(f"\n  newer, also bad: {text}" for text in skipped)
    return CheckpointCorruptError(f"{error}. {state}{newer}")


def _candidates(session: Session, step: int | None, path: Path | None) -> Record:
    if path is not None:
        if not path.is_dir():
            raise CheckpointNotFoundError(f"{path}: there is no such folder")
        return {"candidates": [(0, str(path.absolute()))]}
    statuses = steps.list_steps(session.root)
    if step is not None:
        statuses = [status for status in statuses if status.step == step]
    good = [status for status in statuses if status.is_complete and session.role in status.committed]
    if not good:
        what = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        reasons = "".join(f"\n  {_reason(status, session.role)}" for status in reversed(statuses))
        raise CheckpointNotFoundError(f"{session.root}: {what} of {session.role}{reasons}")
    if step is None:
        steps.warn_if_tracker_differs(session.root, good[-1].step)
    return {"candidates": [(status.step, str(status.path / session.role)) for status in reversed(good)]}


def _reason(status: steps.StepStatus, role: str) -> str:
    return status.reason if not status.is_complete else f"{status.path}: complete, but without {role}"


# -- first round: know everything, change nothing ----------------------------------------------------------


def _prepare_together(session: Session, role_dir: Path) -> _Prepared:
    prepared: list[_Prepared] = []

    def work() -> Record:
        try:
            prepared.append(_prepare(session, role_dir))
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(f"{role_dir}: {error}") from error
        return {"attempt": prepared[0].manifest.attempt}

    def combine(records: Sequence[Record]) -> Record:
        attempts = [record["attempt"] for record in records]
        others = [rank for rank, attempt in enumerate(attempts) if attempt != attempts[0]]
        if others:
            raise AgreementError(
                f"{role_dir}: ranks {others} see another checkpoint there than rank 0: not one shared file system"
            )
        return {}

    decide(session.agreement, f"checking {role_dir}", work, combine)
    return prepared[0]


def _prepare(session: Session, role_dir: Path) -> _Prepared:
    manifest = read_manifest(role_dir, layout.MANIFEST_FILE)
    _check_contents(session, manifest)
    _check_layout(session, manifest)
    wanted = session.config.load_contents
    model = read_model(session.chunks)
    fills: list[_Fill] = []
    unstepped: list[tuple[OptimizerPart, ParameterState]] = []
    common = None
    indexes = _read_indexes(session, role_dir, manifest, model)
    stored, aliases = _by_key(indexes)
    if "model" in wanted:
        fills += [_model_fill(session, shard, stored, aliases) for shard in model]
        _check_leftovers(session, manifest, model, indexes)
    if "optimizer" in wanted:
        common = _read_common(session, role_dir, manifest)
        optimizer_fills, unstepped = _optimizer_fills(session, model, stored, aliases)
        fills += optimizer_fills
    _check_sizes(role_dir, manifest, fills)
    rng, extra = _read_extra(session, role_dir, manifest) if "extra" in wanted else (None, None)
    return _Prepared(manifest, role_dir, tuple(fills), tuple(unstepped), common, rng, extra)


def _check_contents(session: Session, manifest: Manifest) -> None:
    missing = [word for word in session.config.load_contents if word not in manifest.contents]
    if missing:
        raise CheckpointMismatchError(
            f"load_contents asks for {', '.join(missing)}, the checkpoint has {', '.join(manifest.contents)}"
        )


def _check_layout(session: Session, manifest: Manifest) -> None:
    if manifest.topology != session.topology or session.coordinates not in manifest.ranks:
        raise CheckpointMismatchError(
            f"was saved on {manifest.topology}, this is {session.topology}. Loading under another parallel "
            "layout is not supported yet: use the layout it was saved with"
        )
    ours, theirs = ({(stage.pp, stage.vp): stage for stage in stages} for stages in (session.stages, manifest.stages))
    if len({layer for stage in manifest.stages for layer in stage.decoder}) != session.num_layers:
        return  # another model, not another split: the tensors will say which
    for place, stage in ours.items():
        found = theirs.get(place)
        if found != stage:
            raise CheckpointMismatchError(
                f"pipeline stage pp={place[0]}, vp={place[1]}: wanted layers {_layers(stage)}, found "
                f"{_layers(found) if found else 'no such stage'}. Loading under another pipeline split is not "
                "supported yet: use the one it was saved with"
            )


def _layers(stage: StageRecord) -> str:
    return f"{list(stage.decoder)}" + (f" and MTP {list(stage.mtp)}" if stage.mtp else "")


def _read_indexes(
    session: Session, role_dir: Path, manifest: Manifest, model: Iterable[LocalShard]
) -> dict[str, FileIndex]:
    """The indexes of the files that hold anything this rank wants, and of no others."""
    position = {name: number for number, name in enumerate(manifest.tensors)}
    dense, experts = (
        sorted({position[s.key.name] for s in model if s.expert == is_expert and s.key.name in position})
        for is_expert in (False, True)
    )
    indexes = {}
    for file in manifest.files:
        if file.index is None or not _is_asked_for(file, session.config.load_contents):
            continue
        at = manifest.ranks[file.rank]
        if (at.tp == session.coordinates.tp and _holds_any(file, dense)) or (
            at.etp == session.coordinates.etp and _holds_any(file, experts)
        ):
            indexes[file.path] = read_index(role_dir, file)
    return indexes


def _is_asked_for(file: FileRecord, contents: Sequence[str]) -> bool:
    # Model files are needed for the optimizer too: fp32 main parameters are aliases of what is in them.
    return file.kind != "optimizer" or "optimizer" in contents


def _holds_any(file: FileRecord, positions: Sequence[int]) -> bool:
    for first, last in file.holds:
        at = bisect_left(positions, first)
        if at < len(positions) and positions[at] <= last:
            return True
    return False


def _by_key(indexes: Mapping[str, FileIndex]) -> tuple[dict[ShardKey, list[StoredShard]], dict[ShardKey, ShardKey]]:
    stored: dict[ShardKey, list[StoredShard]] = {}
    aliases: dict[ShardKey, ShardKey] = {}
    for index in indexes.values():
        for shard in index.shards:
            stored.setdefault(shard.key, []).append(shard)
        for alias in index.aliases:
            aliases[alias.key] = ShardKey(alias.key.name, alias.same_as)
    return stored, aliases


def _model_fill(
    session: Session,
    shard: LocalShard,
    stored: Mapping[ShardKey, Sequence[StoredShard]],
    aliases: Mapping[ShardKey, ShardKey],
) -> _Fill:
    at, apart = session.coordinates, session.topology.experts_apart and shard.expert
    file = layout.expert_file(at.etp, at.pp, at.ep) if apart else layout.model_file(at.tp, at.pp)
    if shard.key.kind != OPAQUE:
        wanted = WantedShard(shard.key, shard.region, dtype_name(shard.tensor.dtype), file)
        return _Fill(tuple(plan_reads(wanted, stored, aliases)), lambda: shard.tensor)
    found = next((s for s in stored.get(shard.key, ()) if s.file == file), None)
    if found is None:
        raise CheckpointMismatchError(
            f"{file}: tensor {shard.key}: wanted {shard.tensor.nbytes} bytes, found no such tensor"
        )
    read = ReadRange(found, 0, found.region.numel, 0)
    return _Fill((read,), lambda: torch.empty(found.nbytes, dtype=torch.uint8), shard.restore)


def _own_model_files(session: Session, manifest: Manifest) -> list[FileRecord]:
    """The files this rank's place in the layout would write the model to."""
    at = session.coordinates
    return [
        file
        for file in manifest.files
        if (file.kind == "model" and (manifest.ranks[file.rank].tp, manifest.ranks[file.rank].pp) == (at.tp, at.pp))
        or (
            file.kind == "experts"
            and (manifest.ranks[file.rank].etp, manifest.ranks[file.rank].pp, manifest.ranks[file.rank].ep)
            == (at.etp, at.pp, at.ep)
        )
    ]


def _check_leftovers(
    session: Session, manifest: Manifest, model: Iterable[LocalShard], indexes: Mapping[str, FileIndex]
) -> None:
    wanted = {shard.key for shard in model}
    for file in _own_model_files(session, manifest):
        for shard in indexes[file.path].shards if file.path in indexes else ():
            if shard.key not in wanted:
                raise CheckpointMismatchError(
                    f"{file.path}: tensor {shard.key}: wanted no such tensor, found {shard.region.describe()}"
                )


def _optimizer_fills(
    session: Session,
    model: Sequence[LocalShard],
    stored: Mapping[ShardKey, Sequence[StoredShard]],
    aliases: Mapping[ShardKey, ShardKey],
) -> tuple[list[_Fill], list[tuple[OptimizerPart, ParameterState]]]:
    kinds: dict[str, set[str]] = {}
    for key in stored:
        if key.kind not in (_MODEL, _PARAM, OPAQUE):
            kinds.setdefault(key.name, set()).add(key.kind)
    fills: list[_Fill] = []
    unstepped = []
    at = session.coordinates
    file = layout.optimizer_file(at.pp, at.tp, at.cp, at.dp)
    parts = optimizer_state.optimizer_parts(session.optimizer)
    for part, states in zip(parts, optimizer_state.read_optimizer(session.optimizer, model, True), strict=True):
        for state in states:
            if not (state.is_model_view and "model" in session.config.load_contents):
                wanted = WantedShard(ShardKey(state.name, _PARAM), state.region, dtype_name(state.main.dtype), file)
                fills.append(_Fill(tuple(plan_reads(wanted, stored, aliases)), _main_of(state)))
            for kind in sorted(kinds.get(state.name, ())):
                wanted = WantedShard(ShardKey(state.name, kind), state.region, _moment_dtype(state, kind, stored), file)
                fills.append(_Fill(tuple(plan_reads(wanted, stored, aliases)), _moment_of(part, state, wanted)))
            if state.name not in kinds:
                unstepped.append((part, state))
    return fills, unstepped


def _main_of(state: ParameterState) -> Callable[[], torch.Tensor]:
    return lambda: state.main


def _moment_dtype(state: ParameterState, kind: str, stored: Mapping[ShardKey, Sequence[StoredShard]]) -> str:
    there = state.moments.get(kind)
    return stored[ShardKey(state.name, kind)][0].dtype if there is None else dtype_name(there.dtype)


def _moment_of(part: OptimizerPart, state: ParameterState, wanted: WantedShard) -> Callable[[], torch.Tensor]:
    return lambda: optimizer_state.moment_tensor(part, state, wanted.key.kind, torch_dtype(wanted.dtype))


def _check_sizes(role_dir: Path, manifest: Manifest, fills: Iterable[_Fill]) -> None:
    """Finds missing and cut files while nothing has changed yet."""
    files = {file.path: file for file in manifest.files}
    for path in {read.stored.file for fill in fills for read in fill.reads}:
        with open_file(role_dir, files[path]):
            pass


def _read_common(session: Session, role_dir: Path, manifest: Manifest) -> dict[str, Any]:
    common = read_plain(role_dir, _record_at(role_dir, manifest, layout.COMMON_FILE))
    parts = optimizer_state.optimizer_parts(session.optimizer)
    saved = common["optimizers"]
    if len(saved) != len(parts):
        raise CheckpointMismatchError(
            f"{layout.COMMON_FILE}: has the state of {len(saved)} chained optimizers, wanted {len(parts)}"
        )
    for part, state in zip(parts, saved, strict=True):
        optimizer_state.match_groups(part, state["param_groups"])
    check_scheduler(session.lr_scheduler, common["lr_scheduler"])
    return common


def _read_extra(session: Session, role_dir: Path, manifest: Manifest) -> tuple[dict[str, Any], dict[str, Any] | None]:
    at = session.coordinates
    place = (at.pp, at.tp, at.cp, at.dp)
    rng = read_plain(role_dir, _record_at(role_dir, manifest, layout.rng_file(*place)))
    path = layout.extra_file(*place)
    if not any(file.path == path for file in manifest.files):
        return rng, None
    return rng, read_plain(role_dir, _record_at(role_dir, manifest, path))


def _record_at(role_dir: Path, manifest: Manifest, path: str) -> FileRecord:
    for file in manifest.files:
        if file.path == path:
            return file
    raise CheckpointCorruptError(f"{role_dir / layout.MANIFEST_FILE}: does not list {path}")


# -- second round: apply -----------------------------------------------------------------------------------


def _apply_together(session: Session, prepared: _Prepared) -> int:
    nbytes: list[int] = []

    def work() -> Record:
        nbytes.append(_apply(session, prepared))
        return {}

    decide(session.agreement, f"loading {prepared.role_dir}", work, lambda _: {})
    _make_consistent(session)
    return nbytes[0]


def _apply(session: Session, prepared: _Prepared) -> int:
    files = {file.path: file for file in prepared.manifest.files}
    with torch.no_grad(), RangeReader(prepared.role_dir, files, session.arena.take(READ_CHUNK_BYTES)) as reader:
        for fill in prepared.fills:
            _apply_fill(reader, fill)
    if prepared.common is not None:
        _apply_common(session, prepared)
    if prepared.rng is not None:
        write_rng(prepared.rng)
    return reader.nbytes


def _apply_fill(reader: RangeReader, fill: _Fill) -> None:
    tensor = fill.target()
    memory = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    for read in fill.reads:
        reader.read(read, as_bytes(memory))
    if memory is not tensor:
        tensor.copy_(memory)
    if fill.finish is not None:
        fill.finish(tensor)


def _apply_common(session: Session, prepared: _Prepared) -> None:
    assert prepared.common is not None
    for part, state in prepared.unstepped:
        optimizer_state.forget_state(part, state)
    # The scheduler first: loading it sets the groups' rates, from fields it has not all read yet.
    write_scheduler(session.lr_scheduler, prepared.common["lr_scheduler"])
    keep_rates = keeps_own_rates(session.lr_scheduler)
    for part, saved in zip(
        optimizer_state.optimizer_parts(session.optimizer), prepared.common["optimizers"], strict=True
    ):
        optimizer_state.write_param_groups(part, saved["param_groups"], keep_rates)
        optimizer_state.write_step(part, saved["step"])
        optimizer_state.write_grad_scaler(part, saved["grad_scaler"])


def _make_consistent(session: Session) -> None:
    """Model and main parameters must agree before the next step. Collective, so only after all ranks have agreed."""
    contents = session.config.load_contents
    if "model" in contents and "optimizer" not in contents and session.optimizer is not None:
        # Else the next step writes the old main parameters back over the loaded weights.
        session.optimizer.reload_model_params()
    if "optimizer" in contents and "model" not in contents:
        optimizer_state.copy_main_to_model(session.optimizer)
        gather_parameters(session.chunks)
