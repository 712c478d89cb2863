"""Reads two checkpoints as one: adapters and the base model that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.contract import CheckpointReader, RankPosition, ReadTarget, ReadTargets, TensorInfo
from mcore_ckpt.sharding.plan import MODEL, ShardKey, StoredShard


class JoinedReader:
    """Reads the tensors of two readers; implements `formats.contract.CheckpointReader`.

    Args:
        first: one reader. Its tensor names must differ from the other reader's tensor names.
        second: the other reader.

    Raises UnsupportedError: the weights of one reader are the optimizer's main parameters.
    """

    weight_kind = MODEL

    def __init__(self, first: CheckpointReader, second: CheckpointReader) -> None:
        for reader in (first, second):
            if reader.weight_kind != MODEL:
                raise UnsupportedError(
                    f"{reader.place}: has the adapters' weights only as the optimizer's main parameters: use a "
                    "checkpoint that was saved with 'model' in save_contents"
                )
        self._readers = (first, second)
        self.place: Path | str = first.place

    @cached_property
    def names(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(name for reader in self._readers for name in reader.names)}

    def info(self, key: ShardKey) -> TensorInfo | None:
        return self._of(key.name).info(key)

    def kinds(self, name: str, position: RankPosition | None = None) -> tuple[str, ...]:
        return self._of(name).kinds(name, position)

    def parts(self, key: ShardKey, position: RankPosition | None = None) -> Iterator[Sequence[StoredShard]]:
        return self._of(key.name).parts(key, position)

    def tp_size(self, expert: bool) -> int:
        return self._readers[0].tp_size(expert)

    def read(self, ranges: ReadTargets, check: bool = True) -> int:
        by_reader: tuple[list[ReadTarget], ...] = ([], [])
        for read in ranges:
            by_reader[self._readers.index(self._of(read[0].stored.key.name))].append(read)
        return sum(reader.read(own, check) for reader, own in zip(self._readers, by_reader, strict=True) if own)

    def _of(self, name: str) -> CheckpointReader:
        return self._readers[0] if name in self._readers[0].names else self._readers[1]
