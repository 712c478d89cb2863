"""Watches a root from another process: which saves are under way, by which trainer, how fast, and for how long.

The watch only reads: names of files, manifests, and how much of some files is written. So the watch may run on any host
that sees the root.

The ranges of a save's files that are still holes show the progress of the save (`io/written.py`). Sizes and allocated
blocks do not show the progress, because the writer reserves the space of a whole file before it writes. The role's
newest checkpoint gives the total size, and its manifest names the files to look at, so no folder is walked. A look at 5
steps and 2 saves makes some 100 calls, most of them `stat`. A look opens at most 128 files of a save, for any number of
ranks.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.threads import results_of
from mcore_ckpt.io.written import written_bytes
from mcore_ckpt.steps.listing import newest_complete
from mcore_ckpt.steps.owner import Life, Owner
from mcore_ckpt.steps.staged_saves import RunningSave
from mcore_ckpt.steps.trainer_watch import TrainerWatch
from mcore_ckpt.tools.examine.step_list import ListedStep, step_list_of

# A look opens at most this many files of a save. If a save has more files, the opened files stand for all.
_MOST_FILES = 128
# The seconds over which the speed is measured.
_WINDOW_S = 10.0


@dataclass(frozen=True)
class SaveProgress:
    """A save that has not committed: its age in seconds, and about how many bytes are written.

    `total` is the size of the role's previous checkpoint, as an estimate of the bytes to write; None if there is no
    such checkpoint. `rate` is the recent speed in bytes per second; None if it is not known yet.
    """

    save: RunningSave
    written: int
    total: int | None
    seconds: float
    rate: float | None

    @property
    def left_s(self) -> float | None:
        """About how many seconds the save will still write; None if unknown."""
        if self.total is None or not self.rate:
            return None
        return max(0, self.total - self.written) / self.rate

    @property
    def percent(self) -> int | None:
        """How much is written, in percent; None if the total is not known."""
        return None if not self.total else min(100, 100 * self.written // self.total)


@dataclass(frozen=True)
class Look:
    """What one look at a root has found.

    Attributes:
        steps: the newest steps, in the order of their commits. Steps that are being saved come last.
        saves: the saves of these steps that have not committed.
        trainers: for each role, the process that holds the trainer lock, and whether this process is alive.
        order: a function that returns a key to sort steps by the commits known at this look.
    """

    steps: tuple[ListedStep, ...]
    saves: tuple[SaveProgress, ...]
    trainers: Mapping[str, tuple[Owner, Life]]
    order: Callable[[ListedStep], tuple[bool, int, int]]

    @property
    def newest(self) -> int | None:
        """The newest complete step; None if none of `steps` is complete."""
        return next((step.step for step in self.steps if step.newest and step.counts), None)


@dataclass(frozen=True)
class Change:
    """A change since the previous look: of a role, or of a whole step (`role` is None).

    `progress` is None if the change is not about a save.

    `what` is "there" (a step of the first look), "saving", "written" (another tenth of a save), "committed" (a role),
    "complete" (a step), "died" (a save's process), "ended" (a save without a commit) or "deleted" (a step).
    """

    what: Literal["there", "saving", "written", "committed", "complete", "died", "ended", "deleted"]
    step: ListedStep | int
    role: str | None = None
    progress: SaveProgress | None = None

    @property
    def number(self) -> int:
        return self.step if isinstance(self.step, int) else self.step.step


class Watch:
    """Watches a root. A look shows the `last` newest steps.

    Example:
        >>> Watch(Path("checkpoints")).look().newest  # doctest: +SKIP
        100
    """

    def __init__(self, root: Path, last: int = 5) -> None:
        self._root = root
        self._last = last
        self._trainers = TrainerWatch(root)
        self._meters: dict[Path, _Meter] = {}

    def look(self) -> Look:
        """Looks at the root. Raises OSError if the root cannot be read."""
        found = step_list_of(self._root, last=self._last)
        steps = sorted(found.steps, key=lambda step: (bool(step.saves), found.order_of(step)))[-self._last :]
        saves = [save for step in steps for save in step.saves]
        self._meters = {save.staging: self._meters.get(save.staging) or _Meter(self._root, save) for save in saves}
        progress = tuple(self._meters[save.staging].measure(save) for save in saves)
        return Look(tuple(steps), progress, self._trainers.trainers(), found.order_of)


class _Meter:
    """Measures one save, look by look."""

    def __init__(self, root: Path, save: RunningSave) -> None:
        files = _files_before(root, save.role)
        self._total = None if files is None else sum(file.size for file in files)
        self._sample = _sample(files or ())
        self._marks: deque[tuple[float, int]] = deque()

    def measure(self, save: RunningSave) -> SaveProgress:
        written, now = self._written(save.staging), time.monotonic()
        self._marks.append((now, written))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _WINDOW_S:
            self._marks.popleft()
        seconds = max(0.0, time.time() - save.began)
        return SaveProgress(save, written, self._total, seconds, self._rate(seconds))

    def _rate(self, seconds: float) -> float | None:
        (first, before), (last, now) = self._marks[0], self._marks[-1]
        if last > first:
            return (now - before) / (last - first)
        return now / seconds if seconds > 0 and now else None

    def _written(self, staging: Path) -> int:
        sizes = results_of([staging / path for path, _ in self._sample], written_bytes, tuning.LOOK_THREADS)
        if any(sizes):
            # A file may be a little longer than in the previous checkpoint, so count at most its previous size.
            least = sum(map(min, sizes, (size for _, size in self._sample)))
            return least * (self._total or 0) // max(1, sum(size for _, size in self._sample))
        # There is no previous checkpoint, or the previous checkpoint has other files, because its layout was different.
        # So take any files of the save.
        return sum(results_of(_some_files(staging), written_bytes, tuning.LOOK_THREADS))


def _files_before(root: Path, role: str | None) -> Sequence[FileRecord] | None:
    """Returns the files of the newest complete checkpoint of a role; None if there is none."""
    with suppress(OSError, CheckpointNotFoundError, CheckpointCorruptError):
        status = newest_complete(root, role)
        role = role or (status.flat if status is not None else None)
        if status is not None and role is not None:
            return read_manifest(status.role_dir(role)).files
    return None


def _sample(files: Sequence[FileRecord]) -> list[tuple[str, int]]:
    """Returns path and size of at most _MOST_FILES of the large files, evenly chosen."""
    least = sum(file.size for file in files) / len(files) / 10 if files else 0
    large = [file for file in files if file.size >= least]
    every = max(1, -(-len(large) // _MOST_FILES))
    return [(file.path, file.size) for file in large[::every]]


def _some_files(staging: Path) -> list[Path]:
    files = (Path(parent, name) for parent, _, names in os.walk(staging) for name in names)
    return list(islice((path for path in files if path.name != file_names.OWNER_FILE), _MOST_FILES))


def changes(before: Look | None, after: Look) -> list[Change]:
    """Returns what has changed between two looks. If `before` is None, returns the steps and saves that are there."""
    found = _changes_of_saves(before, after)
    if before is None:
        return [*(Change("there", step) for step in after.steps if step.roles), *found]
    known = {step.step: step for step in before.steps}
    for step in after.steps:
        old = known.get(step.step)
        if old is None and known and after.order(step) < min(map(after.order, before.steps)):
            continue  # this older step is not new: it is in the list only because a newer step is gone
        new_roles = set(step.roles) - set(old.roles if old is not None else ())
        if old is not None and old.created != step.created:
            new_roles |= {role for role in step.roles if _has_ended(before, after, step.step, role)}
        found += (Change("committed", step, role) for role in sorted(new_roles))
        if step.counts and (new_roles or old is None or not old.counts):
            found.append(Change("complete", step))
    there = {step.step for step in after.steps}
    # A step that would now be sorted before the shown steps (it is older, or abandoned) may still exist, and has only
    # left the list of newest steps. Such a step does not count as deleted.
    gone = [step for step in before.steps if step.roles and step.step not in there]
    oldest = min(map(after.order, after.steps), default=(False, -1, -1))
    found += (Change("deleted", step.step) for step in gone if after.order(step) > oldest)
    return found


def _changes_of_saves(before: Look | None, after: Look) -> list[Change]:
    old = {} if before is None else {each.save.staging: each for each in before.saves}
    found = []
    for now in after.saves:
        earlier = old.get(now.save.staging)
        step = now.save.step
        if now.save.life is Life.DEAD:
            if earlier is None or earlier.save.life is not Life.DEAD:
                found.append(Change("died", step, now.save.role, now))
        elif earlier is None:
            found.append(Change("saving", step, now.save.role, now))
        elif (now.percent or 0) // 10 > (earlier.percent or 0) // 10:
            found.append(Change("written", step, now.save.role, now))
    there = {each.save.staging for each in after.saves}
    committed = {(step.step, role) for step in after.steps for role in step.roles}
    for staging, ended in old.items():
        role, step = ended.save.role, ended.save.step
        if staging not in there and (step, role) not in committed and not (role is None and _is_complete(after, step)):
            found.append(Change("ended", step, role, ended))
    return found


def _is_complete(look: Look, step: int) -> bool:
    return any(each.step == step and each.counts for each in look.steps)


def _has_ended(before: Look, after: Look, step: int, role: str) -> bool:
    """True if a save of the role was under way before and no longer is."""
    there = {each.save.staging for each in after.saves}
    return any(
        each.save.step == step and each.save.role in (None, role) and each.save.staging not in there
        for each in before.saves
    )
