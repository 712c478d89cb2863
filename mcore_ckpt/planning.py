"""The plan of one load: which stored bytes go into which tensor.

Everything that can be known from the manifest, the indexes, the sizes and the small files is checked here, and
nothing is changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt import layout
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.session import Session
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, PARAM, ReadRange, ShardKey, StoredShard, WantedShard, plan_reads
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.model import read_model
from mcore_ckpt.state.optimizer import OptimizerPart
from mcore_ckpt.state.scheduler import check_scheduler
from mcore_ckpt.state.shards import LocalShard, ParameterState
from mcore_ckpt.storage.dtypes import dtype_name, torch_dtype
from mcore_ckpt.storage.index import FileIndex
from mcore_ckpt.storage.manifest import FileRecord, Manifest, StageRecord
from mcore_ckpt.storage.reader import open_file, read_index, read_manifest, read_plain


@dataclass(frozen=True, eq=False)
class TensorFill:
    """One tensor to fill: where its bytes are, and how to get at its memory once it may change."""

    reads: tuple[ReadRange, ...]
    target: Callable[[], torch.Tensor]
    finish: Callable[[torch.Tensor], None] | None = None


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """Everything known, checked, and not yet applied."""

    manifest: Manifest
    role_dir: Path
    fills: tuple[TensorFill, ...]
    unstepped: tuple[tuple[OptimizerPart, ParameterState], ...]
    common: dict[str, Any] | None
    rng: dict[str, Any] | None
    extra_state: dict[str, Any] | None


@dataclass(frozen=True, eq=False)
class _Stored:
    """What the opened indexes hold: shards by key, and keys whose bytes are stored under another."""

    shards: dict[ShardKey, list[StoredShard]]
    aliases: dict[ShardKey, ShardKey]
    moments: dict[str, tuple[str, ...]]  # kinds of optimizer state by tensor name

    def fill(self, wanted: WantedShard, target: Callable[[], torch.Tensor]) -> TensorFill:
        return TensorFill(tuple(plan_reads(wanted, self.shards, self.aliases)), target)


def plan_load(session: Session, role_dir: Path) -> LoadPlan:
    """The plan of this rank. Changes nothing, and asks no other rank.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: `role_dir` is not a checkpoint, or a damaged one.
        CheckpointMismatchError: it does not fit; the message names file, tensor, wanted and found.
    """
    manifest = read_manifest(role_dir, layout.MANIFEST_FILE)
    try:
        _check_contents(session, manifest)
        _check_layout(session, manifest)
        return _plan(session, role_dir, manifest)
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{role_dir}: {error}{_depth_note(session, manifest)}") from error


def _plan(session: Session, role_dir: Path, manifest: Manifest) -> LoadPlan:
    wanted = session.config.load_contents
    model = read_model(session.chunks)
    by_part = _states(session, model)
    owned = [state for states in by_part for state in states]
    indexes = _read_indexes(session, role_dir, manifest, model, owned)
    stored = _stored(indexes.values())
    fills: list[TensorFill] = []
    unstepped: list[tuple[OptimizerPart, ParameterState]] = []
    common = rng = extra = None
    if "model" in wanted:
        fills += [_model_fill(session, shard, stored) for shard in model]
        _check_leftovers(session, model, indexes)
    if "optimizer" in wanted:
        common = _read_common(session, role_dir, manifest)
        optimizer_fills, unstepped = _optimizer_fills(session, by_part, stored)
        _check_optimizer_leftovers(session, model, stored)
        fills += optimizer_fills
    if "extra" in wanted:
        rng, extra = _read_extra(session, role_dir, manifest)
    _check_sizes(role_dir, manifest, fills)
    return LoadPlan(manifest, role_dir, tuple(fills), tuple(unstepped), common, rng, extra)


def _saved_depth(manifest: Manifest) -> int:
    return len({layer for stage in manifest.stages for layer in stage.decoder})


def _depth_note(session: Session, manifest: Manifest) -> str:
    saved = _saved_depth(manifest)
    return (
        ""
        if saved == session.num_layers
        else f" (the model has {session.num_layers} decoder layers, the checkpoint {saved})"
    )


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
    if _saved_depth(manifest) != session.num_layers:
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


def _states(session: Session, model: Sequence[LocalShard]) -> list[list[ParameterState]]:
    if "optimizer" not in session.config.load_contents:
        return []
    return optimizer_state.read_optimizer(session.optimizer, model, first_instance=True)


def _read_indexes(
    session: Session,
    role_dir: Path,
    manifest: Manifest,
    model: Iterable[LocalShard],
    owned: Iterable[ParameterState],
) -> dict[str, FileIndex]:
    """The indexes of the files that hold anything this rank wants, and of no others."""
    position = {name: number for number, name in enumerate(manifest.tensors)}
    in_model = _positions(position, ((shard.key.name, shard.expert) for shard in model))
    in_optimizer = _positions(position, ((state.name, state.expert) for state in owned))
    at, own = session.coordinates, _own_optimizer_file(session)
    indexes = {}
    for file in manifest.files:
        if file.index is None or not _is_asked_for(file, session.config.load_contents):
            continue
        dense, experts = in_optimizer if file.kind == "optimizer" else in_model
        writer = manifest.ranks[file.rank]
        wanted = (writer.tp == at.tp and _holds_any(file, dense)) or (
            writer.etp == at.etp and _holds_any(file, experts)
        )
        if wanted or file.path == own:
            indexes[file.path] = read_index(role_dir, file)
    return indexes


def _positions(position: Mapping[str, int], wanted: Iterable[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Sorted positions in the manifest of the wanted dense tensors, and of the experts'."""
    found: tuple[set[int], set[int]] = (set(), set())
    for name, expert in wanted:
        if name in position:
            found[expert].add(position[name])
    return sorted(found[False]), sorted(found[True])


def _is_asked_for(file: FileRecord, contents: Sequence[str]) -> bool:
    # Model files are needed for the optimizer too: fp32 main parameters are aliases of what is in them.
    return file.kind != "optimizer" or "optimizer" in contents


def _holds_any(file: FileRecord, positions: Sequence[int]) -> bool:
    for first, last in file.holds:
        at = bisect_left(positions, first)
        if at < len(positions) and positions[at] <= last:
            return True
    return False


def _stored(indexes: Iterable[FileIndex]) -> _Stored:
    shards: dict[ShardKey, list[StoredShard]] = {}
    aliases: dict[ShardKey, ShardKey] = {}
    moments: dict[str, dict[str, None]] = {}
    for index in indexes:
        for shard in index.shards:
            shards.setdefault(shard.key, []).append(shard)
            if shard.key.kind not in (MODEL, PARAM, OPAQUE):
                moments.setdefault(shard.key.name, {})[shard.key.kind] = None
        for alias in index.aliases:
            aliases[alias.key] = ShardKey(alias.key.name, alias.same_as)
    return _Stored(shards, aliases, {name: tuple(kinds) for name, kinds in moments.items()})


def _model_fill(session: Session, shard: LocalShard, stored: _Stored) -> TensorFill:
    at, apart = session.coordinates, session.topology.experts_apart and shard.expert
    file = layout.expert_file(at.etp, at.pp, at.ep) if apart else layout.model_file(at.tp, at.pp)
    if shard.key.kind != OPAQUE:
        return stored.fill(
            WantedShard(shard.key, shard.region, dtype_name(shard.tensor.dtype), file), lambda: shard.tensor
        )
    found = next((candidate for candidate in stored.shards.get(shard.key, ()) if candidate.file == file), None)
    if found is None:
        raise CheckpointMismatchError(
            f"{file}: tensor {shard.key}: wanted {shard.tensor.nbytes} bytes, found no such tensor"
        )
    read = ReadRange(found, 0, found.region.numel, 0)
    return TensorFill((read,), lambda: torch.empty(found.nbytes, dtype=torch.uint8), shard.restore)


def _check_leftovers(session: Session, model: Iterable[LocalShard], indexes: Mapping[str, FileIndex]) -> None:
    """What this rank's own files hold and the model does not have would be lost without a word."""
    at = session.coordinates
    wanted = {shard.key for shard in model}
    for path in (layout.model_file(at.tp, at.pp), layout.expert_file(at.etp, at.pp, at.ep)):
        for shard in indexes[path].shards if path in indexes else ():
            if shard.key not in wanted:
                raise CheckpointMismatchError(
                    f"{path}: tensor {shard.key}: wanted no such tensor, found {shard.region.describe()}"
                )


def _optimizer_fills(
    session: Session, by_part: Sequence[Sequence[ParameterState]], stored: _Stored
) -> tuple[list[TensorFill], list[tuple[OptimizerPart, ParameterState]]]:
    """The fills of main parameters and moments, and the parameters that had not been stepped when they were saved."""
    fills: list[TensorFill] = []
    unstepped = []
    for part, states in zip(optimizer_state.optimizer_parts(session.optimizer), by_part, strict=True):
        for state in states:
            # Asked for in any case: a parameter that was frozen must not pass for one that was not stepped yet.
            fill = _param_fill(session, state, stored)
            if not (state.is_model_view and "model" in session.config.load_contents):
                fills.append(fill)
            kinds = stored.moments.get(state.name, ())
            fills += [_moment_fill(session, part, state, kind, stored) for kind in kinds]
            if not kinds:
                unstepped.append((part, state))
    return fills, unstepped


def _check_optimizer_leftovers(session: Session, model: Sequence[LocalShard], stored: _Stored) -> None:
    """State of a parameter that is frozen now would be dropped without a word."""
    own = _own_optimizer_file(session)
    trainable = optimizer_state.trainable_names(model)
    for key, shards in stored.shards.items():
        if key.kind in (MODEL, OPAQUE) or key.name in trainable:
            continue
        for shard in shards:
            if shard.file == own:
                raise CheckpointMismatchError(
                    f"{own}: tensor {key}: wanted no such tensor, because the parameter is frozen now, found "
                    f"{shard.region.describe()}"
                )


def _param_fill(session: Session, state: ParameterState, stored: _Stored) -> TensorFill:
    key = ShardKey(state.name, PARAM)
    if key not in stored.shards and key not in stored.aliases:
        raise CheckpointMismatchError(
            f"{_own_optimizer_file(session)}: tensor {key}: wanted {state.region.describe()}, found no "
            "such tensor: the parameter was frozen when it was saved"
        )
    return stored.fill(_wanted(session, state, PARAM, dtype_name(state.main.dtype)), lambda: state.main)


def _moment_fill(
    session: Session, part: OptimizerPart, state: ParameterState, kind: str, stored: _Stored
) -> TensorFill:
    there = state.moments.get(kind)
    dtype = stored.shards[ShardKey(state.name, kind)][0].dtype if there is None else dtype_name(there.dtype)
    return stored.fill(
        _wanted(session, state, kind, dtype),
        lambda: optimizer_state.moment_tensor(part, state, kind, torch_dtype(dtype)),
    )


def _wanted(session: Session, state: ParameterState, kind: str, dtype: str) -> WantedShard:
    return WantedShard(ShardKey(state.name, kind), state.region, dtype, _own_optimizer_file(session))


def _own_optimizer_file(session: Session) -> str:
    at = session.coordinates
    return layout.optimizer_file(at.pp, at.tp, at.cp, at.dp)


def _check_sizes(role_dir: Path, manifest: Manifest, fills: Iterable[TensorFill]) -> None:
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
        optimizer_state.check_common(part, state)
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
