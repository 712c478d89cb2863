"""Decides which bytes of a file each replica writes, when several ranks hold all of its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt.io.pages import even_cuts


@dataclass(frozen=True)
class Share:
    """The writers of a file and the range of bytes that each of them writes.

    Attributes:
        writers: world ranks, in the order of their ranges. The last one owns the file: once all have written, it
            writes the CRCs, and the index and the zip directory behind its range.
        cuts: `[0, ..., end]`; writer i writes `[cuts[i], cuts[i + 1])`. All cuts but the end are multiples of a page.
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
    """Cuts `[0, end)` into equal ranges of at least `least` bytes for as many of the ranks; the first owns the file.

    Example:
        >>> share_out((4, 5, 6), 40960, 16384)
        Share(writers=(5, 4), cuts=(0, 20480, 40960))
    """
    count = max(1, min(len(ranks), end // least))
    return Share((*ranks[1:count], ranks[0]), even_cuts(end, count))
