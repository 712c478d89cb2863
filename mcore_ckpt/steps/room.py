"""Checks before a save that its files will fit, and foresees whether those of the next save will.

A save frees nothing before its commit: what it replaces and what is too old stay until then. So only what is free now
counts for this save. What the commit will free counts for the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import NoRoomError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.room import Amount, Limit, Need, Room, existing, room_of
from mcore_ckpt.steps.listing import StepStatus, list_steps
from mcore_ckpt.steps.retention import PreservationPolicy, too_old
from mcore_ckpt.steps.step_sizes import NO_FILES, size_of, taken_by
from mcore_ckpt.steps.work_folders import entries

logger = logging.getLogger(__name__)

# The least that a manifest has for each file besides its path: names of fields, digits and commas.
_MANIFEST_BYTES_PER_FILE = 60


@dataclass(frozen=True)
class Saving:
    """A save that is about to begin.

    Attributes:
        role_dir: the role's folder.
        step: the step.
        roles: all roles of the step.
        policy: which steps stay after the commit; None if the checkpoint is not part of a step below the root.
    """

    role_dir: Path
    step: int
    roles: Collection[str]
    policy: PreservationPolicy | None


class RoomWatch:
    """Checks the room for each save of one role. Only rank 0 uses it.

    Args:
        root: the folder of all steps.
        role: the role.
        is_deleting: returns True while this process is deleting old steps.
    """

    def __init__(self, root: Path, role: str, is_deleting: Callable[[], bool]) -> None:
        self._root = root
        self._role = role
        self._is_deleting = is_deleting
        self._warned: str | None = None

    def check(self, saving: Saving, need: Need, patience_s: float) -> None:
        """Refuses a save whose files do not fit, and warns once if those of the next save will not fit.

        If there is too little room now, it first waits for deletions that are under way.

        Args:
            saving: the save.
            need: the files of all ranks.
            patience_s: how long to wait for deletions, in seconds.

        Raises:
            NoRoomError: the files do not fit.
        """
        need += _files_of_rank_0(saving.role_dir, need)
        with suppress(OSError):  # the system does not tell, or the folder cannot be made, which its making will show
            room = self._wait_for_room(saving.role_dir, need, patience_s)
            amount = room.taken_by(need)
            limit = room.shortage(amount)
            if limit is not None and room.is_certain:
                raise NoRoomError(self._refusal(saving, limit, amount))
            later = None if limit is not None else self._shortage_of_next(saving, room, amount)
            self._warn(saving, limit, amount, later)

    # -- this save ----------------------------------------------------------------------------------------------

    def _wait_for_room(self, role_dir: Path, need: Need, patience_s: float) -> Room:
        """Returns the room for a save, as soon as it is enough or no deletion can be seen any more.

        If a deletion still goes on after `patience_s`, the room is returned without limits, because it may suffice.
        """
        began = last_change = time.monotonic()
        room = room_of(role_dir.parent)
        while room.is_certain and room.shortage(room.taken_by(need)) is not None:
            # Some file systems free the bytes of a deleted file a moment later. And a process on another host may be
            # deleting a step, which shows only in the step's name and in the growing room.
            settles_s = tuning.DELETION_SHOWS_S if _has_deleted_steps(self._root) else tuning.ROOM_SETTLES_S
            now = time.monotonic()
            is_deleting = self._is_deleting() or began < last_change > now - settles_s
            if not is_deleting and now - last_change >= min(settles_s, patience_s):
                break
            if now - began >= patience_s:
                logger.warning("%s: too little room, but old steps are still being deleted: the save begins", role_dir)
                return replace(room, limits=())
            time.sleep(tuning.ROOM_POLL_S)
            earlier, room = room, room_of(role_dir.parent)
            if room != earlier:
                last_change = time.monotonic()
        return room

    def _refusal(self, saving: Saving, limit: Limit, amount: Amount) -> str:
        lack = f"{getattr(amount, limit.kind) - limit.free:,} {_WORDS[limit.kind]}"
        return (
            f"{saving.role_dir}: the checkpoint does not fit: {limit.describe(amount)}. Nothing has been "
            f"written. Free at least {lack}: {self._what_prune_frees()}"
        )

    def _what_prune_frees(self) -> str:
        try:
            statuses = list_steps(self._root)
        except OSError:
            statuses = []
        old = too_old(statuses, PreservationPolicy(max_to_keep=1))
        if not old:
            return f"no step below {self._root} could be deleted, because none is older than the newest complete one"
        freed = taken_by(old)
        return (
            f"'mcore-ckpt prune {self._root} --max-to-keep 1' would delete {len(old)} steps with {freed.nbytes:,} "
            f"bytes in {freed.entries:,} files and folders"
        )

    # -- the next save ------------------------------------------------------------------------------------------

    def _shortage_of_next(self, saving: Saving, room: Room, amount: Amount) -> tuple[Limit, Amount] | None:
        """Returns the limit that the next save of the same size will exceed, and what that save and the step need."""
        if room.shortage(amount + amount) is None or saving.policy is None:
            return None
        statuses = list_steps(self._root)
        # The other roles of the step will need about what they have needed last.
        others = NO_FILES
        for role in set(saving.roles) - {self._role}:
            last = next((each for each in reversed(statuses) if role in each.committed), None)
            others += NO_FILES if last is None else size_of(last).taken.get(role, NO_FILES)
        whole = amount + others
        freed = _freed_by(saving, statuses)
        left = tuple(
            replace(limit, free=limit.free - getattr(whole, limit.kind) + getattr(freed, limit.kind))
            for limit in room.limits
        )
        limit = replace(room, limits=left).shortage(whole)
        return None if limit is None else (limit, whole)

    def _warn(self, saving: Saving, limit: Limit | None, amount: Amount, later: tuple[Limit, Amount] | None) -> None:
        """Logs a warning, unless the same limit was the reason of the last warning and is so still."""
        reason = limit or (later[0] if later is not None else None)
        where = None if reason is None else f"{reason.kind} {reason.where}"
        if where is None or where == self._warned:
            self._warned = where
            return
        self._warned = where
        if limit is not None:
            logger.warning(
                "%s: %s. The file system may store the files in less room, so the save is tried",
                saving.role_dir,
                limit.describe(amount),
            )
        elif later is not None:
            logger.warning(
                "%s: this save fits, but after it and the deletion of old steps the next one will not: %s. Free room, "
                "or keep fewer steps (max_to_keep); %s",
                saving.role_dir,
                replace(later[0], free=max(0, later[0].free)).describe(later[1]),
                self._what_prune_frees(),
            )


_WORDS = {"nbytes": "bytes", "entries": "files"}


def _files_of_rank_0(role_dir: Path, need: Need) -> Need:
    """Returns the need of what rank 0 makes in every save: owner file, manifest, and missing folders."""
    above = existing(role_dir.parent)
    missing = len(role_dir.parent.parts) - len(above.parts)
    manifest = _MANIFEST_BYTES_PER_FILE * len(need.sizes)
    folders = (f"../{number}" for number in range(missing + 1))
    return Need((1, max(1, manifest)), frozenset(folders))


def _has_deleted_steps(root: Path) -> bool:
    return any(file_names.is_deleted_dir(entry.name) for entry in entries(root))


def _freed_by(saving: Saving, statuses: Sequence[StepStatus]) -> Amount:
    """Returns what will be free once the step is complete: the steps that are too old then, and what it replaces."""
    roles = frozenset(saving.roles)
    replaced = [status for status in statuses if status.step == saving.step]
    pinned = any(status.pinned for status in replaced)
    committed = StepStatus(saving.step, saving.role_dir.parent, roles, roles, (), pinned)
    later = sorted([*(status for status in statuses if status not in replaced), committed], key=lambda each: each.step)
    assert saving.policy is not None, "without a policy nothing is deleted"
    # What is too old may have this step's number, but it is not on the disk yet.
    old = [status for status in too_old(later, saving.policy, saving.step) if status is not committed]
    return taken_by(old) + taken_by(replaced)
