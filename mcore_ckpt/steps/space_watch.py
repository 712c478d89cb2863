"""Checks before a save that its files will fit, and warns after its commit if the next save will not fit.

A save frees nothing before its commit: the checkpoint that it replaces, and old steps, stay until then. So only the
space that is free at the beginning counts.

If no step will be deleted, the commit already checks whether the next save will fit, because that save may begin at
once. If steps will be deleted, the check waits until the steps are gone, because the free space shows only then whether
the next save will fit. That later check may take long, because it reads manifests and space may be freed late. So it
runs on a separate thread: neither saves nor deletions wait for it.

The need of a save is the sum of all files in whole blocks, with folders, owner file, manifest and the in-line export.
It is a lower bound, because CRCs, the manifest, the headers of the export and, at a manager's first save, the
tokenizer's files are not known yet. The system's superuser may use reserved blocks and exceed quotas, as the kernel
allows; a soft quota counts once its grace period is over. The only signs of a deletion on another host are the name of
the step and the growth of the space that was short. After a wait for deletions, the save checks its trainer lock once
more, and takes the lock if, before the wait, the disk was too full for the lock's file. Before a refusal, the check
looks for old steps that could be deleted, but only for two seconds, because all ranks wait. If two seconds are too
short for all steps, the error names only the command that lists the steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, NoRoomError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.disk_space import NOTHING, Amount, DiskSpace, Limit, Need, existing, space_of
from mcore_ckpt.io.threads import results_of
from mcore_ckpt.io.worker import NoThreadError, Worker
from mcore_ckpt.steps.listing import StepStatus, list_steps
from mcore_ckpt.steps.retention import PreservationPolicy, too_old
from mcore_ckpt.steps.step_sizes import NO_FILES, need_of, taken_by
from mcore_ckpt.steps.work_folders import entries

logger = logging.getLogger(__name__)

# The least number of bytes that a manifest has for each file, besides the file's path: names of fields, digits, commas.
_MANIFEST_BYTES_PER_FILE = 60
# If this many saves of one role fit, the next save of all roles will fit.
_PLENTY_OF_SAVES = 64
_MAY_FIT = "The file system may store the files in less space, so the save is tried"


@dataclass(frozen=True)
class Saving:
    """A save that is about to begin.

    `policy` is None if the checkpoint is not part of a step below the root. `prepared` is called once the save can no
    longer be refused, before anything is written; None to call nothing.
    """

    role_dir: Path
    step: int
    policy: PreservationPolicy | None
    prepared: Callable[[], object] | None = None


@dataclass(frozen=True)
class Saved:
    """A save that is committed.

    Attributes:
        check: the number of the save's check. A newer save has a larger number.
        need: the need that the check counted, including temporary files that the save has deleted before its commit.
        there: the steps below the root, to notice a newer save of another role; None if unknown.
    """

    role_dir: Path
    step: int
    check: int
    need: Need
    there: frozenset[int] | None = None


class SpaceWatch:
    """Checks the free space for each save of one role. Only rank 0 uses this class.

    `is_deleting` returns True while this process is deleting old steps.
    """

    def __init__(self, root: Path, is_deleting: Callable[[], bool]) -> None:
        self._root = root
        self._is_deleting = is_deleting
        self._checks = 0
        self._checked = NOTHING
        self._tried, self._foreseen = _Warned(), _Warned()
        self._looks = Worker("mcore_ckpt next save", must_finish=False)
        self._prune_look = Worker("mcore_ckpt old steps", must_finish=False)

    def check(self, saving: Saving, need: Need, patience_s: float) -> None:
        """Refuses a save whose files do not fit. `need` has the files of all ranks. Raises NoRoomError.

        If there is too little space now, this method first waits for deletions that are under way. If a deletion still
        goes on after `patience_s` seconds, the save may begin, because the freed space may suffice. Before a refusal,
        the look at old steps also ends after `patience_s` seconds.
        """
        deadline = time.monotonic() + patience_s
        self._checks, self._checked = self._checks + 1, NOTHING
        role_dir = saving.role_dir
        with suppress(OSError):  # the free space is unknown, or the folder cannot be made (an error that shows later)
            need += _files_of_rank_0(role_dir, need)
            self._checked = need
            space = _settled_space(
                role_dir.parent, self._root, lambda space: space.taken_by(need), patience_s, self._is_deleting
            )
            if space is None:
                logger.warning("%s: too little space, but old steps are still being deleted: the save begins", role_dir)
                return
            amount = space.taken_by(need)
            limit = space.shortage(amount)
            if limit is not None and space.is_certain:
                raise NoRoomError(self._refusal(role_dir, limit, amount, deadline - time.monotonic()))
            if self._tried.is_new(limit) and limit is not None:
                logger.warning("%s: %s. %s", role_dir, limit.describe(amount), _MAY_FIT)

    def committed(self, role_dir: Path, step: int, deletes: bool) -> Saved | None:
        """Warns once if the next save, with the need of the last check, will not fit.

        Reads no files, so the call is fast.

        `deletes` is True if retention deletes steps now, or after the commits of other roles. Then this method does not
        warn, because each deleted step frees about the space of one save. Returns the argument for `foresee`, which the
        caller calls once the steps are deleted; None if `foresee` need not look.
        """
        saved = Saved(role_dir, step, self._checks, self._checked)
        with suppress(OSError):
            if self._has_plenty():
                self._foreseen.is_new(None)
                return None
            saved = replace(saved, there=frozenset(file_names.step_dirs(self._root)))
            # Look at the free space last: a deletion that ends meanwhile has then freed its space already.
            if not (deletes or self._is_deleting() or _has_deleted_steps(self._root)):
                space = space_of(self._root)
                amount = space.taken_by(saved.need)
                limit = space.shortage(amount)
                if limit is not None:
                    self._warn_of_next(saved, space, limit, amount)
                    return None
        return saved

    def foresee(self, saved: Saved) -> None:
        """Warns once if another save like `saved` will not fit. Call this method when old steps have been deleted.

        Returns immediately, and looks on another thread. Looks only if the step is complete, and says nothing if
        another save begins meanwhile, because that save takes space and has its own check.
        """
        with suppress(NoThreadError):
            self._looks.add(partial(self._foresee, saved), instead=True)

    def _foresee(self, saved: Saved) -> None:
        with suppress(OSError, CheckpointNotFoundError, CheckpointCorruptError):
            if self._is_overtaken(saved):
                return
            (status,) = list_steps(self._root, only=saved.step) or (None,)
            if status is None or not status.is_claimed:
                return
            kept = need_of(status).kept

            def amount_in(space: DiskSpace) -> Amount:
                return space.taken_by(kept).at_least(space.taken_by(saved.need))

            space = _settled_space(
                self._root,
                self._root,
                amount_in,
                tuning.DELETION_SHOWS_S,
                self._is_deleting,
                lambda: self._is_overtaken(saved),
            )
            if space is None or self._is_overtaken(saved) or _is_saving(self._root, saved):
                return
            amount = amount_in(space)
            self._warn_of_next(saved, space, space.shortage(amount), amount)

    def _is_overtaken(self, saved: Saved) -> bool:
        """True if a newer save has been checked.

        That save has taken space, so a look would say nothing about the next save.
        """
        return saved.check != self._checks

    def _warn_of_next(self, saved: Saved, space: DiskSpace, limit: Limit | None, amount: Amount) -> None:
        if self._foreseen.is_new(limit) and limit is not None:
            logger.warning(
                "%s: this save fits, but after it and the deletion of old steps the next one will not: %s. Delete "
                "files, or keep fewer steps (max_to_keep); %s%s",
                saved.role_dir,
                limit.describe(amount),
                self._prune_shows(),
                "" if space.is_certain else f". {_MAY_FIT}",
            )

    def _has_plenty(self) -> bool:
        """True if far more is free than the last save has taken. Reads no manifests: they can be large."""
        space = space_of(self._root)
        times = space.times(space.taken_by(self._checked))
        return times is not None and times >= _PLENTY_OF_SAVES

    def _refusal(self, role_dir: Path, limit: Limit, amount: Amount, look_s: float) -> str:
        lack = f"{getattr(amount, limit.kind) - limit.free:,} {_WORDS[limit.kind]}"
        return (
            f"{role_dir}: the checkpoint does not fit: {limit.describe(amount)}. Nothing has been "
            f"written. Free at least {lack}: {self._what_prune_frees(look_s)}"
        )

    @property
    def _prune(self) -> str:
        return f"mcore-ckpt prune {self._root} --max-to-keep 1"

    def _prune_shows(self) -> str:
        return f"'{self._prune} --dry-run' shows which steps could be deleted"

    def _what_prune_frees(self, look_s: float) -> str:
        """Says what a command could delete. If the look takes longer than `look_s` seconds, names only the command."""
        # If the last look still goes on, the file system hangs or is slow, and another look would end no sooner.
        if look_s <= 0 or self._prune_look.is_at_work:
            return self._prune_shows()
        found, stop = list[str](), threading.Event()

        def look() -> None:
            found.append(_found_by_prune(self._root, self._prune, stop))

        # The look runs on a thread, because one call to a network file system can already take too long.
        with suppress(NoThreadError):
            self._prune_look.add(look)
            self._prune_look.wait_at_most(min(look_s, tuning.OLD_STEPS_LOOK_S))
        stop.set()
        return found[0] if found else self._prune_shows()


class _Warned:
    """Remembers the reason of the last warning, so that the warning is not repeated while the reason lasts."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def is_new(self, limit: Limit | None) -> bool:
        """True if `limit` was not short at the last look. False for None, which stands for no short limit."""
        before, self._reason = self._reason, None if limit is None else limit.name
        return self._reason is not None and self._reason != before


def _settled_space(
    folder: Path,
    root: Path,
    amount_in: Callable[[DiskSpace], Amount],
    patience_s: float,
    is_deleting: Callable[[], bool],
    is_overtaken: Callable[[], bool] = lambda: False,
) -> DiskSpace | None:
    """Returns the free space of a folder, as soon as it suffices or no deletion below the root is visible any more.

    Returns None if a deletion is still visible after `patience_s` seconds, or as soon as `is_overtaken` is true. Raises
    OSError.
    """
    began = last_growth = time.monotonic()
    # Check for deletions first: if a deletion ends between the two looks, the second look already counts the freed
    # space.
    deletes, space, most = is_deleting(), space_of(folder), dict[str, int]()
    while space.is_certain and (short := space.shortages(amount_in(space))):
        now = time.monotonic()
        if _has_grown(short, most):
            last_growth = now
        # Some file systems free the bytes of a deleted file a moment later. And a process on another host may be
        # deleting a step, which shows only in the step's name and in the growing free space.
        settles_s = tuning.DELETION_SHOWS_S if _has_deleted_steps(root) else tuning.SPACE_SETTLES_S
        goes_on = deletes or began < last_growth > now - settles_s
        if not goes_on and now - last_growth >= min(settles_s, patience_s):
            break
        if now - began >= patience_s or is_overtaken():
            return None
        time.sleep(tuning.SPACE_POLL_S)
        deletes, space = is_deleting(), space_of(folder)
    return space


def _has_grown(short: Sequence[Limit], most: dict[str, int]) -> bool:
    """True if a limit leaves more than at any earlier look. Notes the largest amount of each limit in `most`.

    Any other change is no sign of a deletion, because on a shared disk other users also write and delete files.
    """
    grown = [limit for limit in short if limit.free > most.get(limit.name, limit.free)]
    most.update({limit.name: max(limit.free, most.get(limit.name, 0)) for limit in short})
    return bool(grown)


def _found_by_prune(root: Path, command: str, stop: threading.Event) -> str:
    """Says what a command that keeps only the newest step would delete. Once `stop` is set, looks at no more steps."""
    statuses: Sequence[StepStatus] = ()
    with suppress(OSError):
        statuses = list_steps(root)
    old = too_old(statuses, PreservationPolicy(max_to_keep=1))
    if not old:
        return f"no step below {root} could be deleted, because none is older than the newest complete one"
    taken = results_of(old, lambda each: NO_FILES if stop.is_set() else taken_by([each]), tuning.LOOK_THREADS)
    freed = sum(taken, NO_FILES)
    return (
        f"'{command}' would delete {len(old)} steps with {freed.nbytes:,} bytes in {freed.entries:,} files and folders"
    )


_WORDS = {"nbytes": "bytes", "entries": "files"}


def _files_of_rank_0(role_dir: Path, need: Need) -> Need:
    """Returns the need of the files that rank 0 makes in every save: owner file, manifest, and missing folders."""
    above = existing(role_dir.parent)
    missing = len(role_dir.parent.parts) - len(above.parts)
    manifest = _MANIFEST_BYTES_PER_FILE * len(need.sizes)
    folders = (f"../{number}" for number in range(missing + 1))
    return Need((1, max(1, manifest)), frozenset(folders))


def _has_deleted_steps(root: Path) -> bool:
    return any(file_names.is_deleted_dir(entry.name) for entry in entries(root))


def _is_saving(root: Path, saved: Saved) -> bool:
    """True if a save is under way, as far as the root and the folders of the last steps show it.

    Also true if a step was added since `saved` was committed: its save may have ended after the look at the free space.
    """
    folders = file_names.step_dirs(root)
    if saved.there is None or not folders.keys() <= saved.there:
        return True
    looked_at = [
        root,
        *(path for step in {max(folders, default=0), saved.step} & folders.keys() for path in folders[step]),
    ]
    works = (file_names.parse_work_dir(entry.name) for folder in looked_at for entry in entries(folder))
    return any(work is not None and work.purpose == "staging" for work in works)
