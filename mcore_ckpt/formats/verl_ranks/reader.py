"""Reads the model from the per-rank folders of verl up to 0.4, and maps each rank's names to global names.

These folders number layers per chunk, so the global numbers are computed from the files of the whole pipeline. The cut
of a tensor is not stored. The tensor's name allows some cuts, and the reader takes the cut that gives the shape that
`config.json` requires.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.formats.locate import same_bytes
from mcore_ckpt.formats.shard_reader import ShardReader, stored_shard
from mcore_ckpt.formats.torch_save_files import PtTensor, as_state_dict, as_tensor, read_pt
from mcore_ckpt.formats.verl_ranks.kind import bare_name, model_file, rank_dirs
from mcore_ckpt.models.table import MCORE_EMBEDDING, MCORE_HEAD
from mcore_ckpt.sharding.cuts import Cut, axes_of, has_sections
from mcore_ckpt.sharding.names import ChunkNames, ExpertNumbers, LayerNumber, expert_of
from mcore_ckpt.sharding.plan import StoredShard
from mcore_ckpt.sharding.regions import Shape
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.sharding.towers import LANGUAGE_MODEL, split_language_model
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows

_DECODER_LAYER = re.compile(r"(?:language_model\.)?decoder\.layers\.(\d+)\.")
_FC1 = re.compile(r"(.*)linear_fc1\.(?:weight|bias)(\d*)")
# Only the last pipeline rank has this norm, with or without virtual stages (`TransformerBlock`, megatron-core 0.16.1).
_FINAL_NORM = "decoder.final_layernorm.weight"

Chunk = Mapping[str, PtTensor]
_NO_SECTIONS: Mapping[str, tuple[int, ...]] = MappingProxyType({})


class _Ranks(NamedTuple):
    """The tensor-, pipeline- and expert-parallel ranks in a folder's name."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class _Held:
    """One rank's part of a tensor, and the tensor's sections (see `Cut`)."""

    tensor: PtTensor
    sections: tuple[int, ...]

    @property
    def looks(self) -> tuple[Any, ...]:
        return self.tensor.dtype, self.tensor.shape, self.sections


def open_verl_ranks(
    folder: Path, expected: Mapping[str, Shape], sections: Mapping[str, tuple[int, ...]] = _NO_SECTIONS
) -> ShardReader:
    """Opens `model/mp_rank_*/model.pt`. Global names follow the layer spec that the tensors were saved with.

    Each file numbers its layers from 0. The global numbers are computed from the number of layers of each virtual
    stage. Each expert-parallel rank numbers its experts from 0.

    Args:
        expected: the global shapes of the model's tensors, without padding of the vocabulary, each under any of the
            tensor's synonyms. The shapes show how the tensors are cut. Names alone do not show how down-projections of
            latent attention are cut, or how experts with a separate tensor-parallel size are cut.
        sections: the sections (see `Cut`) of tensors that have sections. Gate and up need not be listed, because the
            shape shows that they are fused.

    Raises:
        CheckpointNotFoundError: the folder has no file `model/mp_rank_*/model.pt`.
        CheckpointCorruptError: a file is missing or damaged, or the files belong to different checkpoints.
        CheckpointMismatchError: a tensor cannot be a part of the expected tensor, or the folders' names are ambiguous.
    """
    chunks = _read_all(folder)
    tp = _check_ranks(folder, list(chunks))
    held = _by_global_name(folder, chunks)
    shards: dict[str, tuple[StoredShard, ...]] = {}
    infos: dict[str, TensorInfo] = {}
    for name, by_rank in held.items():
        wanted = found_as(name, expected)
        if wanted is not None and wanted in sections:
            by_rank = {ranks: replace(held, sections=sections[wanted]) for ranks, held in by_rank.items()}
        infos[name], shards[name] = _put_together(name, by_rank, tp, None if wanted is None else expected[wanted])
    reader = ShardReader(folder, infos, shards.__getitem__)
    return _without_copied_head(reader, infos, expected)


def _without_copied_head(
    reader: ShardReader, infos: Mapping[str, TensorInfo], expected: Mapping[str, Shape]
) -> ShardReader:
    """Leaves out the output layer if it is the last pipeline rank's copy of the tied embedding."""
    head = found_as(MCORE_HEAD, infos)
    embedding = found_as(MCORE_EMBEDDING, infos)
    if head is None or found_as(head, expected) or embedding is None or _is_value_head(head, infos[head].shape):
        return reader
    if not same_bytes(reader, head, embedding):
        raise CheckpointMismatchError(
            f"{reader.place}: config.json declares tied embeddings (tie_word_embeddings), but {head} "
            f"differs from {embedding}: set tie_word_embeddings to false in config.json"
        )
    return reader.without([head])


# -- files and ranks ---------------------------------------------------------------------------------------


def _read_all(folder: Path) -> dict[_Ranks, list[Chunk]]:
    """Reads each rank's chunks."""
    dirs = rank_dirs(folder)
    if not dirs:
        raise CheckpointNotFoundError(f"{folder}: has no model/mp_rank_*/model.pt: not a per-rank checkpoint of verl")
    if len({len(numbers) for numbers in dirs.values()}) > 1:
        raise CheckpointCorruptError(f"{folder / 'model'}: {sorted(dirs)} do not belong to one checkpoint")
    read = {name: _chunks(folder / "model" / name) for name in dirs}
    is_pipeline = len(next(iter(dirs.values()))) == 2 and _second_is_pipeline(folder, dirs, read)
    return {_ranks(numbers, is_pipeline): read[name] for name, numbers in dirs.items()}


def _ranks(numbers: tuple[int, ...], is_pipeline: bool) -> _Ranks:
    if len(numbers) == 2:
        return _Ranks(numbers[0], numbers[1], 0) if is_pipeline else _Ranks(numbers[0], 0, numbers[1])
    return _Ranks(*numbers) if len(numbers) == 3 else _Ranks(numbers[0], 0, 0)


def _second_is_pipeline(folder: Path, dirs: Mapping[str, tuple[int, ...]], read: Mapping[str, Sequence[Chunk]]) -> bool:
    """Returns True if the second number of `mp_rank_00_001` is a pipeline rank, False if it is an expert rank.

    Without pipeline parallelism, megatron leaves the pipeline rank out of the name; without expert parallelism, it
    leaves out the expert rank. Every expert-parallel rank has the final norm, but only one pipeline rank does.
    """
    having = [name for name in dirs if any(found_as(_FINAL_NORM, chunk) for chunk in read[name])]
    seconds, with_norm = {dirs[name][1] for name in dirs}, {dirs[name][1] for name in having}
    if with_norm == seconds:
        return False
    if len(with_norm) == 1:
        return True
    raise CheckpointMismatchError(
        f"{folder / 'model'}: it is unclear whether the second number of {sorted(dirs)[-1]} is the pipeline or the "
        f"expert rank, because {_FINAL_NORM} is in {sorted(having)}. Rename the folders to mp_rank_TT_PPP_EEE, with "
        "both numbers"
    )


def _chunks(folder: Path) -> list[Chunk]:
    file = model_file(folder)
    assert file is not None, "rank_dirs returns only folders with a model file"
    saved = read_pt(file)
    return [
        _chunk(f"{file}: chunk {number}", chunk)
        for number, chunk in enumerate(saved if isinstance(saved, (list, tuple)) else [saved])
    ]


def _chunk(where: str, saved: Any) -> Chunk:
    bare = {bare_name(str(name)): value for name, value in as_state_dict(saved, where).items()}
    # Leave out transformer-engine's _extra_state, because only FP8 needs this state.
    stored = {name: value for name, value in bare.items() if not name.endswith("_extra_state") and value is not None}
    return {name: as_tensor(value, f"{where}: {name}") for name, value in stored.items()}


def _check_ranks(folder: Path, ranks: Sequence[_Ranks]) -> int:
    """Returns the tensor-parallel size. Raises CheckpointCorruptError if the folder of a rank is missing.

    An expert-parallel rank need not exist for every tensor-parallel rank.
    """
    tp, pp, ep = (max(numbers) + 1 for numbers in zip(*ranks, strict=True))
    dense = {(rank.tp, rank.pp) for rank in ranks}
    experts = {(rank.pp, rank.ep) for rank in ranks}
    missing = [f"tp={t} pp={p}" for t in range(tp) for p in range(pp) if (t, p) not in dense]
    missing += [f"pp={p} ep={e}" for p in range(pp) for e in range(ep) if (p, e) not in experts]
    if not missing:
        counts = {key: sum((rank.pp, rank.ep) == key for rank in ranks) for key in experts}
        missing = [f"a rank of pp={p} ep={e}" for (p, e), n in sorted(counts.items()) if n < max(counts.values())]
    if missing:
        raise CheckpointCorruptError(
            f"{folder / 'model'}: the folder of {'; '.join(missing[:4])} is missing (tp={tp}, pp={pp}, ep={ep}): if it "
            "is on another node's disk, copy it here"
        )
    return tp


# -- names -------------------------------------------------------------------------------------------------


def _by_global_name(folder: Path, chunks: Mapping[_Ranks, Sequence[Chunk]]) -> dict[str, dict[_Ranks, _Held]]:
    """Groups the ranks' tensors by global name.

    Keeps a part from every rank for an expert's tensor, and one part per tensor-parallel rank for any other tensor.
    """
    found: dict[str, dict[_Ranks, _Held]] = {}
    for ranks, number, chunk, names in _named_chunks(folder, chunks):
        for local, tensor in chunk.items():
            try:
                name = names.to_global(local)
            except KeyError as error:
                raise CheckpointCorruptError(f"{tensor.path}: chunk {number}: {error.args[0]}") from None
            holders = found.setdefault(name, {})
            # Two pipeline ranks have the same embedding if the embedding is tied or multi-token prediction uses it.
            if expert_of(name) or all(other.tp != ranks.tp for other in holders):
                holders[ranks] = _Held(tensor, _sections(local, chunk))
    return found


def _named_chunks(
    folder: Path, chunks: Mapping[_Ranks, Sequence[Chunk]]
) -> Iterator[tuple[_Ranks, int, Chunk, ChunkNames]]:
    vpp = {len(of_rank) for of_rank in chunks.values()}
    if len(vpp) > 1:
        raise CheckpointCorruptError(
            f"{folder / 'model'}: its files have different numbers of virtual chunks ({sorted(vpp)}): are they files "
            "of different checkpoints?"
        )
    first = 0
    # Global layer numbers go through the first virtual stage of all pipeline ranks, then through the second virtual
    # stage of all pipeline ranks, and so on.
    for number in range(vpp.pop()):
        for stage in sorted({ranks.pp for ranks in chunks}):
            of_stage = {ranks: of_rank[number] for ranks, of_rank in chunks.items() if ranks.pp == stage}
            counts = {ranks: _layers(chunk) for ranks, chunk in of_stage.items()}
            if len(set(counts.values())) > 1:
                raise CheckpointCorruptError(
                    f"{folder / 'model'}: pipeline rank {stage}, chunk {number}: its files have different numbers of "
                    f"layers ({set(counts.values())}): are they files of different checkpoints?"
                )
            layers = next(iter(counts.values()))
            numbers = tuple(
                LayerNumber(f"{prefix}decoder.layers", local, first + local)
                for prefix in ("", LANGUAGE_MODEL)
                for local in range(layers)
            )
            for ranks, chunk in sorted(of_stage.items()):
                yield ranks, number, chunk, ChunkNames(numbers, tuple(_experts(chunk, ranks.ep)))
            first += layers


def _layers(chunk: Chunk) -> int:
    return 1 + max((int(match[1]) for name in chunk if (match := _DECODER_LAYER.match(name))), default=-1)


def _experts(chunk: Chunk, ep: int) -> Iterator[ExpertNumbers]:
    highest: dict[str, int] = {}
    for name in chunk:
        if expert := expert_of(name):
            highest[expert[0]] = max(expert[1], highest.get(expert[0], 0))
    for prefix, last in highest.items():
        yield ExpertNumbers(prefix, ep * (last + 1), last + 1)


# -- shapes ------------------------------------------------------------------------------------------------


def _sections(name: str, chunk: Chunk) -> tuple[int, ...]:
    """Returns the sections of a tensor: two for fused gate and up (twice as many rows as `linear_fc2` has columns)."""
    match = _FC1.fullmatch(name)
    behind = None if match is None else chunk.get(f"{match[1]}linear_fc2.weight{match[2]}")
    if behind is None or len(behind.shape) != 2:
        return (1,)
    return (1, 1) if chunk[name].shape[0] == 2 * behind.shape[1] else (1,)


def _put_together(
    name: str, by_rank: Mapping[_Ranks, _Held], tp: int, wanted: Shape | None
) -> tuple[TensorInfo, tuple[StoredShard, ...]]:
    held = [of_rank for _, of_rank in sorted(by_rank.items())]
    first = held[0]
    for other in held:
        if other.looks != first.looks:
            raise CheckpointCorruptError(
                f"{other.tensor.path}: tensor {name}: has {list(other.tensor.shape)} {other.tensor.dtype}, "
                f"{first.tensor.path} has {list(first.tensor.shape)} {first.tensor.dtype}: are they files of different "
                "checkpoints?"
            )
    # An expert can be cut into fewer parts than other tensors: into as many parts as there are ranks with this expert.
    size = len(held) if expert_of(name) else tp
    cut, shape = _cut(name, first, size, wanted)
    if cut.axis is None:
        held = held[:1]
    elif len(held) != size:
        raise CheckpointCorruptError(
            f"{first.tensor.path}: tensor {name}: is in the files of only {len(held)} of {size} ranks"
        )
    shards = tuple(stored_shard(name, part.tensor, cut.region(shape, rank, size)) for rank, part in enumerate(held))
    return TensorInfo(first.tensor.dtype, shape), shards


def _cut(name: str, held: _Held, size: int, wanted: Shape | None) -> tuple[Cut, Shape]:
    local = held.tensor.shape
    if _is_value_head(name, local):
        return Cut(None), local
    if size > 1 and len(held.sections) == 1 and has_sections(name):
        raise CheckpointMismatchError(
            f"{held.tensor.path}: tensor {name}: has {list(local)} on one of {size} ranks, in several sections that "
            "are cut separately, but the table of this architecture does not give the lengths of the sections: add "
            "Row.sections to the table"
        )
    axes = [axis for axis in dict.fromkeys((*axes_of(name), None)) if axis is None or axis < len(local)]
    possible = [(Cut(axis, held.sections if axis is not None else (1,)), _whole(local, axis, size)) for axis in axes]
    if wanted is None:
        return possible[0]
    for cut, shape in possible:
        if shape == wanted:
            return cut, shape
    for cut, shape in possible:
        if has_vocabulary_rows(name) and shape[0] > wanted[0] and shape[1:] == wanted[1:]:
            return cut, shape
    # verl named the files by tensor-parallel rank. If experts were cut into more parts than other tensors, ranks
    # overwrote each other's files.
    lost = (
        "; if experts were cut into more parts than other tensors, verl kept only one of these parts"
        if expert_of(name)
        else ""
    )
    raise CheckpointMismatchError(
        f"{held.tensor.path}: tensor {name}: has {list(local)} on one of {size} ranks, but config.json requires "
        f"{list(wanted)} in all: use the config.json of this model{lost}"
    )


def _is_value_head(name: str, shape: Shape) -> bool:
    """Returns True for a value head.

    A value head has the output layer's name, is not cut, and need not be in config.json.
    """
    return split_language_model(name)[1] == MCORE_HEAD and shape[:1] == (1,)


def _whole(local: Shape, axis: int | None, size: int) -> Shape:
    return local if axis is None else (*local[:axis], local[axis] * size, *local[axis + 1 :])
