"""Decides which bytes of a file each replica writes, if several ranks hold all tensors of the file.

`save/plan.py` (`_with_writers`) chooses the candidate ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt.io.pages import even_cuts


@dataclass(frozen=True)
class Share:
    """The writers of a file, and the range of bytes that each of them writes.

    Attributes:
        writers: the world ranks that write, in the order of their ranges. The last one owns the file. After all others
            have written, it adds the CRCs, the index and the zip directory.
        cuts: byte offsets `0, ..., end`. Writer i writes bytes `[cuts[i], cuts[i + 1])`. All offsets except `end` are
            multiples of the page size.
    """

    writers: tuple[int, ...]
    cuts: tuple[int, ...]

    @property
    def owner(self) -> int:
        return self.writers[-1]

    def range_of(self, rank: int) -> tuple[int, int]:
        if rank not in self.writers:
            return (0, 0)
        position = self.writers.index(rank)
        return self.cuts[position], self.cuts[position + 1]


def share_out(ranks: tuple[int, ...], end: int, least: int) -> Share:
    """Divides bytes `[0, end)` evenly among the ranks. The first rank owns the file.

    If there are not `least` bytes for each rank, only the first ranks get a range.

    Example:
        >>> share_out((4, 5, 6), 40960, 16384)
        Share(writers=(5, 4), cuts=(0, 20480, 40960))
    """
    count = max(1, min(len(ranks), end // least))
    return Share((*ranks[1:count], ranks[0]), even_cuts(end, count))
