"""Does what rank 0 does at the beginning of a save: take the lock, remove leftovers, check the room."""

from __future__ import annotations

import errno

from mcore_ckpt.io.room import Need
from mcore_ckpt.save.context import SaveContext
from mcore_ckpt.steps import leftovers
from mcore_ckpt.steps.commit import discard
from mcore_ckpt.steps.listing import check_one_spelling, heads_at
from mcore_ckpt.steps.room import Saving
from mcore_ckpt.steps.transaction import Attempt, is_committed


class Opening:
    """Prepares the folder of each save of one manager. Only rank 0 uses it, while the other ranks wait.

    Args:
        context: what the saves of the manager share.
    """

    def __init__(self, context: SaveContext) -> None:
        self._context, self._trainer = context, context.trainer
        self._has_opened = False
        self._interrupted: list[Attempt] = []

    def interrupted(self, attempt: Attempt) -> None:
        """Notes a save that a signal handler has ended on this rank, while others may still have been writing."""
        self._interrupted.append(attempt)

    def remove_interrupted(self) -> None:
        """Removes what such saves have left. All ranks have left them by the next save, and when they close."""
        while self._interrupted:
            attempt = self._interrupted.pop()
            if not is_committed(attempt):
                discard(attempt.staging)

    def prepare(self, saving: Saving, need: Need) -> None:
        """Takes the role's trainer lock, removes leftovers of dead processes, and checks the room.

        Args:
            saving: the save that begins.
            need: the files of all ranks.

        Raises:
            LockedError: another trainer saves this role.
            NoRoomError: the files do not fit.
            CommitError: the step already has a folder with another name, or belongs to another run.
            OSError: the lock cannot be written, or leftovers cannot be removed.
        """
        # The other ranks wait for this one only until `timeout_s`, so all waits together take at most 7/8 of it. In
        # that is a refusal's look at old steps.
        timeout_s = self._trainer.config.timeout_s
        self._take_lock(saving, need, timeout_s)
        self._context.history.release()
        self.remove_interrupted()
        if not self._has_opened:
            leftovers.remove_leftovers(self._trainer.root, self._trainer.role, alone=True)
        self._has_opened = True
        leftovers.remove_leftovers_beside(saving.role_dir)
        if saving.policy is not None:
            check_one_spelling(self._trainer.root, saving.role_dir, saving.step)
        self._context.history.check_may_replace(saving.role_dir, heads_at(saving.role_dir))
        self._context.room.check(saving, need, timeout_s / 4)
        # The steps above may take minutes. If another trainer has taken the lock over meanwhile, refuse the save now,
        # because the commit would refuse it only after all files are written.
        self._context.lock.take(patience_s=0)
        if self._context.uploads is not None and saving.policy is not None:
            self._context.uploads.expect(need)

    def _take_lock(self, saving: Saving, need: Need, timeout_s: float) -> None:
        """Takes the role's trainer lock. Raises LockedError, OSError, or NoRoomError if the disk is full."""
        try:
            self._context.lock.take(timeout_s / 2)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # It says how much is missing, or waits for deletions, after which there is room for the lock, too.
            self._context.room.check(saving, need, timeout_s / 8)
            self._context.lock.take(patience_s=0)
