"""Tells how large a step is and when it was saved, from all that its manifests say about its files.

`listing.py` reads only the beginning of a manifest, because that of a large run takes long to read as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.io.room import Amount, Need, Room
from mcore_ckpt.steps.listing import StepStatus

NO_FILES = Amount(0, 0)


@dataclass(frozen=True)
class StepSize:
    """The size of a step's committed roles.

    Attributes:
        nbytes: the bytes of all files.
        created: when the last of the roles was saved (ISO 8601, UTC); empty if there is none.
        taken: what the files of each role take on a disk with blocks of 4 KiB.
    """

    nbytes: int
    created: str
    taken: Mapping[str, Amount]


def size_of(status: StepStatus) -> StepSize:
    """Reads the manifests of a step's committed roles. A role whose manifest cannot be read any more has no files."""
    found = {role: size for role in sorted(status.committed) if (size := _size_of_role(status.role_dir(role)))}
    return StepSize(
        nbytes=sum(size.nbytes for size in found.values()),
        created=max((size.created for size in found.values()), default=""),
        taken={role: size.taken for role, size in found.items()},
    )


def taken_by(statuses: Iterable[StepStatus]) -> Amount:
    """Returns what the files of all committed roles of some steps take."""
    return sum((taken for status in statuses for taken in size_of(status).taken.values()), NO_FILES)


def need_of(status: StepStatus) -> Need:
    """Returns the need of a save of the same files, with the step's folder and the owner file of each role.

    Raises OSError, CheckpointNotFoundError or CheckpointCorruptError: a manifest cannot be read.
    """
    return Need.sum(_need_of_role(status.role_dir(role), status.path.parent) for role in sorted(status.committed))


def _need_of_role(role_dir: Path, root: Path) -> Need:
    size = (role_dir / file_names.MANIFEST_FILE).stat().st_size
    files = [(file.path, file.size) for file in read_manifest(role_dir).files]
    files += [(file_names.MANIFEST_FILE, size), (file_names.OWNER_FILE, 1)]
    folder = role_dir.relative_to(root)
    return Need.of((str(folder / path), size) for path, size in files)


@dataclass(frozen=True)
class _RoleSize:
    nbytes: int
    created: str
    taken: Amount


def _size_of_role(role_dir: Path) -> _RoleSize | None:
    try:
        stat = (role_dir / file_names.MANIFEST_FILE).stat()
        return _read_size(role_dir, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    except (OSError, CheckpointNotFoundError, CheckpointCorruptError):
        return None


@lru_cache(maxsize=16384)
def _read_size(role_dir: Path, mtime_ns: int, size: int, inode: int) -> _RoleSize:
    """Reads a manifest, and remembers what it says for as long as the file is the same."""
    manifest = read_manifest(role_dir)
    files = Need.of([(file_names.MANIFEST_FILE, size), *((file.path, file.size) for file in manifest.files)])
    return _RoleSize(manifest.nbytes, manifest.created, Room((), block=4096).taken_by(files))
