"""Finds out which trainers of a root are alive, without taking a lock and without writing anything."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.steps import trainer_lock
from mcore_ckpt.steps.owner import Life, Owner
from mcore_ckpt.steps.trainer_lock import Claim, read_claim


class TrainerWatch:
    """Watches the locks of a root's trainers from now on. If the root cannot be read, the watch sees no trainer."""

    def __init__(self, root: Path) -> None:
        self._began = time.monotonic()
        self._root = root
        self._first = {role: _claim(root, role) for role in _locked_roles(root)}

    def trainers(self) -> dict[str, tuple[Owner, Life]]:
        """Returns the process that holds each role's lock, and whether the process is alive."""
        claims = {role: _claim(self._root, role) for role in sorted(_locked_roles(self._root))}
        return {
            role: (claim.owner, self._life(role))
            for role, claim in claims.items()
            if claim is not None and claim.owner is not None
        }

    def lives(self) -> dict[str, Life]:
        """Returns, for each role that has a lock file, whether its trainer is alive."""
        return {role: self._life(role) for role in _locked_roles(self._root)}

    def _life(self, role: str) -> Life:
        try:
            claim = read_claim(file_names.trainer_file(self._root, role))
        except OSError:
            return Life.UNKNOWN  # the file cannot be read
        if claim is None:
            return Life.DEAD  # the trainer has ended
        life = Life.UNKNOWN if claim.owner is None else claim.owner.life
        if life is not Life.UNKNOWN:
            return life
        if claim != self._first.setdefault(role, claim):
            return Life.ALIVE
        # A trainer may touch the file late. So a trainer whose process cannot be seen counts as dead only after the
        # time between two touches has passed twice.
        waited = time.monotonic() - self._began
        return Life.UNKNOWN if waited < 2 * trainer_lock.TRAINER_BEAT_S else Life.DEAD


def any_life(lives: Iterable[Life]) -> Life:
    """Returns whether any of several trainers is alive.

    Example:
        >>> any_life([Life.DEAD, Life.UNKNOWN])
        <Life.UNKNOWN: 'unknown'>
    """
    lives = set(lives)
    return next((life for life in (Life.ALIVE, Life.UNKNOWN) if life in lives), Life.DEAD)


def _locked_roles(root: Path) -> set[str]:
    with suppress(OSError):
        return {role for name in os.listdir(root) if (role := file_names.role_of_trainer_file(name)) is not None}
    return set()


def _claim(root: Path, role: str) -> Claim | None:
    with suppress(OSError):
        return read_claim(file_names.trainer_file(root, role))
    return None
