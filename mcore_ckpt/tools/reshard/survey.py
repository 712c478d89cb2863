"""What a checkpoint holds of each tensor, and how it was cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from mcore_ckpt.formats.native.catalog import Catalog
from mcore_ckpt.sharding.names import is_expert
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, PARAM, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region, Shape


@dataclass(frozen=True)
class SavedTensor:
    """One global tensor.

    Attributes:
        model: MODEL, OPAQUE, or None if only the optimizer has it.
        moments: kinds of the optimizer's state but for the main parameter.
        main: whether the optimizer has it; `aliased`: its main parameter is the model's own tensor.
        seen: the local region of each tensor-parallel rank (of experts: expert-tensor-parallel rank); not of OPAQUE.
        pp: the first pipeline rank that wrote it.
        file: one it is in, for messages.
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
        return next(iter(self.seen.values())).global_shape


def survey(catalog: Catalog) -> Iterator[SavedTensor]:
    """All tensors in the manifest's order. Opens every index.

    Raises:
        CheckpointCorruptError: an index is missing, cut or damaged.
    """
    for name in catalog.manifest.tensors:
        if (found := _survey(catalog, name)) is not None:
            yield found


def _survey(catalog: Catalog, name: str) -> SavedTensor | None:
    model_files = catalog.files(ShardKey(name, MODEL))
    model, shards = None, list[StoredShard]()
    for kind in (MODEL, OPAQUE):
        if not shards and (shards := catalog.shards(ShardKey(name, kind), model_files)):
            model = kind
    main_key = ShardKey(name, PARAM)
    files = catalog.files(main_key)
    main = catalog.shards(main_key, files)
    aliased = not main and catalog.alias(main_key, files) is not None
    moments = tuple(kind for kind in catalog.kinds(name, files) if kind != PARAM)
    if not shards and not main:
        return None
    shown = shards or main
    pp = min(catalog.manifest.ranks[file.rank].pp for file in (model_files if shards else files))
    seen = {} if model == OPAQUE else _seen(catalog, shown, is_expert(name))
    return SavedTensor(name, model, moments, bool(main) or aliased, aliased, seen, pp, shown[0].file)


def _seen(catalog: Catalog, shards: Iterable[StoredShard], expert: bool) -> dict[int, Region]:
    """Whole local regions by rank, of however small parts of them."""
    seen: dict[int, Region] = {}
    for shard in shards:
        at = catalog.manifest.ranks[catalog.file(shard.file).rank]
        region = shard.region.with_flat(0, prod(shard.region.local_shape))
        seen.setdefault(at.etp if expert else at.tp, region)
    return seen
