"""Saves to the shared root."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint.manifest import Manifest, WrittenFile
from mcore_ckpt.io.disk_space import Need
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.save.context import SaveContext
from mcore_ckpt.save.destination import Following, Place, Written
from mcore_ckpt.save.file_contents import together
from mcore_ckpt.save.hf_export import export_of
from mcore_ckpt.save.root_commit import commit_to_root, old_steps, upload
from mcore_ckpt.save.save_times import SaveTimes
from mcore_ckpt.steps import commit, leftovers, tracker
from mcore_ckpt.steps.listing import check_one_spelling, heads_at
from mcore_ckpt.steps.pins import warn_if_pinned
from mcore_ckpt.steps.space_watch import Saving
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.transaction import Attempt, await_opening, is_committed, late_opening_of, open_together


class Root:
    """The shared root as the destination of one manager's saves."""

    def __init__(self, context: SaveContext) -> None:
        self._context, self._trainer = context, context.trainer
        self.contents = context.trainer.config.save_contents
        self._has_opened = False
        self._interrupted: list[Attempt] = []

    @property
    def lock(self) -> TrainerLock:
        return self._context.lock

    def writers_of(self, replicas: Sequence[int]) -> Sequence[tuple[int, ...]]:
        return together(replicas)

    def folder_of(self, saving: Saving) -> Path:
        return saving.role_dir

    def open(
        self, topic: str, saving: Saving, busy: bool, failure: Record | None, need: Need, parts: Sequence[str]
    ) -> Place:
        # A slow file system must not hold up an asynchronous save. But if the save has a function `prepared`, the
        # caller relies on the result of this function, so `prepared` must have run when `save` returns.
        may_be_late = self._trainer.config.async_save and saving.prepared is None
        attempt = open_together(
            self._trainer.agreement,
            topic,
            saving.role_dir,
            busy,
            failure,
            partial(self.prepare, saving),
            need,
            parts,
            folder_mode=partial(self._trainer.folder_mode, saving.role_dir),
            patience_s=deadlines.DISK_PATIENCE_S if may_be_late else math.inf,
            skips=self._trainer.config.if_busy == "skip",
        )
        return PlaceInRoot(self._context, saving, attempt)

    def rounds_of(self, number: str, opened: Record) -> list[str]:
        late = [late_opening_of(number)] if opened.get("late") else []
        exports = [export_of(number)] if "hf_model" in self._trainer.config.save_contents else []
        return [*late, *exports, number]

    def loaded(self, manifest: Manifest) -> None:
        pass

    def wait(self) -> None:
        pass

    has_nodes, has_root, drain_s = False, True, 0.0

    def choose_next(self, durable: bool) -> None:
        pass

    def await_drain(self, patience_s: float | None) -> bool:
        return True

    def await_copies_of(self, step: int, patience_s: float | None) -> bool:
        return True

    def limit_waits(self, seconds: float, even_later: bool = True) -> None:
        pass

    def interrupted(self, attempt: Attempt) -> None:
        """Notes a save that a signal handler has ended on this rank. Other ranks may still be writing."""
        self._interrupted.append(attempt)

    def remove_interrupted(self) -> None:
        """Removes the files that interrupted saves have left.

        The next save and the close of the manager call this method, when no rank works on these files any more.
        """
        while self._interrupted:
            attempt = self._interrupted.pop()
            if not is_committed(attempt):
                commit.discard(attempt.staging)

    def prepare(self, saving: Saving, need: Need) -> None:
        """Takes the role's trainer lock, removes leftovers of dead processes, and checks the free space.

        Only rank 0 calls this method, while the other ranks wait. `need` has the files of all ranks.

        Raises:
            LockedError: another trainer saves this role.
            NoRoomError: the files do not fit.
            CommitError: the step already has a folder with another name, or belongs to another run.
            OSError: the lock cannot be written, or leftovers cannot be removed.
            CheckpointError: `saving.prepared` has raised it.
        """
        # The other ranks wait for this rank for `timeout_s` seconds at most, so all waits here together take at most
        # 7/8 of that time. The waits include the look at old steps before `space_watch.check` refuses a save.
        timeout_s = self._trainer.config.timeout_s
        self._take_lock(saving, need, timeout_s)
        self.remove_interrupted()
        if not self._has_opened:
            leftovers.remove_leftovers(self._trainer.root, self._trainer.role, alone=True)
        self._has_opened = True
        leftovers.remove_sibling_leftovers(saving.role_dir)
        if saving.policy is not None:
            check_one_spelling(self._trainer.root, saving.role_dir, saving.step)
        self._context.history.check_may_replace(saving.role_dir, heads := heads_at(saving.role_dir))
        if saving.policy is not None and heads:
            warn_if_pinned(saving.role_dir, saving.step)
        self._context.space_watch.check(saving, need, timeout_s / 4)
        # The work above may take minutes. If another trainer has taken the lock over meanwhile, refuse the save now,
        # because the commit would refuse it only after all files are written.
        self._context.lock.take(patience_s=0)
        if self._context.uploads is not None and saving.policy is not None:
            self._context.uploads.expect(need)
        if saving.prepared is not None:
            saving.prepared()

    def _take_lock(self, saving: Saving, need: Need, timeout_s: float) -> None:
        """Takes the role's trainer lock. Raises LockedError, OSError, or NoRoomError if the disk is full."""
        try:
            self._context.lock.take(timeout_s / 2)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # This check says how much space is missing, or waits for deletions. After the deletions, the lock's file
            # fits, too.
            self._context.space_watch.check(saving, need, timeout_s / 8)
            self._context.lock.take(patience_s=0)


@dataclass(frozen=True, eq=False)
class PlaceInRoot:
    """One save to the root, on this rank."""

    context: SaveContext
    saving: Saving
    attempt: Attempt

    def capturing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self) -> None:
        pass

    def await_opening(self, topic: str) -> None:
        await_opening(self.context.commits, topic, self.attempt)

    def check(self, files: Sequence[Written], structures: Sequence[Mapping[str, str]]) -> None:
        commit.check_files(self.attempt.staging, files)
        commit.check_structures(structures)

    def placed(self, files: Sequence[Written]) -> tuple[Sequence[Written], None]:
        return files, None

    def commit(
        self,
        topic: str,
        write: Callable[[Path], Record],
        describe: Callable[[Sequence[Record]], Manifest],
        times: SaveTimes,
    ) -> list[WrittenFile]:
        commits = self.context.commits
        return commit_to_root(self.context, commits, topic, self.attempt, write, describe, self._move_tracker, times)

    def follow(self) -> Following:
        old = old_steps(self.context, self.context.commits, self.saving)
        uploaded = upload(self.context, self.saving)
        if old is None:
            return Following(uploaded)
        found = frozenset(decision.status.step for decision in old.found)
        return Following(uploaded, delete=old.delete, deletes=found)

    def _move_tracker(self) -> None:
        if self.saving.policy is not None:
            tracker.move_tracker(self.context.trainer.root, self.saving.step, seen=self.attempt.role_dir)
