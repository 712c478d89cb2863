"""Decides which bytes of a file each replica writes, if several ranks hold all tensors of the file.

`save/file_contents.py` (`_with_writers`) chooses the candidate ranks.

A writer may have one tensor more than its fair part. With many replicas and few large tensors, this excess slows a
save: with 64 replicas of a stage of Llama-3-70B (TP=8, PP=8, 2.4 GB of weights), the writer of the first stage's
embedding writes 263 MB instead of 38 MB. Such a tensor is not divided, because the replicas' copies of the tensor may
differ. To find out, the second replica would have to read its whole copy at each save.

Each tensor comes from one replica, because replicas may have drifted apart: a mixture of two replicas' bytes would
equal neither replica's tensor. So a range begins at the first page boundary after the beginning of a tensor. The writer
of the previous range writes the bytes of this tensor that come before the boundary. The range's own writer sends its
copy of these bytes (`FilePlan.head`) to the file's owner, along with the range's CRCs. If the two copies differ, the
owner puts the sent bytes into the file. `FilePlan.structure` is a digest of the tensors, writers and cuts in a plan.
The owner accepts a writer's part only if the writer's digest equals the owner's. Rank 0 also compares the digests of
all ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_ckpt.io.pages import page_ceil


@dataclass(frozen=True)
class Share:
    """The writers of a file, and the range of bytes that each of them writes.

    Attributes:
        writers: the world ranks that write, in the order of their ranges. The last rank owns the file. After all other
            ranks have written, the owner adds the CRCs, the index and the zip directory.
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


def share_out(ranks: tuple[int, ...], end: int, least: int, starts: Sequence[int]) -> Share:
    """Divides bytes `[0, end)` among the ranks, so that the longest range is as short as possible.

    A range begins where a tensor begins, rounded up to the page (the beginning of this module says why).

    The first rank owns the file, so this rank comes last among the writers. There is at most one writer for each
    `least` bytes, and the other ranks write nothing. If a tensor has more bytes than a rank's fair part, the rank that
    writes this tensor writes more than the other ranks.

    Args:
        ranks: the ranks that hold all tensors.
        least: roughly the smallest number of bytes that a writer writes.
        starts: the offset of each tensor, ascending.

    Example:
        >>> share_out((4, 5, 6), 40960, 16384, (64, 8000, 20480, 30000))
        Share(writers=(5, 4), cuts=(0, 20480, 40960))
    """
    count = max(1, min(len(ranks), end // least))
    possible = sorted({cut for cut in map(page_ceil, starts) if 0 < cut < end}) if count > 1 else []
    low, high = -(-end // count), end
    while low < high:
        longest = (low + high) // 2
        if _cut(possible, end, longest, count) is None:
            low = longest + 1
        else:
            high = longest
    cuts = _cut(possible, end, high, count)
    assert cuts is not None, "one range of all bytes is always possible"
    return Share((*ranks[1 : len(cuts) - 1], ranks[0]), cuts)


def _cut(possible: Sequence[int], end: int, longest: int, count: int) -> tuple[int, ...] | None:
    """Returns cuts that make at most `count` ranges of at most `longest` bytes; None if there are no such cuts."""
    cuts = [0]
    while end - cuts[-1] > longest:
        after = bisect_right(possible, cuts[-1] + longest)
        if len(cuts) == count or after == 0 or possible[after - 1] <= cuts[-1]:
            return None
        cuts.append(possible[after - 1])
    return (*cuts, end)
