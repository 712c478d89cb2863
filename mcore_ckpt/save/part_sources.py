"""Lists a part's files, refuses files that a checkpoint cannot have, and removes files that were handed over."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest_summary
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, CommitError
from mcore_ckpt.io import limits

logger = logging.getLogger(__name__)

# Device, inode, size in bytes and time of the last change. If all of these are as before, the file counts as unchanged.
_Identity = tuple[int, int, int, int]


@dataclass(frozen=True)
class Listing:
    """The contents of a folder, in order: each folder comes before its own contents."""

    folders: tuple[Path, ...]
    files: tuple[Path, ...]


def list_part(part: str, folder: Path) -> Listing:
    """Lists what is below a folder.

    Raises OSError. Raises CommitError if the folder has links, devices, names that are not printable, names that differ
    only in upper and lower case, or too many files.
    """
    _refuse_unless(stat.S_ISDIR, part, folder)
    folders, files = list[Path](), list[Path]()
    for above, names_of_folders, names in os.walk(folder, onerror=_raise):
        for name in sorted(names_of_folders):
            _refuse_unless(stat.S_ISDIR, part, Path(above, name))
            folders.append(Path(above, name))
        for name in sorted(names):
            _refuse_unless(stat.S_ISREG, part, Path(above, name))
            files.append(Path(above, name))
        if len(folders) + len(files) > limits.PART_FILES:
            raise CommitError(
                f"part {part!r}: {folder} has more than {limits.PART_FILES} files and folders: put them in archives"
            )
    found = [*folders, *files]
    if problem := file_names.problem_of_names(folder, (path.relative_to(folder).as_posix() for path in found)):
        raise CommitError(f"part {part!r}: {problem}")
    return Listing(tuple(folders), tuple(files))


def _raise(error: OSError) -> None:
    raise error


def _refuse_unless(wanted: object, part: str, path: Path) -> None:
    # Links are refused, because the checkpoint would not contain a link's target.
    if not wanted(path.lstat().st_mode):  # type: ignore[operator]
        raise CommitError(f"part {part!r}: {path} is a link, pipe, socket or device: use files and folders")


@dataclass(frozen=True)
class Source:
    """A file or folder that a trainer has named for a part.

    Attributes:
        part: the part's name.
        path: the file or folder.
        is_handed_over: whether the save takes the file or folder away, instead of copying it.
    """

    part: str
    path: Path
    is_handed_over: bool
    _taken: dict[Path, _Identity] = field(default_factory=dict)

    @staticmethod
    def of(part: str, path: str | os.PathLike[str], is_handed_over: bool) -> Source:
        """Returns the source at `path`, with an absolute path.

        `path` may be a link if the source is copied, but not if the source is handed over.
        """
        absolute = Path(os.path.abspath(path))
        return Source(part, absolute if is_handed_over else _real(absolute), is_handed_over)

    def check(self, staging: Path, root: Path) -> None:
        """Raises CommitError if the source is missing, contains a root, or is in the step that is being saved.

        Raises CommitError also if a handed-over source belongs to a saved step, is a file that this package keeps in a
        root (such as the tracker), is the current folder of this process, or contains that folder.

        Args:
            staging: the staging folder of the save.
            root: the root of the steps.
        """
        if not os.path.lexists(self.path):
            raise CommitError(f"part {self.part!r}: {self.path} does not exist: make it before the save")
        real, staging = _real(self.path), staging.resolve()
        roots = [root.resolve(), staging.parent.parent]
        if any(place.is_relative_to(real) for place in (staging, *roots)):
            raise CommitError(f"part {self.part!r}: {self.path} contains the checkpoints: name a folder that does not")
        if real.is_relative_to(staging):
            raise CommitError(
                f"part {self.part!r}: {self.path} is in the folder of the step that is being saved: the files that a "
                "part's function writes into its folder are saved anyway, so the function should return None"
            )
        if self.is_handed_over and (_is_in_checkpoint(real) or any(_is_step_of(real, place) for place in roots)):
            raise self._belongs_to_a_step(self.path)
        if self.is_handed_over and _is_of_root(real, roots):
            raise CommitError(
                f"part {self.part!r}: {self.path} is a file that mcore_ckpt keeps in a folder of steps, and handing it "
                "over would remove it: name the path without HandOver to copy it"
            )
        if self.is_handed_over and _has_current_folder(real):
            raise CommitError(
                f"part {self.part!r}: {self.path} is the current folder of this process or contains it, and handing it "
                "over would remove that folder: name the path without HandOver to copy it"
            )

    def check_files(self, listing: Listing) -> None:
        """Raises CommitError if checkpoints are in a folder that is handed over. `listing` is what `listed` returns."""
        if self.is_handed_over:
            for file in listing.files:
                if file.name == file_names.MANIFEST_FILE and _is_checkpoint(file.parent):
                    raise self._belongs_to_a_step(file.parent)

    def _belongs_to_a_step(self, place: Path) -> CommitError:
        return CommitError(
            f"part {self.part!r}: {place} belongs to a saved step, and handing it over would remove it from that step: "
            "name the path without HandOver to copy it"
        )

    def listed(self) -> Listing:
        """Lists the folders and files of the source, as absolute paths. Raises what `list_part` raises."""
        if self.path.is_dir() and not self.path.is_symlink():
            return list_part(self.part, self.path)
        _refuse_unless(stat.S_ISREG, self.part, self.path)
        return Listing((), (self.path,))

    def place_of(self, path: Path) -> Path:
        """Returns where a file or folder of the source goes, as a path relative to the part's folder."""
        return Path(path.name) if path == self.path else path.relative_to(self.path)

    def note_taken(self, file: Path) -> None:
        """Notes the identity of a file before it is taken, so that `remove` leaves a file that has changed since."""
        self._taken[file] = _identity_of(file)

    def remove(self, folders: Iterable[Path]) -> bool:
        """Removes the files that were taken, and the source's empty folders. Raises nothing.

        New files, and files that have changed since `note_taken`, stay. If anything of the source stays, this method
        logs a warning. Returns whether the whole source is gone.
        """
        left: list[str] = []
        for file, taken in self._taken.items():
            try:
                if _identity_of(file) == taken:
                    file.unlink()
                else:
                    left.append(f"{file} has changed")
            except FileNotFoundError:
                pass  # two parts have handed over the same file
            except OSError as error:
                left.append(str(error))
        if self.path not in self._taken:
            for folder in [*reversed(list(folders)), self.path]:
                with suppress(OSError):
                    folder.rmdir()
            if not left and os.path.lexists(self.path):
                left.append("it has files or folders that are not in the step")
        if left:
            logger.warning("%s was handed over to a checkpoint, but is still there: %s", self.path, left[0])
        return not left


def _real(path: Path) -> Path:
    # Path.resolve would raise RuntimeError for links that lead to each other (Python 3.11).
    return Path(os.path.realpath(path))


def _has_current_folder(folder: Path) -> bool:
    with suppress(FileNotFoundError):  # somebody has removed the current folder, so it cannot be in a part
        return _real(Path.cwd()).is_relative_to(folder)
    return False


def _is_of_root(path: Path, roots: Sequence[Path]) -> bool:
    """True for the files that this package makes directly in a root: the tracker, and files of the run and of roles."""
    is_of_role = {file_names.role_of_trainer_file(path.name), file_names.role_of_rules_file(path.name)} != {None}
    # Other programs make trackers, too. So a tracker counts only if it is directly in one of `roots`.
    return (
        is_of_role
        or path.name == file_names.RUN_FILE
        or (path.name == file_names.TRACKER_FILE and path.parent in roots)
    )


def _identity_of(file: Path) -> _Identity:
    found = file.lstat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _is_step_of(path: Path, root: Path) -> bool:
    return path.parent == root and file_names.parse_step(path.name) is not None


def _is_in_checkpoint(path: Path) -> bool:
    """True if a path is a checkpoint or is inside one.

    A checkpoint here is a role's folder in any root, or an uploaded attempt in a `file://` store.
    """
    return any(_is_checkpoint(place) for place in (path, *path.parents))


def _is_checkpoint(folder: Path) -> bool:
    """True for a role's folder or an uploaded attempt, also if its manifest is damaged."""
    if not (folder / file_names.MANIFEST_FILE).exists():  # other programs make files with this name, too
        return False
    try:
        read_manifest_summary(folder)
    except (CheckpointNotFoundError, CheckpointCorruptError):
        # The step's folder is `folder` itself, or one level above a role's folder, or two levels above an uploaded
        # attempt.
        steps = (folder, *folder.parents[:2])
        return any(file_names.parse_step(place.name) is not None for place in steps)
    return True
