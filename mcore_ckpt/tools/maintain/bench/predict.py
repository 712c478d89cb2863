"""Predicts how long saves and a load take, from what was measured and from how much there is to save.

The model follows `save/save.py`; docs/bench.md has it as a table. A node's ranks share its memory and its disk, so what
they save together counts. With the state on a GPU, each rank copies over a separate bus, and writing overlaps with
copying, so the slower of the two counts. A first save then waits until its memory is pinned.

The times of opening, of the commit, and of writing an almost empty save are measured directly. The time of planning,
and the time that further ranks and tensors add to a commit, are constants from other measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_ckpt.amounts import size_text
from mcore_ckpt.tools.examine.doctor.speed import FILE_SYSTEM, PROCESSORS
from mcore_ckpt.tools.maintain.bench.size import SaveSize
from mcore_ckpt.tools.maintain.bench.speeds import Speeds

OPEN, PLAN, COPY, PIN = "opening", "planning", "copying", "pinning"
WRITE, WRITE_IN_PLACE, COMMIT, READ = "writing", "writing in place", "committing", "reading"

# The time of what a trial save leaves out: reading the trainer's objects and comparing its tensors with the last plan.
# 3.0 ms for 60 tensors (2026-11-24), 16.5 ms for 10,000, which includes opening (docs/benchmarks.md, "Small tensors").
PLAN_S = 3e-3
PLAN_S_PER_TENSOR = 1.25e-6
# From docs/scale.md: commits of 16,384 ranks, and of 8 ranks with 100,000 tensors; plans of loads, same layout.
COMMIT_S_PER_RANK = 0.25e-3
COMMIT_S_PER_TENSOR = 1.2e-6
LOAD_PLAN_S_PER_TENSOR = 0.12e-3

_ALIKE = 0.7
_NEITHER = "neither the file system nor the processors are the limit"

# The thread that prepares host memory pauses after each piece as long as the piece took (io/host_memory.py).
_PREPARATION_TAKES = 2


@dataclass(frozen=True)
class Estimate:
    """The predicted time of something, as the seconds of its parts, which follow one another."""

    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def longest(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True)
class Prediction:
    """What to expect of a training.

    Attributes:
        stall: how long a later async save holds the training up.
        first_stall: the same for a first save that comes before any host memory is prepared.
        prepared_after_s: how long after its construction a manager has prepared the host memory, so that the first save
            is like later saves; 0 with a GPU, because a first save then waits for the memory.
        async_save: the time until an async save is durable.
        load: the time of a load under the same layout.
        file_system_bytes_per_s: how fast the file system must take bytes from all nodes together while they write.
    """

    stall: Estimate
    first_stall: Estimate
    prepared_after_s: float
    async_save: Estimate
    sync_save: Estimate
    load: Estimate
    file_system_bytes_per_s: float


def predict(size: SaveSize, speeds: Speeds) -> Prediction:
    """Predicts saves and the load of a training on nodes like this one, measured with as many ranks as a node has."""
    begin = {OPEN: speeds.open_s, PLAN: PLAN_S + size.tensors * PLAN_S_PER_TENSOR}
    further = max(0, size.ranks - speeds.ranks)
    commit = {COMMIT: speeds.commit_s + further * COMMIT_S_PER_RANK + size.tensors * COMMIT_S_PER_TENSOR}
    written = {WRITE: speeds.small_write_s + size.node_bytes / speeds.write_bytes_per_s}
    in_place = {WRITE_IN_PLACE: speeds.small_write_s + size.node_bytes / speeds.write_in_place_bytes_per_s}
    load = {PLAN: size.tensors * LOAD_PLAN_S_PER_TENSOR, READ: size.node_load_bytes / speeds.read_bytes_per_s}
    rate = size.total_bytes / written[WRITE]
    if speeds.gpu is not None:
        copy_s = size.rank_bytes / speeds.gpu.copy_bytes_per_s
        # Copying and writing go on at once, so a save waits for the slower one.
        slower = {COPY: copy_s} if copy_s > written[WRITE] else written
        save = Estimate(begin | slower | commit)
        pin = {PIN: size.rank_bytes / speeds.gpu.pin_bytes_per_s}
        stall, first = Estimate(begin | {COPY: copy_s}), Estimate(begin | pin | {COPY: copy_s})
        return Prediction(stall, first, 0.0, save, save, Estimate(load), rate)
    copy = {COPY: size.node_bytes / speeds.copy_bytes_per_s(size.node_bytes)}
    return Prediction(
        stall=Estimate(begin | copy),
        first_stall=Estimate(begin | in_place),
        prepared_after_s=_PREPARATION_TAKES * size.rank_bytes / speeds.fetch_bytes_per_s,
        async_save=Estimate(begin | copy | written | commit),
        sync_save=Estimate(begin | in_place | commit),
        load=Estimate(load),
        file_system_bytes_per_s=rate,
    )


def bottleneck(estimate: Estimate, speeds: Speeds) -> str:
    """Says in words what takes longest.

    Example:
        >>> bottleneck(Estimate({OPEN: 0.01, READ: 0.5}), speeds)  # doctest: +SKIP
        'reading, 2.2 GB/s'
    """
    longest = estimate.longest
    if longest == WRITE:
        return f"writing, {_rate(speeds.write_bytes_per_s)}: {_limit(speeds.write_limit)}"
    if longest == WRITE_IN_PLACE:
        # Writing in place also copies, so if it is much slower, the reason is not the disk.
        is_alike = speeds.write_in_place_bytes_per_s >= _ALIKE * speeds.write_bytes_per_s
        limit = speeds.write_limit if is_alike else PROCESSORS
        return f"writing in place, {_rate(speeds.write_in_place_bytes_per_s)}: {_limit(limit)}"
    if longest == COPY and speeds.gpu is not None:
        return f"copying from {speeds.gpu.name}, {_rate(speeds.gpu.copy_bytes_per_s)}"
    if longest == COPY:
        return f"copying in host memory, {_rate(speeds.copies[-1][1])}"
    if longest == READ:
        return f"reading, {_rate(speeds.read_bytes_per_s)}"
    if longest == COMMIT:
        return f"the commit, in which rank 0 waits for small files; each takes {speeds.sync_s * 1e3:.1f} ms"
    return longest


def _limit(limit: str) -> str:
    return f"the {limit} is the limit" if limit == FILE_SYSTEM else f"the {limit} are the limit" if limit else _NEITHER


def _rate(bytes_per_s: float) -> str:
    return f"{size_text(bytes_per_s)}/s"
