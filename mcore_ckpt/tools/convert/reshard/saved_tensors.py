"""Lists the tensors of a checkpoint, each with its stored kinds and the region of each tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.sharding.names import expert_of, is_expert
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, PARAM, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region, Shape


@dataclass(frozen=True)
class SavedTensor:
    """One global tensor of a checkpoint.

    Attributes:
        model: the kind of the shards in the model's files, MODEL or OPAQUE; None if the tensor is only in the
            optimizer's files.
        moments: the kinds of the tensor's optimizer state, without the main parameter.
        main: True if the optimizer has a main parameter for the tensor.
        aliased: True if this main parameter is the model's own tensor.
        seen: the local region of each tensor-parallel rank, or of each expert-tensor-parallel rank if the tensor is an
            expert's. Empty if `model` is OPAQUE.
        pp: the first pipeline rank that wrote the tensor.
        file: a file that has the tensor, for messages.
    """

    name: str
    model: str | None
    moments: tuple[str, ...]
    main: bool
    aliased: bool
    seen: dict[int, Region]
    pp: int
    file: str

    @property
    def expert(self) -> bool:
        return is_expert(self.name)

    @property
    def shape(self) -> Shape:
        """The global shape. Do not call this for an OPAQUE tensor."""
        return next(iter(self.seen.values())).global_shape


def saved_tensors(reader: NativeReader) -> Iterator[SavedTensor]:
    """Yields all tensors of a checkpoint, in the order of the manifest. Reads every index.

    Raises CheckpointCorruptError if an index is missing or damaged, and UnsupportedError if a tensor has optimizer
    state that cannot be divided anew.
    """
    for name in reader.manifest.tensors:
        if (found := _saved_tensor(reader, name)) is not None:
            yield found


def _saved_tensor(reader: NativeReader, name: str) -> SavedTensor | None:
    model_files = reader.files(ShardKey(name, MODEL))
    model, shards = None, list[StoredShard]()
    for kind in (MODEL, OPAQUE):
        if not shards and (shards := reader.shards(ShardKey(name, kind), model_files)):
            model = kind
    main_key = ShardKey(name, PARAM)
    if kinds := reader.bound_kinds(main_key):
        raise UnsupportedError(
            f"{reader.place}: tensor {name}: the optimizer state has {', '.join(kinds)}, which fit only the shards of "
            "the saved layout: load the checkpoint directly, with reset_moments=True"
        )
    files = reader.files(main_key)
    main = reader.shards(main_key, files)
    aliased = not main and reader.is_alias(main_key)
    moments = tuple(kind for kind in reader.kinds_in(name, files) if kind != PARAM)
    if not shards and not main:
        return None
    shown = shards or main
    pp = min(reader.manifest.ranks[file.rank].pp for file in (model_files if shards else files))
    seen = {} if model == OPAQUE else _local_regions(reader, name, shown)
    return SavedTensor(name, model, moments, bool(main) or aliased, aliased, seen, pp, shown[0].file)


def _local_regions(reader: NativeReader, name: str, shards: Iterable[StoredShard]) -> dict[int, Region]:
    """Returns the whole local region of each tensor-parallel rank. A stored shard may have only a part of that region.

    Raises UnsupportedError: the tensor is cut among the expert-parallel ranks.
    """
    expert = is_expert(name)
    seen: dict[int, Region] = {}
    for shard in shards:
        at = reader.manifest.ranks[reader.file(shard.file).rank]
        region = shard.region.with_flat(0, prod(shard.region.local_shape))
        if seen.setdefault(at.etp if expert else at.tp, region) != region and expert_of(name) is None and expert:
            raise UnsupportedError(
                f"{reader.place}: tensor {name}: is cut among the expert-parallel ranks: load the checkpoint directly "
                "under the new layout"
            )
    return seen
