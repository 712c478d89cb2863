"""Describes the run and the commit of a checkpoint. The commit names the earlier commits that led to the checkpoint.

The manifest contains the run and the commit (docs/format.md). `steps/runs.py` decides which root owns a checkpoint, and
`steps/branches.py` decides which checkpoint is the newest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mcore_ckpt.io import json_fields as fields

# Commit numbers, as ascending ranges `(first, last)` that include `last`.
Ranges = tuple[tuple[int, int], ...]
# The largest number of ranges in a commit's branch. When a training goes back to an earlier checkpoint, its branch gets
# one more range. If there are more ranges, the oldest are dropped.
MOST_RANGES = 256


@dataclass(frozen=True)
class RunParent:
    """The step of another run with which a run began.

    `run` is the other run's id; empty if the other run had no id.
    """

    run: str
    step: int


@dataclass(frozen=True)
class Run:
    """The training that saved a checkpoint. A run begins when its root is made, and goes on over restarts.

    Attributes:
        id: 32 hexadecimal digits.
        parent: the step of another run with which this run began; None if this run began without such a step.
        root: the folder of the steps at the time of the save, as an absolute path without links.
        host: the name of the host that saved the checkpoint.
    """

    id: str
    parent: RunParent | None = None
    root: str = ""
    host: str = ""

    def __str__(self) -> str:
        return f"run {self.id[:8]} of {self.root} on {self.host}" if self.root else f"run {self.id[:8]}"


@dataclass(frozen=True)
class Commit:
    """The place of a checkpoint among all checkpoints that were ever committed in its root.

    Attributes:
        number: grows with each commit of a root. The roles of a step share one number, but a role that saves the step
            again gets a new number.
        parent: the `attempt` of the checkpoint that the training had saved or loaded last; None if there was none.
        branch: the numbers of the commits that led to this commit, and this commit's own number. Earlier commits whose
            numbers are missing in `branch` were given up, or are so old that their range was dropped.
    """

    number: int
    parent: str | None = None
    branch: Ranges = ()


def encoded_run(run: Run) -> dict[str, Any]:
    """Returns the run as JSON values."""
    return {**vars(run), "parent": run.parent and vars(run.parent)}


def decode_run(item: Any) -> Run:
    """Reads and checks the run of a manifest. Raises FieldError."""
    record = fields.as_dict(item, "run")
    parent = None
    if record.get("parent") is not None:
        of = fields.get_dict(record, "parent")
        parent = RunParent(fields.get_name(of, "run"), fields.get_int(of, "step"))
    names = [fields.as_name(record.get(key, ""), key) for key in ("root", "host")]
    return Run(fields.get_name(record, "id"), parent, *names)


def encoded_commit(commit: Commit) -> dict[str, Any]:
    """Returns the commit as JSON values."""
    return {**vars(commit), "branch": [list(numbers) for numbers in commit.branch]}


def decode_commit(item: Any) -> Commit:
    """Reads and checks the commit of a manifest. Raises FieldError."""
    record = fields.as_dict(item, "commit")
    number = fields.get_int(record, "number")
    parent = None if record.get("parent") is None else fields.get_name(record, "parent")
    branch = tuple(_range(item) for item in fields.get_list(record, "branch"))
    if len(branch) > MOST_RANGES or any(before[1] >= after[0] for before, after in pairwise(branch)):
        raise fields.FieldError("branch of the commit is too long, or its numbers do not ascend")
    return Commit(number, parent, branch or ((number, number),))


def _range(item: Any) -> tuple[int, int]:
    numbers = fields.as_ints(item, "branch")
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise fields.FieldError(f"branch of the commit has {fields.shown(item)}, not [first, last]")
    return numbers[0], numbers[1]


def optional(record: Mapping[str, Any]) -> tuple[Run | None, Commit | None]:
    """Returns the run and the commit of a manifest's record; each is None if it is missing. Raises FieldError."""
    run = decode_run(record["run"]) if "run" in record else None
    return run, decode_commit(record["commit"]) if "commit" in record else None


def merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Puts ranges of numbers in order, and joins ranges that touch or overlap."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)
