"""Defines the findings of the doctor about a root, and their severities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How bad a finding is, from harmless to worst.

    FINE: the examined thing works. EMULATED: the thing does not work, but something slower or weaker replaces it. SLOW:
    the thing works, but more slowly than this machine could. RISK: the thing works now, but later saves may fail, or a
    failure that this package otherwise survives can lose checkpoints. BAD: checkpoints cannot be saved here.
    """

    FINE = "fine"
    EMULATED = "emulated"
    SLOW = "slow"
    RISK = "risk"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One thing that the doctor has found out. `cost` and `advice` may be empty.

    `topic` names the examined thing, always in the same words, so that programs can look for this text. `values` are
    measured numbers. `ranks` are the ranks for which the finding is true; empty for all ranks.
    """

    topic: str
    severity: Severity
    fact: str
    cost: str = ""
    advice: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    @staticmethod
    def of(record: Mapping[str, Any]) -> Finding:
        """Returns the finding of a record that `as_record` has made."""
        return Finding(**{**record, "severity": Severity(record["severity"]), "ranks": tuple(record["ranks"])})

    def as_record(self) -> dict[str, Any]:
        """Returns the finding as JSON values."""
        return asdict(self) | {"severity": str(self.severity), "ranks": list(self.ranks)}


def fine(topic: str, fact: str, **values: float) -> Finding:
    """Returns a finding that something works."""
    return Finding(topic, Severity.FINE, fact, values=values)


def emulated(topic: str, fact: str, cost: str) -> Finding:
    """Returns a finding that something does not work, but has a slower or weaker replacement."""
    return Finding(topic, Severity.EMULATED, fact, cost)


def worst(findings: Iterable[Finding]) -> Severity:
    """Returns the severity of the worst finding; FINE if there is none."""
    order = list(Severity)
    return max((finding.severity for finding in findings), key=order.index, default=Severity.FINE)


def merged(by_rank: Mapping[int, Iterable[Finding]]) -> list[Finding]:
    """Merges the findings of several ranks. Equal findings become one finding, with the ranks for which it is true.

    If a finding is true for all ranks, `ranks` is empty. Topics keep the order of the first rank.
    """
    found: dict[str, list[tuple[Finding, list[int]]]] = {}
    for rank, findings in by_rank.items():
        for finding in findings:
            alike = found.setdefault(finding.topic, [])
            match = next((ranks for other, ranks in alike if _same(other, finding)), None)
            if match is None:
                alike.append((finding, [rank]))
            else:
                match.append(rank)
    return [
        finding if len(ranks) == len(by_rank) else replace(finding, ranks=tuple(ranks))
        for alike in found.values()
        for finding, ranks in alike
    ]


def _same(first: Finding, second: Finding) -> bool:
    # The facts contain the measured numbers, so comparing facts is enough.
    return replace(first, values={}, ranks=()) == replace(second, values={}, ranks=())
