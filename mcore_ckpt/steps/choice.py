"""Finds the newest step, and chooses the steps to load from, in a root, a store and on nodes together.

The newest step is the step that was committed last. It need not have the highest step number. Clocks do not count. The
last commit of a role also says which steps are abandoned for that role (`branches.py`). To find the abandoned steps,
the manifest of that commit is enough. If files of the last commit are missing, its step cannot be loaded, but the
abandoned steps stay abandoned. So damage brings back a step that the training has given up only if nothing else is
left.

This module itself reads nothing, but the property `is_complete` of a step may look at the step's files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

from mcore_ckpt.checkpoint.provenance import MOST_RANGES, Commit
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from mcore_ckpt.steps.branches import StepCommit, commit_of
from mcore_ckpt.steps.worth import Weighed

logger = logging.getLogger(__name__)

Step = TypeVar("Step", bound=Weighed)

NOTHING: Mapping[str, Collection[str]] = MappingProxyType({})


def order_of(step: Weighed) -> tuple[int, int]:
    """Returns a sort key by commit. If two steps have the same commit number, the step number decides."""
    return step.commit.number, step.step


def last_commit(steps: Iterable[Weighed], roles: Sequence[str] = ()) -> StepCommit | None:
    """Returns the last commit, as far as manifests can be read; None if no manifest can be read.

    Only the commits of `roles` count; if `roles` is empty, all commits count. Roles that are saved at different steps
    have their own branches.
    """
    last, place = None, (-1, -1)
    for each in steps:
        commits = [claim.commit for claim in each.claims if not roles or claim.role in roles]
        number = max((commit.number for commit in commits if commit is not None), default=each.step)
        if commits and (number, each.step) > place:
            last, place = (each.step, commits), (number, each.step)
    return None if last is None else commit_of(*last)


def _order(steps: Sequence[Weighed], roles: Sequence[str]) -> Callable[[Weighed], tuple[bool, int, int]]:
    last = last_commit(steps, roles)
    return lambda step: (last is None or not last.has_given_up(step.commit.number), *order_of(step))


def oldest_first(steps: Sequence[Step], roles: Sequence[str] = ()) -> list[Step]:
    """Sorts steps by their commits, with abandoned steps before all others. A load tries the steps from the end.

    Steps of the same commit keep their order. Only the commits of `roles` count; if `roles` is empty, all commits
    count.
    """
    return sorted(steps, key=_order(steps, roles))


def abandoned(steps: Sequence[Weighed]) -> frozenset[int]:
    """Returns the numbers of the steps that all of their roles have given up.

    A role gives up the steps that are not in the branch of its own last commit. Roles that are saved at different steps
    do not know each other's commits, so the last commit of one role gives up no step of another role.
    """
    lasts = {role: last_commit(steps, (role,)) for role in {claim.role for each in steps for claim in each.claims}}
    return frozenset(each.step for each in steps if _is_given_up(each, lasts))


def _is_given_up(step: Weighed, lasts: Mapping[str, StepCommit | None]) -> bool:
    # A role without a commit number, such as a role of plain files, counts only if no role of the step has a number.
    claims = [claim for claim in step.claims if claim.commit is not None] or step.claims
    found = [(lasts[claim.role], claim.number) for claim in claims]
    return bool(found) and all(last is not None and last.has_given_up(number) for last, number in found)


def newest(steps: Sequence[Step]) -> Step | None:
    """Returns the complete step that is to be loaded first; None if no step is complete."""
    return next((step for step in reversed(oldest_first(steps)) if step.is_complete), None)


def by_step(step: int, others: Sequence[Weighed]) -> Commit | None:
    """Returns the commit for a step that a tool writes.

    The commit shares the commit number of the next lower step, or of the lowest step if there is no lower step. So a
    later step stays the newest. Returns None if there are no other steps.
    """
    given_up = abandoned(others)
    there = sorted((each for each in others if each.step not in given_up), key=order_of)
    before = [each for each in there if each.step <= step][-1:] or there[:1]
    return next((Commit(each.commit.number, None, each.commit.branch[-MOST_RANGES:]) for each in before), None)


@dataclass(frozen=True)
class Choice(Generic[Step]):
    """The steps to load from.

    Attributes:
        steps: the steps to try, in this order: the newest whole step, then older steps, whose files nobody has looked
            at, because there may be thousands of older steps. Abandoned steps come last.
        passed_over: the newer steps that cannot be loaded, and the steps of another run. If there is no step to try,
            `passed_over` has all steps.
        roles: the roles to load.
        stripped: the steps that are not tried, because retention has removed what the load needs; the newest first.
    """

    steps: tuple[Step, ...]
    passed_over: tuple[Step, ...]
    roles: tuple[str, ...]
    stripped: tuple[Step, ...] = ()

    @property
    def error(self) -> type[CheckpointError]:
        """The error to raise if there is no step to try.

        A step that lacks files can perhaps be mended, so the error differs from the error for a root without steps.
        """
        lacks_files = any(step.is_claimed and step.lacks for step in self.passed_over)
        return CheckpointCorruptError if lacks_files else CheckpointNotFoundError

    def reason(self, step: Step) -> str:
        """Says why a step is passed over."""
        if not step.is_complete:
            return step.reason
        if step in self.stripped:
            return f"{step.where}: complete, but {_what_is_gone(step)}"
        missing = [role for role in self.roles if role not in step.committed]
        return f"{step.where}: complete, but without {', '.join(missing)}"

    @property
    def last_resort(self) -> str:
        """Advice for the case that no step can be loaded: how to load the newest of the `stripped` steps.

        Empty if there are no such steps.
        """
        if not self.stripped:
            return ""
        left = self.stripped[0]
        return (
            f"{left.where}: {_what_is_gone(left)}: to go on from its weights with a new optimizer, name this step, "
            "with load_contents=('model', 'extra')"
        )

    def warn(self) -> None:
        """Logs which steps are passed over, and why."""
        for step in self.passed_over:
            if step.is_of_other_run:
                logger.warning("a step is not loaded: %s", self.reason(step))
            else:
                logger.warning("a newer step is not loaded: %s", self.reason(step))


def _what_is_gone(step: Weighed) -> str:
    return f"retention has removed its {', '.join(sorted(step.dropped))}, which only the newest steps keep"


def choose(
    steps: Sequence[Step], roles: Sequence[str] = (), needed: Mapping[str, Collection[str]] = NOTHING
) -> Choice[Step]:
    """Chooses the steps to load from. Each of these steps has all `roles`.

    Of two steps with the same commit number, the step with the higher step number is tried first.

    `needed` has, by role, the contents that the load needs, such as "optimizer". If retention has removed some of these
    contents from a step, the step is chosen only if no whole step has all of these contents. Then the load says what is
    missing.

    Raises OSError or RemoteError: the files of a step cannot be looked at.
    """
    order = _order(steps, roles)
    last_first = sorted(steps, key=order)[::-1]
    having_roles = [step for step in last_first if step.committed.issuperset(roles)]
    stripped = tuple(step for step in having_roles if step.is_claimed and step.has_lost(needed))
    tried = tuple(_whole_first([step for step in having_roles if not step.has_lost(needed)]))
    if stripped and not tried:
        tried, stripped = tuple(_whole_first(having_roles)), ()
    if not tried:
        return Choice((), tuple(last_first), tuple(roles))

    def is_passed_over(step: Step) -> bool:
        # Without claims, the step has no manifest that can be read. If the step has no problems either, its save may be
        # under way, so the step is not passed over.
        if not step.claims:
            return bool(step.problems) and (step.is_of_other_run or step.step > tried[0].step)
        return step.is_of_other_run or order(step) > order(tried[0])

    return Choice(tried, tuple(filter(is_passed_over, last_first)), tuple(roles), stripped)


def _whole_first(last_first: Iterable[Step]) -> Iterator[Step]:
    """Yields the first whole step, and the claimed steps after it."""
    steps = iter(last_first)
    for step in steps:
        if step.is_complete:
            yield step
            break
    yield from (step for step in steps if step.is_claimed)
