"""Checkpoints of any tensors in any files, written by the storage layer, and trainers to load them into."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.index import Alias
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, WrittenFile, encode_manifest
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.checkpoint.plain_files import pickle_plain, write_plain
from mcore_ckpt.checkpoint.reading import read_index
from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.formats.locate import Locator
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.ranks.meeting import single_process_agreement
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, Coding, ShardKey, runs
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.trainer import Trainer
from tests.support.checkpoints import write_alone
from tests.support.unsharded_model import trainer_of

# The kinds of small files, by their folders.
_KINDS = {"optim": "common", "rng_states": "rng", "extra_state": "extra"}
MODEL_FILE, OPTIMIZER_FILE = file_names.model_file(0, 0), file_names.optimizer_file(0, 0, 0, 0)


def shard(
    name: str,
    tensor: torch.Tensor,
    kind: str = MODEL,
    region: Region | None = None,
    coding: Coding | None = None,
    beside: str | None = None,
) -> TensorWrite:
    """A tensor to store: whole, unless it is given a region."""
    path = (name,) if kind in (MODEL, OPAQUE) else ("state", name, kind)
    region = region or Region.whole(tuple(tensor.shape))
    return TensorWrite(path, ShardKey(name, kind), region, tensor, tuple(tensor.shape), coding=coding, beside=beside)


def checkpoint(
    folder: Path,
    files: Mapping[str, Sequence[TensorWrite]],
    *,
    aliases: Sequence[Alias] = (),
    plain: Mapping[str, Mapping[str, Any]] | None = None,
    topology: Topology | None = None,
    **fields: Any,
) -> Path:
    """Writes a role's folder: files of tensors by path, small files by path, and a manifest with these fields.

    `aliases` are those of the optimizer's files.
    """
    folder.mkdir(parents=True)
    topology = topology or Topology()
    written = [_file(folder, path, tensors, aliases) for path, tensors in files.items()]
    names = {each.key.name for tensors in files.values() for each in tensors}
    names |= {alias.key.name for alias in aliases}
    tensors = tuple(sorted(names, key=natural_order))
    holds = [Holds(runs(_held(folder, file, tensors))) for file in written]
    for path, values in (plain or {}).items():
        written.append(write_plain(folder, path, _KINDS[path.partition("/")[0]], pickle_plain(dict(values))))
        holds.append(Holds())
    manifest = Manifest(
        step=5,
        role=folder.name,
        roles=(folder.name,),
        attempt="a" * 32,
        created="2025-01-01T00:00:00+00:00",
        versions={},
        contents=fields.pop("contents", ("model", "optimizer", "extra")),
        topology=topology,
        ranks=fields.pop("ranks", (RankCoordinates(),)),
        stages=(),
        tensors=tensors,
        files=tuple(
            FileRecord(file.path, file.kind, 0, file.size, file.crc32, file.index, held)
            for file, held in zip(written, holds, strict=True)
        ),
        **fields,
    )
    (folder / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return folder


def _file(folder: Path, path: str, tensors: Sequence[TensorWrite], aliases: Sequence[Alias]) -> WrittenFile:
    if path.startswith("model/"):
        return write_alone(folder, WriteRequest(path, "model", tuple(tensors)))
    return write_alone(folder, WriteRequest(path, "optimizer", tuple(tensors), tuple(aliases), ("state",)))


def _held(folder: Path, file: WrittenFile, names: Sequence[str]) -> list[int]:
    index = read_index(folder, FileRecord(file.path, file.kind, 0, file.size, file.crc32, file.index))
    keys = [*(each.key for each in index.shards), *(each.key for each in index.aliases)]
    return [names.index(key.name) for key in keys]


def locator_of(folder: Path, trainer: Trainer | None = None) -> Locator:
    """The locator with which a trainer, or the only rank, reads a checkpoint."""
    trainer = trainer or trainer_of(torch.nn.Module(), None)
    position = RankPosition(trainer.topology, trainer.coordinates)
    return Locator(NativeReader.open(folder), position, trainer.vocab_size, trainer.layers)


def lone_trainer(model: torch.nn.Module, optimizer: Any, **config: Any) -> Trainer:
    """`trainer_of` with an agreement of this rank alone."""
    return replace(trainer_of(model, optimizer, **config), agreement=single_process_agreement("test", 30.0))
