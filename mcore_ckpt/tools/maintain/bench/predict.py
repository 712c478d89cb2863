"""Predicts how long saves and loads take, from the measured speeds and the size of the saves.

The prediction follows the phases of `save/save.py`; docs/bench.md has a table of its formulas. The ranks of a node
share the node's memory and disk, so the sum of the ranks' bytes counts. If the state is on a GPU, each rank copies over
a separate bus, writing overlaps with copying, and the slower of the two counts. With a GPU, the first save also waits
until host memory is pinned.

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

# The seconds of the work that a trial save leaves out: reading the trainer's objects, and comparing their tensors with
# the last plan. Measured: 3.0 ms for 60 tensors (2026-11-24), and 16.5 ms for 10,000 tensors, including the opening
# (docs/benchmarks.md, "Small tensors").
PLAN_S = 3e-3
PLAN_S_PER_TENSOR = 1.25e-6
# Computed from measurements in docs/scale.md: commits of 16,384 ranks, commits of 8 ranks with 100,000 tensors, and
# plans of loads under the same layout.
COMMIT_S_PER_RANK = 0.25e-3
COMMIT_S_PER_TENSOR = 1.2e-6
LOAD_PLAN_S_PER_TENSOR = 0.12e-3

_ALIKE = 0.7
_NEITHER = "neither the file system nor the processors are the limit"

# The thread that prepares host memory pauses after each piece for as long as the piece took (io/host_memory.py).
# So the preparation takes this many times longer than without pauses.
_PREPARATION_TAKES = 2


@dataclass(frozen=True)
class Estimate:
    """A predicted time: the seconds of each part. The parts follow one another."""

    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def longest(self) -> str:
        """The name of the part that takes longest."""
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True)
class Prediction:
    """The predicted times of a training.

    Attributes:
        stall: how long a later async save holds the training up.
        first_stall: how long the first async save holds the training up, if no host memory is prepared yet.
        prepared_after_s: the seconds from a manager's construction until host memory is prepared, so that a first save
            is as fast as later saves; 0 with a GPU, because then the first save waits for the memory.
        async_save: the time until an async save is durable.
        load: the time of a load under the same layout.
        file_system_bytes_per_s: the speed at which the file system must take the bytes of all nodes at once.
    """

    stall: Estimate
    first_stall: Estimate
    prepared_after_s: float
    async_save: Estimate
    sync_save: Estimate
    load: Estimate
    file_system_bytes_per_s: float


def predict(size: SaveSize, speeds: Speeds) -> Prediction:
    """Predicts the saves and the load of a training. `speeds` must be measured with as many ranks as a node has."""
    begin = {OPEN: speeds.open_s, PLAN: PLAN_S + size.tensors * PLAN_S_PER_TENSOR}
    further = max(0, size.ranks - speeds.ranks)
    commit = {COMMIT: speeds.commit_s + further * COMMIT_S_PER_RANK + size.tensors * COMMIT_S_PER_TENSOR}
    written = {WRITE: speeds.small_write_s + size.node_bytes / speeds.write_bytes_per_s}
    in_place = {WRITE_IN_PLACE: speeds.small_write_s + size.node_bytes / speeds.write_in_place_bytes_per_s}
    load = {PLAN: size.tensors * LOAD_PLAN_S_PER_TENSOR, READ: size.node_load_bytes / speeds.read_bytes_per_s}
    rate = size.total_bytes / written[WRITE]
    if speeds.gpu is not None:
        copy_s = size.rank_bytes / speeds.gpu.copy_bytes_per_s
        # Copying and writing overlap, so a save waits for the slower of the two.
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
    """Describes the part that takes longest.

    Example:
        >>> bottleneck(Estimate({OPEN: 0.01, READ: 0.5}), speeds)  # doctest: +SKIP
        'reading, 2.2 GB/s'
    """
    longest = estimate.longest
    if longest == WRITE:
        return f"writing, {_rate(speeds.write_bytes_per_s)}: {_limit(speeds.write_limit)}"
    if longest == WRITE_IN_PLACE:
        # Writing in place also copies. If writing in place is much slower than writing from images, the copy is the
        # bottleneck, not the disk.
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
