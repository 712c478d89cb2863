"""Measures the speeds of memory and disk on this machine, and the fixed costs of a save.

The speeds of saves come from trial saves, by all ranks of a node at once. The speeds of the disk alone and of the
processors alone come from the doctor, which compares our writer and reader with plain system calls.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.io import _native
from mcore_ckpt.io.mounts import mount_of
from mcore_ckpt.tools.examine.doctor import speed
from mcore_ckpt.tools.examine.doctor.findings import Severity
from mcore_ckpt.tools.examine.doctor.probes import has_direct, try_all
from mcore_ckpt.tools.maintain.bench.trial_saves import BYTES_PER_PARAMETER, SaveTimes, TrialSaves

Progress = Callable[[int], None]
"""A function that is called with the number of bytes that were just saved."""

# How often each kind of save is made, and the number of seconds after which no further save begins.
_SAVES = 7
_ENOUGH_S = 60.0
_FETCH_MOST_BYTES = 256 << 20
# Copies are also measured with a state this many times larger, because states that do not fit into the processors'
# caches (some hundred MB) are copied more slowly.
_LARGER = 4


@dataclass(frozen=True)
class GpuSpeeds:
    """Speeds of one GPU: of copies to pinned memory, and of allocating and pinning new host memory."""

    name: str
    copy_bytes_per_s: float
    pin_bytes_per_s: float


@dataclass(frozen=True)
class Speeds:
    """The measured speeds and times.

    Speeds are in bytes per second, of all ranks of the node together unless stated otherwise.

    Attributes:
        copies: copying to host memory whose pages exist, as pairs (bytes, bytes per second), the smaller size first.
        fetch_bytes_per_s: the speed at which one thread gets new pages of host memory.
        write_bytes_per_s: writing from images, checksums included.
        write_in_place_bytes_per_s: writing from the tensors, including checksums and a copy through the processor's
            cache.
        read_bytes_per_s: reading by one rank, checksums included.
        raw_write_bytes_per_s: writing with plain system calls, by one rank.
        write_limit: the bottleneck of writing: "file system", "processors", or "" for neither.
        open_s: the time from the call of a save until its staging folder exists.
        small_write_s: the time to write all files of a save that is almost empty.
        commit_s: the time to commit an almost empty save.
        spread: the times of the fastest and of the slowest trial save with copies, divided by the median time of these
            saves.
    """

    ranks: int
    trial_bytes: int
    copies: tuple[tuple[int, float], ...]
    fetch_bytes_per_s: float
    write_bytes_per_s: float
    write_in_place_bytes_per_s: float
    read_bytes_per_s: float
    raw_write_bytes_per_s: float
    write_limit: str
    open_s: float
    small_write_s: float
    commit_s: float
    sync_s: float
    spread: tuple[float, float] = (1.0, 1.0)
    gpu: GpuSpeeds | None = None

    def copy_bytes_per_s(self, nbytes: int) -> float:
        """Returns the speed of copying `nbytes` bytes: interpolates the measured speeds over the logarithm of the size.

        Example:
            >>> SPEEDS.copies, SPEEDS.copy_bytes_per_s(2 * 10**9)  # doctest: +SKIP
            (((10**9, 12e9), (4 * 10**9, 8e9)), 10e9)
        """
        (small, fast), *_, (large, slow) = self.copies
        if small == large:
            return fast
        share = math.log(nbytes / small) / math.log(large / small) if nbytes > 0 else 0.0
        return fast + (slow - fast) * min(max(share, 0.0), 1.0)


def measure(folder: Path, nbytes: int, ranks: int, progress: Progress = lambda nbytes: None) -> Speeds:
    """Measures in an empty folder. Uses `2 * nbytes` of disk space, and at most `8 * nbytes` of memory.

    `nbytes` is the size of a trial save in bytes, at least 1 MiB; `ranks` is how many ranks save at once. `progress` is
    called after each save.

    Raises:
        NoRoomError: the files do not fit on the disk.
        CheckpointError: checkpoints cannot be saved here.
        OSError: the folder cannot be used.
    """
    found = _ask_doctor(folder, nbytes >> 20 << 20)
    with TrialSaves(folder / "small", ranks * BYTES_PER_PARAMETER, ranks) as small:
        small_copied, small_in_place = alternate(small, _SAVES, progress)
    with TrialSaves(folder / "large", nbytes, ranks) as large:
        copied, in_place = alternate(large, _SAVES, progress)
        trial_bytes = large.nbytes
    seconds = [times.seconds for times in copied]
    median = statistics.median(seconds)
    copies = (trial_bytes, trial_bytes / _median(copied, "copy_s")), _larger_copies(folder, nbytes, ranks)
    small_write_s = _median(small_copied, "write_s")
    return Speeds(
        ranks=ranks,
        trial_bytes=trial_bytes,
        copies=copies,
        fetch_bytes_per_s=_fetch_speed(min(nbytes, _FETCH_MOST_BYTES)),
        write_bytes_per_s=_speed(trial_bytes, _median(copied, "write_s"), small_write_s),
        write_in_place_bytes_per_s=_speed(
            trial_bytes, _median(in_place, "write_s"), _median(small_in_place, "write_s")
        ),
        read_bytes_per_s=found[speed.READ]["bytes_per_s"],
        raw_write_bytes_per_s=found[speed.WRITE]["raw_bytes_per_s"],
        write_limit=speed.limit_of(found[speed.WRITE]),
        open_s=_median([*small_copied, *small_in_place], "open_s"),
        small_write_s=small_write_s,
        commit_s=_median([*small_copied, *small_in_place], "commit_s"),
        sync_s=found[speed.SYNC_TIME]["seconds"],
        spread=(min(seconds) / median, max(seconds) / median),
        gpu=_measure_gpu(nbytes) if torch.cuda.is_available() else None,
    )


def alternate(saves: TrialSaves, count: int, progress: Progress) -> tuple[list[SaveTimes], list[SaveTimes]]:
    """Makes pairs of a save that copies and a save that writes in place.

    The first pair is a warm-up and is left out, unless it takes so long that no other pair follows. Returns the times
    of the saves that copied, and of the saves that wrote in place.
    """
    begin = time.monotonic()
    pairs = []
    for _ in range(count + 1):
        pairs.append((saves.save(copied=True), saves.save(copied=False)))
        progress(2 * saves.nbytes)
        if time.monotonic() - begin > _ENOUGH_S:
            break
    counted = pairs[1:] or pairs
    return [copied for copied, _ in counted], [in_place for _, in_place in counted]


def free_memory() -> int | None:
    """Returns how many bytes of memory programs can still get; None if the system does not report this."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _larger_copies(folder: Path, nbytes: int, ranks: int) -> tuple[int, float]:
    """Returns a size, and the speed of copies of this size. The size is larger than `nbytes` if the memory suffices."""
    free = free_memory()
    most = _LARGER * nbytes if free is None else min(_LARGER * nbytes, free // 4)
    with TrialSaves(folder / "larger", max(nbytes, most), ranks) as larger:
        larger.copy()
        # Take the average and not the median, because other programs slow down a long copy now and then.
        return larger.nbytes, larger.nbytes / statistics.mean(larger.copy() for _ in range(_SAVES))


def _median(times: Sequence[SaveTimes], field: str) -> float:
    return statistics.median(getattr(each, field) for each in times)


def _speed(nbytes: int, seconds: float, without_bytes_s: float) -> float:
    """Returns a speed in bytes per second.

    The fixed time of a save (`without_bytes_s`) is subtracted from `seconds`, unless this fixed time is at least half
    of `seconds`.
    """
    rest = seconds - without_bytes_s
    return nbytes / (rest if rest > seconds / 2 else seconds)


def _ask_doctor(folder: Path, nbytes: int) -> Mapping[str, Mapping[str, float]]:
    own = folder / "doctor"
    own.mkdir()
    tried = try_all(own, mount_of(own))
    bad = next((finding for finding in tried if finding.severity is Severity.BAD), None)
    if bad is not None:
        raise CheckpointError(
            f"{folder.parent}: no checkpoint can be saved here: {bad.topic}: {bad.fact}: `mcore-ckpt doctor "
            f"{folder.parent}` shows what to change"
        )
    return {finding.topic: finding.values for finding in speed.measure(own, nbytes, has_direct(tried))}


def _fetch_speed(nbytes: int) -> float:
    buffer = _native.HostBuffer.reserve(nbytes)
    begin = time.perf_counter()
    buffer.fetch(0, nbytes)
    return nbytes / (time.perf_counter() - begin)


def _measure_gpu(nbytes: int) -> GpuSpeeds:
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    begin = time.perf_counter()
    buffer = _native.HostBuffer(nbytes, device=torch.cuda.current_device())
    pin_s = time.perf_counter() - begin
    # A copy must not cross the border between pieces that were pinned by separate calls.
    targets = torch.frombuffer(buffer, dtype=torch.uint8).split(buffer.PIN_BYTES)
    sources = source.split(buffer.PIN_BYTES)
    times = []
    for _ in range(_SAVES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for target, part in zip(targets, sources, strict=True):
            target.copy_(part, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return GpuSpeeds(torch.cuda.get_device_name(), nbytes / statistics.median(times), nbytes / pin_s)
