"""Reads the bytes of the tensors in a native checkpoint. `stored_tensors.py` finds the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.contract import RankPosition, ReadTarget, ReadTargets, TensorInfo
from mcore_ckpt.formats.native.coded import Partners, read_coded
from mcore_ckpt.formats.native.folder import Folder, LocalFolder
from mcore_ckpt.formats.native.stored_tensors import StoredTensors
from mcore_ckpt.sharding.plan import MODEL, ReadRange, ShardKey, StoredShard, plan_reads

# The dtype of upper halves.
_UPPER = "bfloat16"


class NativeReader(StoredTensors):
    """Reads one native checkpoint; implements `formats.contract.CheckpointReader`.

    Args:
        folder, manifest: see `StoredTensors`.

    Example:
        >>> reader = NativeReader.open(Path("checkpoints/global_steps_100/actor"))  # doctest: +SKIP
        >>> reader.info(ShardKey("decoder.final_layernorm.weight", MODEL)).shape  # doctest: +SKIP
        (4096,)
    """

    folder: Folder

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        super().__init__(folder, manifest)
        self._partners: dict[tuple[ShardKey, str], Partners] = {}

    @staticmethod
    def open(role_dir: Path) -> NativeReader:
        """Opens a local folder. Raises CheckpointNotFoundError or CheckpointCorruptError."""
        return NativeReader(LocalFolder(role_dir), read_manifest(role_dir))

    def info(self, key: ShardKey) -> TensorInfo | None:
        """See `CheckpointReader.info`."""
        # Look into one file at a time, and stop at the first shard, because each file's index takes a read.
        shard = next((shard for file in self.files(key) for shard in self.shards(key, [file])), None)
        if shard is None:
            return None
        return TensorInfo(torch_dtype(shard.dtype), shard.region.global_shape)

    def read(self, ranges: ReadTargets, check: bool = True) -> int:
        plain: list[ReadTarget] = []
        coded: list[ReadTarget] = []
        for part in ranges:
            (plain if part[0].stored.coding is None else coded).append(part)

        def fill(parts: Sequence[ReadTarget]) -> int:
            return self.folder.fill(self.by_path, parts, check)

        return fill(plain) + (read_coded(coded, fill, self.partners) if coded else 0)

    def plain(self, path: str) -> dict[str, Any]:
        """Reads the values in a small file. Raises CheckpointCorruptError if the file is missing or damaged."""
        return self.folder.plain(self.file(path))

    def partners(self, shard: StoredShard) -> Partners:
        """Finds the data that, together with a coded shard's elements, gives the shard's values.

        Raises CheckpointCorruptError: upper halves of some elements are in no file.
        """
        found = self._partners.get((shard.key, shard.file))
        if found is None:
            found = self._partners[shard.key, shard.file] = self._find_partners(shard)
        return found

    def _find_partners(self, shard: StoredShard) -> Partners:
        coding, name, file = shard.coding, shard.key.name, self.file(shard.file)
        assert coding is not None
        if coding.scale is not None:
            return Partners(scale=self._open(file, name).shards[ShardKey(name, coding.scale)])
        assert coding.upper is not None
        if coding.upper != MODEL:
            upper = self._open(file, name).shards[ShardKey(name, coding.upper)]
            return Partners(upper=(ReadRange.whole(upper),))
        manifest = self.manifest
        position = RankPosition(manifest.topology, manifest.ranks[file.rank])
        for stored in self.parts(ShardKey(name, MODEL), position):
            plan = plan_reads(shard.region, stored)
            if not (plan.missing or plan.outside) and {each.dtype for each in stored} == {_UPPER}:
                return Partners(upper=plan.reads)
        raise CheckpointCorruptError(
            f"{self.folder}/{shard.file}: tensor {shard.key}: has only the lower 16 bits of each value, and the "
            f"model's files lack some of the upper 16 bits as {_UPPER}"
        )
