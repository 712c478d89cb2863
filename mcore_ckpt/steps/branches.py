"""Numbers commits, and tells which commits a later commit has given up. This module reads nothing from disk.

The commits below a root have ascending numbers. Each commit also has the numbers of the commits that led to it (its
branch). After a rollback, or a fresh start in a used root, the steps that are not in the branch of the last commit are
abandoned. `choice.py` decides whether abandoned steps are loaded or deleted.

Checkpoints of older versions have no commit numbers. A step of such checkpoints counts as if its step number were its
commit number, and all lower numbers were in its branch. A trainer that has seen such steps begins with a larger number,
so all steps have one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mcore_ckpt.checkpoint.provenance import MOST_RANGES, Commit, Ranges, merged


@dataclass(frozen=True)
class StepCommit:
    """The place of a step among all commits: the largest commit number of its roles, and the branch of this number."""

    number: int
    branch: Ranges

    def leads_from(self, number: int) -> bool:
        """True if a number is in the branch."""
        return any(first <= number <= last for first, last in self.branch)

    def has_given_up(self, number: int) -> bool:
        """True if a number is smaller than the number of this place and not in the branch."""
        return number < self.number and not self.leads_from(number)


def commit_of(step: int, commits: Iterable[Commit | None]) -> StepCommit:
    """Returns the place of a step whose roles have these commits. None stands for a role without a number."""
    numbered = [commit for commit in commits if commit is not None]
    number = max((commit.number for commit in numbered), default=step)
    ranges = [part for commit in numbered if commit.number == number for part in commit.branch] or [(0, step)]
    return StepCommit(number, merged([*ranges, (number, number)]))


@dataclass(frozen=True)
class Position:
    """The place of one role's training among the commits.

    Attributes:
        last: the largest commit number that is known.
        of_role: the largest number of this role's commits. After a load, the commits that other roles had made to this
            role's steps count, too.
        parent: the `attempt` of the checkpoint that was loaded or saved last; None after a fresh start.
        branch: the branch of that checkpoint.
    """

    last: int = 0
    of_role: int = 0
    parent: str | None = None
    branch: Ranges = ()

    def next(self, of_step: int | None = None) -> Commit:
        """Returns the next commit.

        `of_step` is the commit number that the step's other roles have. If `of_step` is larger than `of_role`, the
        commit gets the number `of_step`, otherwise a new number. So the numbers of a role always grow, even if the role
        saves a step again, and roles never share a number from before a load.
        """
        number = of_step if of_step is not None and of_step > self.of_role else max(self.last, self.of_role) + 1
        if self.branch and self.of_role <= self.branch[-1][1]:
            branch = (*self.branch[:-1], (self.branch[-1][0], number))
        else:  # after the loaded checkpoint, the role's steps got commits that are given up now
            branch = (*self.branch, (number, number))
        return Commit(number, self.parent, branch[-MOST_RANGES:])

    def after(self, commit: Commit, attempt: str) -> Position:
        """Returns the position after a commit."""
        return Position(max(self.last, commit.number), max(self.of_role, commit.number), attempt, commit.branch)

    def at(self, step: int, commit: Commit | None, attempt: str, others: Sequence[Commit | None] = ()) -> Position:
        """Returns the position after loading a checkpoint. `others` are the commits of the step's other roles."""
        own, loaded = commit_of(step, [commit]), commit_of(step, [commit, *others])
        if loaded.has_given_up(own.number):  # the other roles have saved the step again since
            loaded = own
        return Position(max(self.last, loaded.number), max(self.of_role, loaded.number), attempt, loaded.branch)

    def seen(self, last: int, of_role: int) -> Position:
        """Returns the position after the numbers `last` and `of_role` have been seen.

        Numbers that are smaller than the known numbers change nothing.
        """
        return Position(max(self.last, last), max(self.of_role, of_role), self.parent, self.branch)
