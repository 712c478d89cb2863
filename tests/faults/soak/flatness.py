"""Judges whether what a long-lived process uses stays as it is."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.soak.usage import Usage

# With fewer, a quarter does not have each of the moments that come in turn, and not each kind of fault has been met in
# the first one. The first of a kind costs once: modules, and lines of source files for tracebacks (1,100 objects).
LEAST_SAMPLES = 96

# How much more the least of a life's last quarter may be than the least of its second one. The least, since what comes
# and goes (steps before they are deleted, memory of the moment) is no growth, while a leak raises even the least. The
# first quarter is left out, in which caches fill. A leak at each save adds half as many as there are saves.
TOLERANCES = Usage(
    memory=16 << 20,
    allocated=4 << 20,
    blocks=1500,
    threads=1,
    descriptors=2,
    keys=8,
    files=8,
)


@dataclass(frozen=True)
class Verdict:
    """Of one curve of one process."""

    kind: str
    before: int
    after: int
    tolerance: int

    @property
    def is_flat(self) -> bool:
        return self.after - self.before <= self.tolerance

    def __str__(self) -> str:
        word = "flat" if self.is_flat else "NOT FLAT"
        return f"{self.kind}: {self.before} in the second quarter, {self.after} in the last: {word}"


def judge(samples: Sequence[Usage]) -> list[Verdict]:
    """One verdict for each kind; none if the life was too short to tell."""
    if len(samples) < LEAST_SAMPLES:
        return []
    quarter = len(samples) // 4
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]
    return [
        Verdict(
            kind,
            min(getattr(each, kind) for each in second),
            min(getattr(each, kind) for each in last),
            getattr(TOLERANCES, kind),
        )
        for kind in Usage._fields
    ]
