"""Chooses how the last step is saved in the time that is left: durable, on the nodes only, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mcore_ckpt.ranks import deadlines

DURABLE, ON_NODES = "durable", "on the nodes"
# The time that is reserved for a save, as a multiple of the time that it is expected to take.
MARGIN = 1.25
# The assumed time of a save, or of a copy to the root, as long as no time has been measured, in seconds.
_UNKNOWN_S = 60.0
# The time that is reserved for the choice itself, in seconds. This time includes EXTRA_WAIT_S, because waits of rank 0
# may end EXTRA_WAIT_S earlier than waits of the other ranks.
TO_CHOOSE_S = deadlines.EXTRA_WAIT_S + 1.0
# The share of the remaining time that may pass before a save of unknown length begins.
_SHARE_BEFORE_UNKNOWN = 0.5


@dataclass(frozen=True)
class Choice:
    """The decision how the last step is saved in the time that is left. The decision holds for all managers.

    Attributes:
        how: "durable" or "on the nodes"; None: the step is not saved.
        is_new: whether the step is saved now; if not, an earlier save of the step counts.
        reason: why the step does not become durable; empty if it does.
    """

    how: str | None
    is_new: bool
    reason: str = ""


@dataclass(frozen=True)
class Times:
    """How long saves take, in seconds; None if unknown.

    Attributes:
        commit_s: from the beginning of a save until it is committed (with a fast tier: on the nodes).
        drain_s: from the commit until the step is in the root; 0.0 if steps are not copied to the root.
        given_s: how long a durable save takes in all, as the caller has said. Measured times are preferred.
    """

    commit_s: float | None
    drain_s: float | None
    given_s: float | None

    @property
    def durable_s(self) -> float | None:
        """How long a durable save takes, or a lower bound if no more is known; None if nothing is known."""
        if self.commit_s is not None and self.drain_s is not None:
            return self.commit_s + self.drain_s
        return max((each for each in (self.commit_s, self.given_s) if each is not None), default=None)

    @property
    def is_known(self) -> bool:
        """True if it is known how long a durable save takes."""
        return self.given_s is not None or (self.commit_s is not None and self.drain_s is not None)

    @property
    def reserve_s(self) -> float:
        """How long before the end of the training's time a durable save must begin, at the latest.

        All nodes go at the end of the training's time, so a step that is only on the nodes would be lost.
        """
        known_s = 0.0 if self.durable_s is None else self.durable_s * MARGIN
        return known_s if self.is_known else known_s + _UNKNOWN_S


def patience_before(left_s: float, takes_s: float | None, is_known: bool) -> float:
    """Returns for how many seconds to wait for something, so that a save still fits afterwards.

    Args:
        left_s: how many seconds are left; infinite if that is unknown.
        takes_s: how long the save takes, or a lower bound; None if nothing is known.
        is_known: False if `takes_s` is a lower bound or None.
    """
    needed_s = (takes_s or 0.0) * MARGIN + TO_CHOOSE_S
    share = 1.0 if is_known else _SHARE_BEFORE_UNKNOWN
    return max(0.0, min(left_s - needed_s, left_s * share))


def choose(
    left_s: float,
    times: Times,
    saved: str | None,
    has_nodes: bool,
    has_root: bool,
    is_drained: bool = True,
    is_copied: bool = True,
) -> Choice:
    """Chooses what to save.

    Args:
        left_s: how many seconds are left; infinite if that is unknown.
        times: how long saves take. A save of unknown length is tried.
        saved: how the step is saved already; None if it is not saved.
        has_nodes, has_root: where saves can go.
        is_drained: False if an earlier step is still being copied to the root. A durable save would wait for this copy.
        is_copied: False if the step itself is still being copied. Each save of the step would wait for this copy.
    """
    if saved == DURABLE:
        return Choice(saved, is_new=False)
    copies = "" if is_copied else "an earlier save of this step is still being copied"
    problem = "the root gets no steps (durable_every=None)"
    if has_root:
        drains = "" if is_drained else "an earlier step is still being copied to the root"
        problem = drains or copies or _why_too_long("a durable save", times.durable_s, left_s)
        if not problem:
            return Choice(DURABLE, is_new=True)
    if saved is not None:
        return Choice(saved, is_new=False, reason=problem)
    if not has_nodes:
        return Choice(None, is_new=False, reason=problem)
    obstacle = copies or _why_too_long("a save on the nodes", times.commit_s, left_s)
    if obstacle:
        return Choice(None, is_new=False, reason=obstacle)
    return Choice(ON_NODES, is_new=True, reason=problem)


def _why_too_long(what: str, takes_s: float | None, left_s: float) -> str:
    if takes_s is None or takes_s * MARGIN <= left_s:
        return ""
    return f"{what} takes about {takes_s:.1f} s, but only {max(0.0, left_s):.1f} s are left"


def least_safe(saved: Iterable[str | None]) -> str | None:
    """Returns the least safe of the ways in which a step's roles are saved.

    Returns None if a role is not saved, or if there is no role.
    """
    return min(saved, key=(None, ON_NODES, DURABLE).index, default=None)
