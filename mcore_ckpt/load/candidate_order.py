"""Sorts the checkpoints that a load can choose from by their commits. A candidate is a record of JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.steps.branches import StepCommit, oldest_first


@dataclass(frozen=True)
class Candidate:
    """A candidate as `branches` sees it."""

    step: int
    commit: StepCommit
    record: Record
    is_complete: bool = True

    @staticmethod
    def of(record: Record) -> Candidate:
        """Reads the place of a candidate among all commits."""
        return Candidate(record["step"], StepCommit(*record["commit"]), record)


def record_of(commit: StepCommit) -> list[Any]:
    """Returns the `commit` of a candidate."""
    return [commit.number, commit.branch]


def last_first(records: Sequence[Record]) -> list[Record]:
    """Sorts candidates by their commits, the abandoned ones last. Those of one commit stay in their order."""
    return [each.record for each in reversed(oldest_first(list(map(Candidate.of, reversed(records)))))]
