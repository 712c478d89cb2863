"""Decides which replica writes which bytes of a file that several ranks could write."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt.io.pages import even_cuts


@dataclass(frozen=True)
class Share:
    """Which rank writes which bytes of a file's image.

    Attributes:
        writers: world ranks, in the order of their ranges. The last one owns the file: it writes the index and the zip
            directory behind its range, and what only is known when all have written.
        cuts: `[0, ..., end]`, multiples of a page but for the end; writer i has `[cuts[i], cuts[i + 1])`.
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
    """Equal ranges of `[0, end)` bytes for as many of the ranks as get at least `least` bytes; the first owns the file.

    Example:
        >>> share_out((4, 5, 6), 40960, 16384)
        Share(writers=(5, 4), cuts=(0, 20480, 40960))
    """
    count = max(1, min(len(ranks), end // least))
    return Share((*ranks[1:count], ranks[0]), even_cuts(end, count))
