"""Lists the steps on disk and finds out which of them are complete.

The manifests say which roles are committed. `worth.py` looks at the files and says what a step is worth. The tracker is
only a hint at a step that may be the newest.

Some callers, such as `watch` and the update of the tracker at each save, cannot look at all steps each time, because
that takes too long. For these callers, a process looks at all steps once (`newest_complete`) and remembers their
manifests. Later it looks only at steps that may have changed. The tracker alone is not enough, because a trainer may
have died after its commit and before it moved the tracker. One change stays unseen until the next start: another
process saves a known step again and dies right after its commit. `load` and `recover` look at all steps, so they see
this change, too.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import ManifestSummary
from mcore_ckpt.checkpoint.metrics import read_later_metrics
from mcore_ckpt.checkpoint.provenance import Commit
from mcore_ckpt.checkpoint.reading import read_manifest_summary
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, CommitError
from mcore_ckpt.io import limits, tuning
from mcore_ckpt.io.files import read_small
from mcore_ckpt.io.threads import results_of
from mcore_ckpt.steps.branches import commit_of
from mcore_ckpt.steps.choice import last_commit, newest, oldest_first
from mcore_ckpt.steps.runs import Ownership, below, whose
from mcore_ckpt.steps.worth import Lack, Weighed, lack_of, look_at_all

logger = logging.getLogger(__name__)

# A folder that cannot be read because of one of these errors stays unreadable. Examples are a folder of another user
# and a link to a folder that does not exist. Other errors may be temporary.
_STAYS_UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENOENT)

# The number of roots whose manifests are remembered.
_MOST_ROOTS = 8

# How many times, at most, a root is listed if a step is renamed between the listing and the look at the step. The two
# renames of a save take an instant, so the second listing nearly always shows where the step is.
_LISTINGS = 3


class _Head(NamedTuple):
    """The part of a manifest that a listing needs, and the identity of the manifest's file."""

    identity: tuple[int, int, int]
    says: ManifestSummary


_Heads = dict[Path, _Head]
# The remembered manifests of each root, by role's folder. They are remembered because reading and parsing the manifest
# of a large run takes long.
_heads: dict[Path, _Heads] = {}


@dataclass(frozen=True)
class StepStatus(Weighed):
    """The state of one step folder.

    The manifests are read when the step is listed. The other files are looked at when someone first asks whether the
    step is complete, or what it lacks. This look raises OSError if an error may be temporary.

    Attributes:
        step: the step's number.
        path: the step's folder.
        committed: the roles that are committed.
        declared: the roles that the step consists of, according to the manifests in it.
        problems: why roles with a manifest are not committed, or why the folder cannot be read.
        pinned: true if retention must keep the step.
        flat: the role whose folder is the step's own folder; None if there is no such role.
        aside: for each committed role whose checkpoint a save was moving aside when the save died, the checkpoint's
            present folder. Such a checkpoint counts as the role's checkpoint until the next trainer puts it back. The
            checkpoint of a flat role is moved to a folder next to the step's folder, and the step's folder may then be
            missing.
        seen: the roles whose files need no look, because this process is ending their commit and has just looked at the
            files.
        says: the summaries of the manifests of the committed roles, and of roles that belong to another run.
        in_node_folder: true in a node's folder of the fast tier, where the files of one node make a step complete.
    """

    step: int
    path: Path
    committed: frozenset[str]
    declared: frozenset[str]
    problems: tuple[str, ...]
    pinned: bool = False
    flat: str | None = None
    aside: Mapping[str, Path] = field(default_factory=dict, compare=False)
    seen: frozenset[str] = field(default=frozenset(), compare=False)
    says: Mapping[str, ManifestSummary] = field(default_factory=dict, compare=False)
    in_node_folder: bool = field(default=False, compare=False)

    def role_dir(self, role: str) -> Path:
        """Returns the folder of a role in this step."""
        return self.aside.get(role, self.path if role == self.flat else self.path / role)

    @property
    def place(self) -> Path:
        """The folder with the step's own files, such as its pin: `path`, or the folder to which a save moved it."""
        return self.path if self.flat is None else self.role_dir(self.flat)

    @cached_property
    def lacks(self) -> tuple[Lack, ...]:
        """The files that are missing although the manifests of the committed roles list them."""
        roles = sorted(self.committed - self.seen)
        looks = (lack_of(self.role_dir(role), partial(self._find, role), self.in_node_folder) for role in roles)
        return tuple(lack for lack in looks if lack is not None)

    def _find(self, role: str) -> Path:
        return step_status(self.path).role_dir(role)

    def having_seen(self, role_dir: Path | None) -> StepStatus:
        """Returns the status with the role in `role_dir` marked as seen; the status itself if `role_dir` is None."""
        seen = frozenset(role for role in self.committed if self.role_dir(role) == role_dir)
        return replace(self, seen=seen) if seen else self

    @property
    def where(self) -> Path:
        """The step's folder."""
        return self.path

    @property
    def heads(self) -> list[ManifestSummary]:
        """The summaries of the manifests of the committed roles."""
        return [head for role, head in self.says.items() if role in self.committed]

    @property
    def is_of_other_run(self) -> bool:
        """True if the step has roles that belong to another run."""
        return bool(self.says.keys() - self.committed)

    @property
    def reason(self) -> str:
        """Why the step is not complete."""
        if self.problems:
            return "; ".join(self.problems)
        if not self.is_claimed:
            return f"{self.path}: {self.why_missing('committed') or 'no manifest of mcore_ckpt in it'}"
        return "; ".join(map(str, self.lacks))


def list_steps(root: Path, only: int | Collection[int] | None = None) -> list[StepStatus]:
    """Returns the steps below a root, sorted by number. With `only`, looks only at the steps with these numbers.

    If a step has two folders (`global_step_5` and `global_steps_5`), the status of the complete folder is returned. If
    a step has only one folder, only the manifests in it are read.

    Raises OSError: the root cannot be read, or a step cannot be read because of an error that may be temporary.

    Example:
        >>> [status.step for status in list_steps(Path("checkpoints")) if status.is_complete]
        []
    """
    statuses: dict[int, StepStatus] = {}
    wanted = None if only is None else {only} if isinstance(only, int) else set(only)
    for listed in _listings(root):
        there = [step for step in listed.folders if wanted is None or step in wanted]
        look = partial(_look_at, listed, _known(root, listed.folders))
        # A look at a step mostly waits for the file system, so several threads look.
        looks = dict(zip(there, results_of(there, look, tuning.LOOK_THREADS), strict=True))
        for step in wanted or ():
            statuses.pop(step, None)
        statuses |= {step: look.status for step, look in looks.items()}
        wanted = {step for step, look in looks.items() if not look.is_sure}
        if not wanted:
            break
    # Read the root's run last. A run is written into the root before its first commit, so the run of each listed step
    # is in the root by now.
    own = below(root)
    return [_without_others(statuses[step], own) for step in sorted(statuses)]


def _without_others(status: StepStatus, own: Ownership) -> StepStatus:
    """Returns the status with roles of another run listed as problems, not as committed, so that nobody uses them."""
    others = {role: head.run for role, head in status.says.items() if not own.owns(head)}
    if not others:
        return status
    problems = (f"{status.role_dir(role)}: {whose(run)}" for role, run in sorted(others.items()))
    return replace(status, committed=status.committed - others.keys(), problems=(*status.problems, *problems))


def newest_steps(root: Path, count: int) -> list[StepStatus]:
    """Returns the `count` steps that were committed last, complete or not. The oldest of them is first.

    Looks at few steps, as `newest_complete` does. Raises OSError like `list_steps`, for the steps that it looks at.
    """
    looks: list[_Look] = []
    likely = {read_tracker(root)}
    for listed in _listings(root):
        looks = list(itertools.chain(*itertools.islice(_last_first(listed, likely), count + 1)))
        if all(look.is_sure for look in looks):
            break
    return oldest_first([look.status for look in looks])[-count:]


def newest_complete(
    root: Path, role: str | None = None, seen: Path | None = None, committed: int | None = None
) -> StepStatus | None:
    """Returns the newest complete step, or None. The call is fast even if there are thousands of steps.

    The first call of a process looks at all steps. A later call first looks at two groups of steps: steps whose
    manifests the process has not read, and steps that are likely to have been saved again. Then it looks at the other
    steps, the last commit first, until a step is complete.

    Args:
        root: the folder of the steps.
        role: a role that the step must have; None for any.
        seen: see `StepStatus.having_seen`.
        committed: a step that was committed just now. This step, and the step that the tracker names, are likely to
            have been saved again.

    Raises OSError like `list_steps`, for the steps that it looks at.
    """
    found: list[StepStatus] = []
    likely = {read_tracker(root), committed}
    for listed in _listings(root):
        found, is_sure = list[StepStatus](), True
        for number, looks in enumerate(_last_first(listed, likely)):
            is_sure = is_sure and all(look.is_sure for look in looks)
            last = [look.status.having_seen(seen) for look in looks if role in (None, *look.status.committed)]
            found += last
            # The remaining steps are older than the step that was looked at last, so none of them is the newest.
            ordered = oldest_first(found)
            if number and last and newest(found) in ordered[ordered.index(last[0]) :]:
                break
        if is_sure:
            break
    return newest(found)


def _last_first(listed: _Listed, likely: Collection[int | None]) -> Iterator[list[_Look]]:
    """Yields lists of looks at steps. The first list has all steps that are unknown or in `likely`.

    Each later list has one other step, the newest step first. If another process has saved a known step again, the look
    at the step shows the new save.
    """
    own, known = below(listed.root), _known(listed.root, listed.folders)
    commits: dict[int, list[Commit | None]] = {}
    for head in list(known.values()):
        if own.owns(head.says):
            commits.setdefault(head.says.step, []).append(head.says.commit)

    def look_at(step: int) -> _Look:
        look = _look_at(listed, known, step)
        return look._replace(status=_without_others(look.status, own))

    first = [step for step in listed.folders if step not in commits or step in likely]
    looks = results_of(first, look_at, tuning.LOOK_THREADS)
    yield looks
    numbers = {step: commit_of(step, commits[step]).number for step in commits.keys() & listed.folders.keys()}
    newest_of = max(numbers, key=lambda step: (numbers[step], step), default=None)
    lasts = [last_commit([look.status for look in looks])]
    lasts += [] if newest_of is None else [commit_of(newest_of, commits[newest_of])]
    last = max((each for each in lasts if each is not None), key=lambda each: each.number, default=None)

    def order(step: int) -> tuple[bool, int, int]:
        return last is None or not last.has_given_up(numbers[step]), numbers[step], step

    for step in sorted(numbers.keys() - set(first), key=order, reverse=True):
        yield [look_at(step)]


def read_tracker(root: Path) -> int | None:
    """Returns the step that the tracker names; None if the tracker is missing or names no step. Raises nothing."""
    try:
        return file_names.parse_tracker(read_small(root / file_names.TRACKER_FILE, limits.SMALL_BYTES).decode())
    except (OSError, CheckpointCorruptError, UnicodeDecodeError):
        return None


class _Listed(NamedTuple):
    """One listing of a root.

    `folders` has the folders of each step. For a step that was moved aside, these include the step's earlier folder,
    even if that folder is missing. `moved` maps the earlier name of each flat step that was moved aside to the step's
    present folder.
    """

    root: Path
    folders: Mapping[int, Sequence[Path]]
    moved: Mapping[str, Path]


def _listings(root: Path) -> Iterator[_Listed]:
    """Lists a root, and lists it again each time that the caller asks, at most `_LISTINGS` times."""
    for _ in range(_LISTINGS):
        yield _list(root)


def _list(root: Path) -> _Listed:
    # Both results come from one listing. Between two listings, a save could move a step aside and put it back, so that
    # neither listing shows the step.
    entries = _entries(root) if root.is_dir() else []
    folders = file_names.step_dirs_among(root, entries)
    moved = _moved_aside(root, entries)
    for name in moved:
        step = file_names.parse_step(name)
        if step is not None and root / name not in folders.get(step, ()):
            folders.setdefault(step, []).append(root / name)
    return _Listed(root, folders, moved)


class _Look(NamedTuple):
    """The state of a step. If `is_sure` is False, the step seems to have been renamed during the look."""

    status: StepStatus
    is_sure: bool


def _look_at(listed: _Listed, known: _Heads, step: int) -> _Look:
    looks = [_look(path, listed.moved.get(path.name), known) for path in listed.folders[step]]
    if len(looks) == 1:
        return looks[0]
    complete = next((look for look in looks if look.status.is_complete), None)
    return complete or _Look(looks[0].status, all(look.is_sure for look in looks))


def complete_steps(root: Path) -> list[StepStatus]:
    """Returns the complete steps in the order of their commits. The newest is last; abandoned steps come first.

    Looks at the files of all steps. Raises OSError.
    """
    statuses = list_steps(root)
    look_at_all(statuses)
    return [status for status in oldest_first(statuses) if status.is_complete]


def step_status(path: Path) -> StepStatus:
    """Returns the state of a folder that `is_step` accepts. Raises OSError like `list_steps`."""
    for _ in range(_LISTINGS):
        look = _look(path, _moved_from(path), _heads.get(path.parent, {}))
        if look.is_sure:
            break
    return look.status


def is_step(path: Path) -> bool:
    """True if a path is the folder of a step, or was a step's folder until an unfinished save moved it aside."""
    return _number_of(path) is not None and (path.is_dir() or find_moved_aside(path) is not None)


def _number_of(path: Path) -> int | None:
    """Returns the step number of a folder from its name or, if the folder was renamed, from its roles' manifests."""
    named = file_names.parse_step(path.name)
    if named is not None:
        return named
    found: set[int] = set()
    with suppress(OSError):
        entries = _entries(path)
        is_root = any(file_names.parse_step(entry.name) is not None for entry in entries)
        for folder in (path / entry.name for entry in entries if not is_root and _may_be_role(entry)):
            with suppress(OSError, CheckpointCorruptError, CheckpointNotFoundError):
                says = read_manifest_summary(folder)
                # A role's folder that was renamed is a copy, so the folder around it is not a step.
                found |= {says.step} if says.role == folder.name else set()
    return found.pop() if len(found) == 1 else None


def _look(path: Path, moved: Path | None, known: _Heads) -> _Look:
    """Looks at a step. `moved` is the folder to which the step's own folder was moved aside, or None."""
    step = _number_of(path)
    if step is None:
        raise FileNotFoundError(errno.ENOENT, "there is no step", str(path))
    try:
        entries = _entries(path)
    except OSError as error:
        status = StepStatus(step, path, frozenset(), frozenset(), (_why_unreadable(path, error),))
        return _Look(status, is_sure=True)
    folders = [path] if any(entry.name == file_names.MANIFEST_FILE for entry in entries) else []
    folders += [path / entry.name for entry in entries if _may_be_role(entry)]
    found = {folder: read for folder in folders if (read := _read_folder(step, path, folder, known)) is not None}
    # Look for hidden folders, too: the old checkpoint has only its hidden name between the two renames of a save that
    # replaces the checkpoint (`commit.publish`), and after a power loss between the renames.
    roles = {read.role for read in found.values()}
    aside = {role: folder for role, folder in _moved_aside(path, entries).items() if role not in roles}
    for role, folder in aside.items():
        read = _read_folder(step, path, folder, known, role)
        if read is not None:
            found[folder] = read
    flat = found[path].role if path in found else None
    if moved is not None and path not in found:
        read = _read_folder(step, path, moved, known)
        if read is not None and read.role is not None and read.role not in {each.role for each in found.values()}:
            flat, found[moved], aside[read.role] = read.role, read, moved
            entries = [*entries, *_entries(moved)]
    has_moved = _has_moved(entries, moved, {read.role for read in found.values()})
    status = StepStatus(
        step,
        path,
        committed=frozenset(read.role for read in found.values() if read.role is not None and read.problem is None),
        declared=frozenset(role for read in found.values() for role in read.declared),
        problems=tuple(read.problem for read in found.values() if read.problem is not None),
        pinned=file_names.PINNED_FILE in {entry.name for entry in entries},
        flat=flat,
        aside={role: folder for role, folder in aside.items() if folder in found},
        says=_with_later_metrics(entries, found.values()),
    )
    return _Look(status, is_sure=not has_moved)


def _with_later_metrics(
    entries: Sequence[os.DirEntry[str]], found: Iterable[_RoleFolder]
) -> dict[str, ManifestSummary]:
    """Returns the summaries of a step's manifests, with the metrics that were set after the saves."""
    says = {read.role: read.says for read in found if read.role is not None and read.says is not None}
    for entry in entries:
        role, attempt = file_names.parse_metrics_file(entry.name) or ("", "")
        if role in says and says[role].attempt == attempt:
            metrics = {**says[role].metrics, **read_later_metrics(Path(entry.path))}
            says[role] = replace(says[role], metrics=metrics)
    return says


def _has_moved(entries: Sequence[os.DirEntry[str]], moved: Path | None, found: Collection[str | None]) -> bool:
    """True if a look missed a step or role whose folder may have been renamed, deleted or made since the listing."""
    names = {entry.name for entry in entries}
    if not found and (moved is not None or not names or file_names.MANIFEST_FILE in names):
        return True
    works = [work for name in names if (work := file_names.parse_work_dir(name)) is not None]
    return any(
        work.role not in found and (work.purpose == "replaced" or (work.purpose == "staging" and work.role in names))
        for work in works
    )


def _moved_aside(path: Path, entries: Sequence[os.DirEntry[str]]) -> dict[str, Path]:
    """Returns the folders among these entries that saves have moved aside, each by its earlier name."""
    works = [(entry.name, work) for entry in entries if (work := file_names.parse_work_dir(entry.name)) is not None]
    return {work.role: path / name for name, work in works if work.purpose == "replaced"}


def find_moved_aside(folder: Path) -> Path | None:
    """Returns the folder to which an unfinished save has moved the checkpoint of `folder`; None if there is none."""
    if (folder / file_names.MANIFEST_FILE).exists():
        return None
    moved = _moved_from(folder)
    return moved if moved is not None and (moved / file_names.MANIFEST_FILE).exists() else None


def _moved_from(folder: Path) -> Path | None:
    try:
        return _moved_aside(folder.parent, _entries(folder.parent)).get(folder.name)
    except (PermissionError, NotADirectoryError):
        return None  # the folder above cannot be read, or is a file


class _RoleFolder(NamedTuple):
    """The result of reading a folder's manifest.

    `problem` is why the role is not committed; None if it is committed.
    """

    role: str | None
    declared: frozenset[str]
    problem: str | None = None
    says: ManifestSummary | None = None


def _may_be_role(entry: os.DirEntry[str]) -> bool:
    # The listing of the step shows which entries are files, so no call is wasted on looking for a manifest below a
    # file.
    return file_names.is_role(entry.name) and not entry.is_file(follow_symlinks=False)


def _read_folder(step: int, path: Path, role_dir: Path, known: _Heads, aside: str | None = None) -> _RoleFolder | None:
    """Reads the manifest of a step's own folder, or of a role's folder in it. Returns None if there is no manifest.

    `aside` is the role of the checkpoint in the folder, if the folder does not have the role's name.
    """
    is_flat = role_dir.parent != path  # the step's own folder, or the folder to which the step was moved
    try:
        says = _read_head(role_dir, known).says
    except (FileNotFoundError, NotADirectoryError, CheckpointNotFoundError):
        return None
    except OSError as error:
        return _RoleFolder(None, frozenset(), _why_unreadable(role_dir, error))
    except CheckpointCorruptError as error:
        if is_flat and _has_roles(path):
            return None  # another program has put a file with the manifest's name into the step
        role = aside or (path if is_flat else role_dir).name
        return _RoleFolder(role, frozenset((role,)), str(error))
    role = says.role if is_flat else aside or role_dir.name
    declared = frozenset((*says.roles, says.role, role))
    if (says.step, says.role) == (step, role):
        return _RoleFolder(role, declared, says=says)
    return _RoleFolder(role, declared, f"{role_dir}: its manifest is of {says.role} at step {says.step}")


def holds_something(status: StepStatus) -> bool:
    """True if a step folder holds anything besides leftovers of unfinished saves and loose files of other programs."""
    return bool(status.problems or status.committed) or any(
        not entry.name.startswith(".") and (file_names.is_own(entry.name) or not entry.is_file())
        for entry in _entries(status.path)
    )


def _why_unreadable(path: Path, error: OSError) -> str:
    """Describes the error if the folder stays unreadable, so that the other steps can still be used.

    Raises the error if it may be temporary. If a temporary error were ignored, the trainer could resume from an older
    step and lose training.
    """
    if error.errno not in _STAYS_UNREADABLE:
        raise error
    link = f" (a link to {os.readlink(path)})" if path.is_symlink() else ""
    return f"{path}{link}: cannot be read: {error.strerror}"


def _has_roles(path: Path) -> bool:
    return any(
        os.path.exists(path / entry.name / file_names.MANIFEST_FILE) for entry in _entries(path) if _may_be_role(entry)
    )


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        if path.is_symlink():
            raise
        return []  # retention of another process has just deleted the folder


def _read_head(role_dir: Path, known: _Heads) -> _Head:
    stat = (role_dir / file_names.MANIFEST_FILE).stat()
    identity = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    head = known.get(role_dir)
    if head is None or head.identity != identity:
        head = _Head(identity, read_manifest_summary(role_dir))
        known[role_dir] = head
    return head


def _known(root: Path, folders: Mapping[int, Sequence[Path]]) -> _Heads:
    """Returns the known manifests of the existing steps.

    Forgets the manifests of all other steps, because a long run saves thousands of steps.
    """
    there = {path for paths in folders.values() for path in paths}
    # Copy the dictionary, because another thread may be listing the same root.
    heads = dict(_heads.pop(root, {}))
    _heads[root] = {path: head for path, head in heads.items() if path in there or path.parent in there}
    for oldest in list(_heads)[:-_MOST_ROOTS]:
        _heads.pop(oldest, None)
    return _heads.get(root, {})


def heads_at(role_dir: Path) -> list[ManifestSummary]:
    """Returns the summary of a role's manifest; an empty list if none can be read. Raises OSError."""
    try:
        return [_read_head(role_dir, _heads.get(role_dir.parent.parent, {})).says]
    except (FileNotFoundError, NotADirectoryError, CheckpointNotFoundError, CheckpointCorruptError):
        return []


def is_of_attempt(role_dir: Path, attempt: str) -> bool:
    """True if the committed checkpoint in a role's folder has the id `attempt`. Raises OSError."""
    return [head.attempt for head in heads_at(role_dir)] == [attempt]


def check_own_step(path: Path) -> None:
    """Raises CommitError if a step that is about to be replaced or removed belongs to another run. Raises OSError."""
    below(path.parent).check(path, step_status(path).says.values())


def check_one_spelling(root: Path, role_dir: Path, step: int) -> None:
    """Raises CommitError if a step has a folder with another name. `load` could not know which folder is meant."""
    for path in file_names.step_dirs(root).get(step, []):
        if path.name not in (role_dir.name, role_dir.parent.name) and step_status(path).committed:
            raise CommitError(
                f"step {step} is there already, as {path}: save to that folder, or delete or move it, before saving to "
                f"{role_dir}"
            )
