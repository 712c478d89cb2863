"""What a checkpoint holds: which files have a tensor, and where in them.

Opens the index of a file when a tensor in it is first asked for: of a thousand ranks' files, one rank needs few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.native.folder import Folder, LocalFolder
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, ShardKey, StoredShard


@dataclass(frozen=True, eq=False)
class _Opened:
    shards: dict[ShardKey, StoredShard]
    aliases: dict[ShardKey, ShardKey]
    kinds: dict[str, tuple[str, ...]]


class Catalog:
    """The tensors of one checkpoint.

    Args:
        folder: where it is; a path is that of a local folder.
        manifest: its manifest.
    """

    def __init__(self, folder: Path | Folder, manifest: Manifest) -> None:
        self.manifest = manifest
        self.folder = LocalFolder(folder) if isinstance(folder, Path) else folder
        self._opened: dict[str, _Opened] = {}

    @property
    def role_dir(self) -> Path:
        """The path of a local folder."""
        assert isinstance(self.folder, LocalFolder), f"{self.folder} is not local"
        return self.folder.place

    @cached_property
    def positions(self) -> dict[str, int]:
        """The names of all tensors, and their positions in the manifest's list."""
        return {name: number for number, name in enumerate(self.manifest.tensors)}

    @cached_property
    def _holders(self) -> tuple[list[list[FileRecord]], list[list[FileRecord]]]:
        """By position: the model's files that hold the tensor, and the optimizer's."""
        model: list[list[FileRecord]] = [[] for _ in self.manifest.tensors]
        optimizer: list[list[FileRecord]] = [[] for _ in self.manifest.tensors]
        for file in self.manifest.files:
            holders = optimizer if file.kind == "optimizer" else model
            for first, last in file.holds:
                for position in range(first, last + 1):
                    holders[position].append(file)
        return model, optimizer

    @cached_property
    def by_path(self) -> dict[str, FileRecord]:
        """The manifest's records of all files."""
        return {file.path: file for file in self.manifest.files}

    def file(self, path: str) -> FileRecord:
        """The manifest's record of a file that should be there. Raises CheckpointCorruptError if it is not listed."""
        if path not in self.by_path:
            raise CheckpointCorruptError(f"{self.folder}/{file_names.MANIFEST_FILE}: does not list {path}")
        return self.by_path[path]

    def files(self, key: ShardKey) -> list[FileRecord]:
        """The files that may hold a shard: the model's for model tensors, the optimizer's for the rest."""
        position = self.positions.get(key.name)
        if position is None:
            return []
        return self._holders[0 if key.kind in (MODEL, OPAQUE) else 1][position]

    def shards(self, key: ShardKey, files: Iterable[FileRecord]) -> list[StoredShard]:
        """The key's shards in these files. Raises CheckpointCorruptError for a bad index."""
        found = (self._open(file).shards.get(key) for file in files)
        return [shard for shard in found if shard is not None]

    def alias(self, key: ShardKey, files: Iterable[FileRecord]) -> ShardKey | None:
        """The key that has the bytes of this one; None if they are its own."""
        return next((alias for file in files if (alias := self._open(file).aliases.get(key)) is not None), None)

    def kinds(self, name: str, files: Iterable[FileRecord]) -> tuple[str, ...]:
        """Which parts of a tensor's optimizer state these files hold."""
        return tuple(dict.fromkeys(kind for file in files for kind in self._open(file).kinds.get(name, ())))

    def _open(self, file: FileRecord) -> _Opened:
        opened = self._opened.get(file.path)
        if opened is None:
            index = self.folder.index(file)
            aliases = {alias.key: ShardKey(alias.key.name, alias.same_as) for alias in index.aliases}
            opened = _Opened({shard.key: shard for shard in index.shards}, aliases, _kinds(index.shards))
            self._opened[file.path] = opened
        return opened


def _kinds(shards: Sequence[StoredShard]) -> dict[str, tuple[str, ...]]:
    kinds: dict[str, tuple[str, ...]] = {}
    for shard in shards:
        kinds[shard.key.name] = (*kinds.get(shard.key.name, ()), shard.key.kind)
    return kinds
