"""The model in per-rank folders of verl up to 0.4: what each rank called its tensors, put together without a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.formats.kinds import model_file, rank_dirs
from mcore_ckpt.formats.locate import same_bytes
from mcore_ckpt.formats.shard_reader import ShardReader, stored_shard
from mcore_ckpt.formats.torch_save_files import PtTensor, read_pt
from mcore_ckpt.models.table import MCORE_EMBEDDING, MCORE_HEAD
from mcore_ckpt.sharding.cuts import Cut, axes_of, has_sections
from mcore_ckpt.sharding.names import ChunkNames, ExpertNumbers, LayerNumber, expert_of
from mcore_ckpt.sharding.plan import StoredShard
from mcore_ckpt.sharding.regions import Shape
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows

_DECODER_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_FC1 = re.compile(r"(.*)linear_fc1\.(?:weight|bias)(\d*)")
# On the last pipeline rank alone, with or without virtual stages (`TransformerBlock`, megatron-core 0.16.1).
_FINAL_NORM = "decoder.final_layernorm.weight"

Chunk = Mapping[str, PtTensor]
_NO_SECTIONS: Mapping[str, tuple[int, ...]] = MappingProxyType({})


class _Ranks(NamedTuple):
    """The numbers in the name of a folder."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class _Held:
    """A tensor as one rank has it. `sections`: as in `Cut`."""

    tensor: PtTensor
    sections: tuple[int, ...]

    @property
    def looks(self) -> tuple[Any, ...]:
        return self.tensor.dtype, self.tensor.shape, self.sections


def open_verl_ranks(
    folder: Path, expected: Mapping[str, Shape], sections: Mapping[str, tuple[int, ...]] = _NO_SECTIONS
) -> ShardReader:
    """The global tensors of `model/mp_rank_*/model.pt`, under the names of the layer spec they were saved with.

    Layers are numbered from 0 in each file: their numbers follow from how many each virtual stage has. Experts are
    numbered from 0 on each expert-parallel rank.

    Args:
        folder: the role's.
        expected: the global shapes of the model's tensors, by any of their names, without padding of the vocabulary.
            They say what names do not: whether a tensor is cut at all (experts with a tensor-parallel size of their
            own, the down-projections of latent attention).
        sections: as in `Cut`, of tensors that have any, but for gate and up: these are told by their shapes.

    Raises:
        CheckpointNotFoundError: there are no such folders.
        CheckpointCorruptError: a file is missing or damaged, or the ranks' files are not of one checkpoint.
        CheckpointMismatchError: a tensor cannot be a part of the expected one, or the folders' names are ambiguous.
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
    reader: ShardReader,
    infos: Mapping[str, TensorInfo],
    expected: Mapping[str, Shape],
) -> ShardReader:
    """The last of several pipeline ranks keeps a copy of a tied embedding, as its output layer."""
    if (
        MCORE_HEAD not in infos
        or MCORE_HEAD in expected
        or MCORE_EMBEDDING not in infos
        or _is_value_head(MCORE_HEAD, infos[MCORE_HEAD].shape)
    ):
        return reader
    if not same_bytes(reader, MCORE_HEAD, MCORE_EMBEDDING):
        raise CheckpointMismatchError(
            f"{reader.place}: config.json says that the embeddings are tied (tie_word_embeddings), but {MCORE_HEAD} is "
            f"another tensor than {MCORE_EMBEDDING}: set tie_word_embeddings to false in config.json"
        )
    return reader.without([MCORE_HEAD])


# -- files and ranks ---------------------------------------------------------------------------------------


def _read_all(folder: Path) -> dict[_Ranks, list[Chunk]]:
    """Each rank's virtual chunks."""
    dirs = rank_dirs(folder)
    if not dirs:
        raise CheckpointNotFoundError(f"{folder}: has no model/mp_rank_*/model.pt: not a per-rank checkpoint of verl")
    if len({len(numbers) for numbers in dirs.values()}) > 1:
        raise CheckpointCorruptError(f"{folder / 'model'}: {sorted(dirs)} are not the folders of one checkpoint")
    read = {name: _chunks(folder / "model" / name) for name in dirs}
    is_pipeline = len(next(iter(dirs.values()))) == 2 and _second_is_pipeline(folder, dirs, read)
    return {_ranks(numbers, is_pipeline): read[name] for name, numbers in dirs.items()}


def _ranks(numbers: tuple[int, ...], is_pipeline: bool) -> _Ranks:
    if len(numbers) == 2:
        return _Ranks(numbers[0], numbers[1], 0) if is_pipeline else _Ranks(numbers[0], 0, numbers[1])
    return _Ranks(*numbers) if len(numbers) == 3 else _Ranks(numbers[0], 0, 0)


def _second_is_pipeline(folder: Path, dirs: Mapping[str, tuple[int, ...]], read: Mapping[str, Sequence[Chunk]]) -> bool:
    """megatron leaves the pipeline rank out if there is one, and the expert rank: `mp_rank_00_001` may be either's.

    Every expert-parallel rank has all that is not an expert, the last layer's norm among it; of pipeline ranks one.
    """
    having = [name for name in dirs if any(_FINAL_NORM in chunk for chunk in read[name])]
    seconds, with_norm = {dirs[name][1] for name in dirs}, {dirs[name][1] for name in having}
    if with_norm == seconds:
        return False
    if len(with_norm) == 1:
        return True
    raise CheckpointMismatchError(
        f"{folder / 'model'}: it cannot be told whether the second number of {sorted(dirs)[-1]} is the pipeline or the "
        f"expert rank: {_FINAL_NORM} is in {sorted(having)}, not in one or all of them. Rename the folders to "
        "mp_rank_TT_PPP_EEE, with both numbers"
    )


def _chunks(folder: Path) -> list[Chunk]:
    file = model_file(folder)
    assert file is not None, "rank_dirs has seen it"
    saved = read_pt(file)
    return [
        _chunk(f"{file}: chunk {number}", chunk)
        for number, chunk in enumerate(saved if isinstance(saved, (list, tuple)) else [saved])
    ]


def _chunk(where: str, saved: Any) -> Chunk:
    if not isinstance(saved, Mapping):
        raise CheckpointCorruptError(f"{where}: wanted a state dict, found a {type(saved).__name__}")
    # Wrappers that hand on their state dict unchanged (DDP, Float16Module) did not always do so.
    bare = {re.sub(r"^(?:module\.)+", "", str(name)): value for name, value in saved.items()}
    # transformer-engine's _extra_state is of use with FP8 only.
    stored = {name: value for name, value in bare.items() if not name.endswith("_extra_state") and value is not None}
    for name, value in stored.items():
        if not isinstance(value, PtTensor):
            raise CheckpointCorruptError(f"{where}: {name}: wanted a tensor, found a {type(value).__name__}")
    return stored


def _check_ranks(folder: Path, ranks: Sequence[_Ranks]) -> int:
    """The tensor-parallel size. Every rank must be there, though not every expert rank beside every tensor rank."""
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
            f"{folder / 'model'}: missing is the folder of {'; '.join(missing[:4])}, of tp={tp}, pp={pp}, ep={ep}: was "
            "it saved to another node's disk?"
        )
    return tp


# -- names -------------------------------------------------------------------------------------------------


def _by_global_name(folder: Path, chunks: Mapping[_Ranks, Sequence[Chunk]]) -> dict[str, dict[_Ranks, _Held]]:
    """Which ranks have a tensor: all that have an expert, of the others one of each tensor-parallel rank."""
    found: dict[str, dict[_Ranks, _Held]] = {}
    for ranks, number, chunk, names in _named_chunks(folder, chunks):
        for local, tensor in chunk.items():
            try:
                name = names.to_global(local)
            except KeyError as error:
                raise CheckpointCorruptError(f"{tensor.path}: chunk {number}: {error.args[0]}") from None
            holders = found.setdefault(name, {})
            # A tied embedding, or one that multi-token prediction brings, is on two pipeline ranks.
            if expert_of(name) or all(other.tp != ranks.tp for other in holders):
                holders[ranks] = _Held(tensor, _sections(local, chunk))
    return found


def _named_chunks(
    folder: Path, chunks: Mapping[_Ranks, Sequence[Chunk]]
) -> Iterator[tuple[_Ranks, int, Chunk, ChunkNames]]:
    vpp = {len(of_rank) for of_rank in chunks.values()}
    if len(vpp) > 1:
        raise CheckpointCorruptError(f"{folder / 'model'}: its files have {sorted(vpp)} virtual chunks, not the same")
    first = 0
    # Layers go through all pipeline ranks before they come to the first one's next virtual stage.
    for number in range(vpp.pop()):
        for stage in sorted({ranks.pp for ranks in chunks}):
            of_stage = {ranks: of_rank[number] for ranks, of_rank in chunks.items() if ranks.pp == stage}
            counts = {ranks: _layers(chunk) for ranks, chunk in of_stage.items()}
            if len(set(counts.values())) > 1:
                raise CheckpointCorruptError(
                    f"{folder / 'model'}: pipeline rank {stage}, chunk {number}: its files have {set(counts.values())} "
                    "layers, not the same: files of different checkpoints?"
                )
            layers = next(iter(counts.values()))
            numbers = tuple(LayerNumber("decoder.layers", local, first + local) for local in range(layers))
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
    """Gate and up are two, one behind the other: twice as many rows as the next layer has columns."""
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
                f"{first.tensor.path} has {list(first.tensor.shape)} {first.tensor.dtype}: files of different "
                "checkpoints?"
            )
    # Experts may be cut into fewer parts than the rest, which then are on as many ranks.
    size = len(held) if expert_of(name) else tp
    cut, shape = _cut(name, first, size, wanted)
    if cut.axis is None:
        held = held[:1]
    if cut.axis is not None and len(held) != size:
        raise CheckpointCorruptError(f"{first.tensor.path}: tensor {name}: is in {len(held)} of {size} ranks' files")
    shards = tuple(stored_shard(name, part.tensor, cut.region(shape, rank, size)) for rank, part in enumerate(held))
    return TensorInfo(first.tensor.dtype, shape), shards


def _cut(name: str, held: _Held, size: int, wanted: Shape | None) -> tuple[Cut, Shape]:
    local = held.tensor.shape
    if _is_value_head(name, local):
        return Cut(None), local
    if size > 1 and len(held.sections) == 1 and has_sections(name):
        raise CheckpointMismatchError(
            f"{held.tensor.path}: tensor {name}: {list(local)} of one of {size} ranks are several tensors, each cut by "
            "itself, and the table of this architecture does not say how long each is (Row.sections)"
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
    # A rank's file has its tensor-parallel rank in its name: of experts that are cut further, one part wrote over the
    # others.
    lost = ", or were experts cut into more parts than the rest, of which verl kept one" if expert_of(name) else ""
    raise CheckpointMismatchError(
        f"{held.tensor.path}: tensor {name}: has {list(local)} on one of {size} ranks, which is no part of "
        f"{list(wanted)}: is it config.json of this model{lost}?"
    )


def _is_value_head(name: str, shape: Shape) -> bool:
    """Every tensor-parallel rank has all of it, and the output layer's name, of which config.json need not know."""
    return name == MCORE_HEAD and shape[:1] == (1,)


def _whole(local: Shape, axis: int | None, size: int) -> Shape:
    return local if axis is None else (*local[:axis], local[axis] * size, *local[axis + 1 :])
