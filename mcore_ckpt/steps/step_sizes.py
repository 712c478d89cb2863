"""Computes how large a step is and when it was saved, from its roles' manifests.

This module reads whole manifests. `listing.py` reads only the beginning of a manifest, because reading the whole
manifest of a large run takes long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.io.disk_space import Amount, DiskSpace, Need
from mcore_ckpt.steps.listing import StepStatus
from mcore_ckpt.steps.node_files import NodeFiles, files_of_node

NO_FILES = Amount(0, 0)


@dataclass(frozen=True)
class StepSize:
    """The size of a step's committed roles.

    Attributes:
        nbytes: the bytes of all files.
        created: when the last of the roles was saved (ISO 8601, UTC); empty if no role is committed.
        taken: the space that the files take on a disk with blocks of 4 KiB.
        of_nodes: for each role that was saved into the fast tier, which files the folder has: a part or all of them.
    """

    nbytes: int
    created: str
    taken: Mapping[str, Amount]
    of_nodes: Mapping[str, NodeFiles] = field(default_factory=dict)


def size_of(status: StepStatus) -> StepSize:
    """Returns the size of a step's committed roles. A role counts as empty if its manifest cannot be read."""
    found = {role: size for role in sorted(status.committed) if (size := _size_of_role(status.role_dir(role)))}
    spread = [role for role, size in found.items() if size.is_spread]
    of_nodes = {role: held for role in spread if (held := _held(status.role_dir(role))) is not None}
    return StepSize(
        nbytes=sum(of_nodes[role].nbytes if role in of_nodes else size.nbytes for role, size in found.items()),
        created=max((size.created for size in found.values()), default=""),
        taken={role: size.taken for role, size in found.items()},
        of_nodes=of_nodes,
    )


def _held(role_dir: Path) -> NodeFiles | None:
    try:
        return files_of_node(role_dir, read_manifest(role_dir))
    except (OSError, CheckpointNotFoundError, CheckpointCorruptError):
        return None


def taken_by(statuses: Iterable[StepStatus]) -> Amount:
    """Returns the space that the files of all committed roles of some steps take."""
    return sum((taken for status in statuses for taken in size_of(status).taken.values()), NO_FILES)


@dataclass(frozen=True)
class StepNeed:
    """The need of a save that writes the same files as a step.

    Attributes:
        kept: the need of the step's files, its folder and one owner file. One owner file is enough, because the owner
            file of a role is gone when the next role saves.
        passing: about how many more bytes a role writes and deletes again before its commit; the largest number among
            the roles. These bytes are the tensors of a model that is kept only in HuggingFace's form (`hf_model`
            without `model`).
    """

    kept: Need
    passing: int = 0


def need_of(status: StepStatus) -> StepNeed:
    """Returns the need of a save that writes the same files as a step. Raises an error if a manifest cannot be read."""
    needs = [_need_of_role(status.role_dir(role), status.path.parent) for role in sorted(status.committed)]
    owner = Need(sizes=(1,))
    return StepNeed(Need.sum([owner, *(need.kept for need in needs)]), max((need.passing for need in needs), default=0))


def _need_of_role(role_dir: Path, root: Path) -> StepNeed:
    size = (role_dir / file_names.MANIFEST_FILE).stat().st_size
    manifest = read_manifest(role_dir)
    files = [(file.path, file.size) for file in manifest.files]
    files.append((file_names.MANIFEST_FILE, size))
    folder = role_dir.relative_to(root)
    exported = 0
    if "hf_model" in manifest.contents and "model" not in manifest.contents:
        exported = sum(file.size for file in manifest.files if file.path.endswith(".safetensors"))
    return StepNeed(Need.of((str(folder / path), size) for path, size in files), exported)


@dataclass(frozen=True)
class _RoleSize:
    nbytes: int
    created: str
    taken: Amount
    is_spread: bool


def _size_of_role(role_dir: Path) -> _RoleSize | None:
    try:
        stat = (role_dir / file_names.MANIFEST_FILE).stat()
        return _read_size(role_dir, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    except (OSError, CheckpointNotFoundError, CheckpointCorruptError):
        return None


@lru_cache(maxsize=16384)
def _read_size(role_dir: Path, mtime_ns: int, size: int, inode: int) -> _RoleSize:
    """Reads a manifest, and remembers its sizes as long as the file stays the same."""
    manifest = read_manifest(role_dir)
    files = Need.of([(file_names.MANIFEST_FILE, size), *((file.path, file.size) for file in manifest.files)])
    taken = DiskSpace((), block=4096).taken_by(files)
    return _RoleSize(manifest.nbytes, manifest.created, taken, manifest.placement is not None)
