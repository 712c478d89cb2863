"""Gives a PreemptionGuard access to a manager's saves, so that the guard can make the last save in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.save.background import BackgroundSaves
from mcore_ckpt.save.destination import Destination


@dataclass(frozen=True, eq=False)
class SaveControl:
    """The saves of one manager, for one guard.

    Attributes:
        role: the manager's role.
        agreement: connects the ranks on the trainer's thread.
        commits: connects the ranks on the thread of the saves.
        background: the saves that are under way.
        destination: where saves go.
        open_own: returns a further agreement of the manager's ranks. Only the guard uses this agreement, on the
            trainer's thread.
    """

    role: str
    agreement: Agreement
    commits: Agreement
    background: BackgroundSaves
    destination: Destination
    open_own: Callable[[], Agreement]

    @property
    def is_closed(self) -> bool:
        """True if the manager is closed on this rank."""
        return self.agreement.is_closed

    def limit_waits(self, seconds: float, even_later: bool = True) -> None:
        """Limits every wait for other ranks or for copies of a step: each wait ends within `seconds` from now.

        See `Agreement.limit_waits`.
        """
        self.agreement.limit_waits(seconds, even_later)
        self.commits.limit_waits(seconds, even_later)
        self.destination.limit_waits(seconds, even_later)
