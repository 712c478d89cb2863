"""Where in a checkpoint the parts of a wanted tensor are, whatever layout it was saved under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.formats.native.catalog import Catalog
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.sharding.plan import OPAQUE, PARAM, ReadRange, ShardKey, StoredShard, plan_reads
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, only_padding_differs


@dataclass(frozen=True)
class Wanted:
    """A part of the training state.

    Attributes:
        key: global name, as this model has it, and kind.
        region: what part of the global tensor.
        expert: it belongs to routed experts.
        file: where this layout would have it, for messages.
    """

    key: ShardKey
    region: Region
    expert: bool
    file: str


@dataclass(frozen=True)
class Source:
    """Reads that fill a wanted tensor.

    Attributes:
        reads: each element once, but for those outside.
        dtype: of what is stored.
        outside: how many elements are padding that the saved vocabulary did not have.
    """

    reads: tuple[ReadRange, ...]
    dtype: str
    outside: int


class Sources:
    """Finds the stored parts of what one rank wants.

    Args:
        catalog: what there is.
        topology, coordinates: this rank's layout and place.
        vocab_size: of the vocabulary without padding; None if nobody said.
    """

    def __init__(
        self, catalog: Catalog, topology: Topology, coordinates: RankCoordinates, vocab_size: int | None
    ) -> None:
        self.catalog = catalog
        self._topology = topology
        self._at = coordinates
        self._vocab_size = vocab_size

    def stored_key(self, key: ShardKey) -> ShardKey | None:
        """The key under the name that the checkpoint has for the tensor; None if it does not have it."""
        name = found_as(key.name, self.catalog.positions)
        return None if name is None else ShardKey(name, key.kind)

    def find(self, wanted: Wanted) -> Source | None:
        """Where the bytes are; None if the checkpoint has no such tensor.

        Raises:
            CheckpointMismatchError: the tensor there has another shape.
            CheckpointCorruptError: elements are in none of the files.
        """
        key = self.stored_key(wanted.key)
        if key is None:
            return None
        for files in self._by_nearness(key, wanted.expert):
            stored = self.catalog.shards(key, files)
            if not stored and key.kind == PARAM and (alias := self.catalog.alias(key, files)) is not None:
                return self.find(Wanted(alias, wanted.region, wanted.expert, wanted.file))
            for shard in stored:
                self._check_shape(wanted, shard)
            plan = plan_reads(wanted.region, stored)
            if stored and not plan.missing:
                return Source(plan.reads, _dtype(wanted, stored), plan.outside)
        if not stored:
            return None
        raise CheckpointCorruptError(
            f"{', '.join(sorted({shard.file for shard in stored}))}: tensor {wanted.key}: {plan.missing} elements of "
            f"{wanted.region.describe()} are in none of these files"
        )

    def opaque(self, wanted: Wanted) -> StoredShard | None:
        """Bytes that belong to a module whole: those of the rank that was in this one's place, or the first there are.

        A module of grouped experts has one such state on each expert-parallel rank, under the same name.
        """
        assert wanted.key.kind == OPAQUE
        key = self.stored_key(wanted.key)
        if key is None:
            return None
        manifest = self.catalog.manifest
        ep = self._at.ep * manifest.topology.ep // self._topology.ep if wanted.expert else None
        for files in self._by_nearness(key, wanted.expert):
            in_place = [file for file in files if ep is None or manifest.ranks[file.rank].ep == ep]
            if found := self.catalog.shards(key, in_place or files):
                return found[0]
        return None

    def moments(self, name: str, expert: bool) -> tuple[str, ...]:
        """Kinds of optimizer state, but for the main parameter, that there are of a tensor."""
        key = self.stored_key(ShardKey(name, PARAM))
        if key is None:
            return ()
        for files in self._by_nearness(key, expert):
            if kinds := self.catalog.kinds(key.name, files):
                return tuple(kind for kind in kinds if kind != PARAM)
        return ()

    def _by_nearness(self, key: ShardKey, expert: bool) -> list[list[FileRecord]]:
        """The files of the tensor-parallel ranks that should have this rank's part, then all: for what is cut unlike
        the rest.

        The lowest rank first: of what is replicated over tensor-parallel ranks, every part comes from one of them.
        """
        files = self.catalog.files(key)
        saved, ranks = self.catalog.manifest.topology, self.catalog.manifest.ranks
        size, wanted_size = (saved.etp, self._topology.etp) if expert else (saved.tp, self._topology.tp)
        at = self._at.etp if expert else self._at.tp

        def rank_of(file: FileRecord) -> int:
            return ranks[file.rank].etp if expert else ranks[file.rank].tp

        ordered = sorted(files, key=rank_of)
        near = [
            file
            for file in ordered
            if rank_of(file) * wanted_size < (at + 1) * size and at * size < (rank_of(file) + 1) * wanted_size
        ]
        return [near, ordered] if len(near) < len(ordered) else [near]

    def _check_shape(self, wanted: Wanted, shard: StoredShard) -> None:
        mine, theirs = wanted.region.global_shape, shard.region.global_shape
        if mine == theirs:
            return
        described = f"wanted {wanted.region.describe()}, found {shard.region.describe()}"
        only_rows = len(mine) == len(theirs) > 0 and mine[1:] == theirs[1:]
        if not (only_rows and has_vocabulary_rows(wanted.key.name)):
            raise CheckpointMismatchError(f"{shard.file}: tensor {wanted.key}: {described}")
        sizes = (self.catalog.manifest.topology.tp, self._topology.tp)
        if not only_padding_differs((theirs[0], mine[0]), sizes, self._vocab_size):
            known = "" if self._vocab_size is None else f" of the {self._vocab_size} tokens"
            raise CheckpointMismatchError(
                f"{shard.file}: tensor {wanted.key}: {described}: the vocabularies differ by more than padding{known}. "
                "If it is padding, say how many tokens there are (CheckpointConfig.vocab_size)"
            )


def _dtype(wanted: Wanted, stored: Sequence[StoredShard]) -> str:
    dtypes = {shard.dtype for shard in stored}
    if len(dtypes) > 1:
        raise CheckpointCorruptError(f"tensor {wanted.key} is stored with several dtypes: {', '.join(sorted(dtypes))}")
    return dtypes.pop()
