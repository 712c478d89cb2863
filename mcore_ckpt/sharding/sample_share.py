"""Divides the samples of a data set among data-parallel ranks, and divides anew the samples that are left.

A share is every `size`-th of the samples that were left at the last division. So if all ranks have taken equally many
samples, two numbers (`start` and `taken`) say which samples they have taken. If some ranks are ahead, the samples that
the other ranks still have to take are listed one by one, and come first after the next division.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mcore_ckpt.errors import InvalidArgumentError

# How many samples may be listed. Every rank stores the list in its checkpoint.
_MOST_LEFT = 1 << 20


@dataclass(frozen=True)
class SampleShare:
    """The samples that one data-parallel rank takes, in order. A new training begins with `SampleShare(rank, size)`.

    Samples are numbered from 0 on, across epochs. If there are n samples, sample s is element s % n of epoch s // n.

    Attributes:
        rank, size: the data-parallel rank and size.
        taken: how many of its samples the rank has taken.
        start: all samples from this number on are divided among the ranks, after the samples in `left`.
        left: samples before `start` that no rank had taken at the last division.

    Example:
        >>> share = SampleShare(rank=1, size=4).after(2)
        >>> samples = share.samples()
        >>> next(samples), next(samples)
        (9, 13)
    """

    rank: int
    size: int
    taken: int = 0
    start: int = 0
    left: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise InvalidArgumentError(f"rank is {self.rank} of {self.size}: use a data-parallel rank below its size")

    def after(self, count: int) -> SampleShare:
        """Returns this share as it is after the rank has taken `count` more samples."""
        return replace(self, taken=self.taken + count)

    def samples(self) -> Iterator[int]:
        """Yields the samples that the rank has not taken, without end."""
        place = self.rank + self.taken * self.size
        while True:
            yield self._at(place)
            place += self.size

    def _at(self, place: int) -> int:
        return self.left[place] if place < len(self.left) else self.start + place - len(self.left)


def divided_anew(shares: Sequence[SampleShare], rank: int, size: int) -> SampleShare:
    """Divides the remaining samples among another number of ranks, and returns the share of the new rank.

    Args:
        shares: the shares of all ranks, in order.
        rank, size: the new rank, and the new number of ranks.

    Raises InvalidArgumentError: the shares do not come from all ranks of one division, or the ranks are so far apart
    that too many samples would have to be listed.
    """
    first = shares[0]
    if any(replace(first, rank=number, taken=share.taken) != share for number, share in enumerate(shares)):
        raise InvalidArgumentError("the shares of the ranks are not of one division, or not in the order of the ranks")
    if len(shares) != first.size:
        raise InvalidArgumentError(f"there are {len(shares)} shares of {first.size} ranks: use the shares of all ranks")
    taken = [share.taken for share in shares]
    # The division has given each sample a place: rank r takes the places r, r + size, r + 2 * size, ... Every place
    # before `begin` has been taken, and no place from `end` on.
    begin = min(taken) * len(shares)
    end = max(number + (count - 1) * len(shares) + 1 if count else 0 for number, count in enumerate(taken))
    if end - begin + len(first.left) > _MOST_LEFT:
        raise InvalidArgumentError(
            f"the ranks have taken {min(taken)} to {max(taken)} samples each, and are too far apart to divide the rest "
            "anew: load the step with the saved number of ranks"
        )
    passed_over = [
        first._at(place) for place in range(begin, end) if place // len(shares) >= taken[place % len(shares)]
    ]
    start = first._at(max(end, len(first.left)))
    return SampleShare(rank, size, 0, start, (*passed_over, *first.left[end:]))
