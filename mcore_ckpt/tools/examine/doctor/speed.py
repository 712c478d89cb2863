"""Measures how fast this package reads, and writes durably, compared with plain system calls on the same bytes.

This package and the plain calls take turns, and each figure is a median. So other load on the machine or the file
system slows both sides of the ratio.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from mcore_ckpt.amounts import size_text
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io.files import drop_from_cache, write_file
from mcore_ckpt.tools.examine.doctor.findings import Finding, Severity, fine
from mcore_ckpt.tools.examine.doctor.probes import fallocate, opened
from mcore_ckpt.tools.examine.progress import Progress, no_progress

WRITE, READ, SYNC_TIME, SMALL_FILES = "speed of writing", "speed of reading", "time of a sync", "small files"

FILE_SYSTEM, PROCESSORS = "file system", "processors"

# For each topic, the name of the value by which hosts are compared.
_SPEEDS = {WRITE: "bytes_per_s", READ: "bytes_per_s", SYNC_TIME: "seconds", SMALL_FILES: "files_per_s"}

_MEBIBYTE = 1 << 20
_PAIRS = 5
# After this many seconds, no further pair of measurements begins.
_ENOUGH_S = 20.0
# If the speed of this package divided by the speed of system calls is below this, the finding is SLOW.
_NEAR = 0.7
_SLOW_SYNC_S = 0.1
_SLOW_FILES_PER_S = 100
_SMALL = 100
_SYNCS = 9


def measure(folder: Path, nbytes: int, direct: bool, progress: Progress = no_progress) -> list[Finding]:
    """Measures the speed of a file system in an empty folder. Needs space for twice `nbytes`.

    Args:
        nbytes: the size of the files, a multiple of 1 MiB; 0 to measure only small files.
        direct: True if the plain system calls use O_DIRECT.
        progress: called with the number of bytes written and read so far, and with the largest possible number.

    Raises OSError.
    """
    findings = [_sync_time(folder), _small_files(folder)]
    if nbytes:
        findings += _large_files(folder, nbytes, os.O_DIRECT if direct else 0, progress)
    return findings


def limit_of(values: Mapping[str, float]) -> str:
    """Returns the bottleneck of writing or reading: FILE_SYSTEM, PROCESSORS, or "" for neither.

    `values` is `Finding.values` of the finding about writing or reading.

    Example:
        >>> limit_of({"ratio": 0.5, "raw_bytes_per_s": 5e9, "processor_bytes_per_s": 6e9})
        'processors'
    """
    if values["ratio"] >= _NEAR:
        return FILE_SYSTEM
    return PROCESSORS if values["raw_bytes_per_s"] > values["processor_bytes_per_s"] / 2 else ""


def of_hosts(by_rank: Mapping[int, Sequence[Finding]]) -> dict[int, list[Finding]]:
    """Returns the findings of several ranks. A finding about a speed is kept only from the slowest rank."""
    slowest: dict[str, int] = {}
    for rank, findings in by_rank.items():
        for finding in findings:
            if finding.topic in _SPEEDS:
                other = by_rank[slowest.setdefault(finding.topic, rank)]
                if _speed(finding) < _speed(next(each for each in other if each.topic == finding.topic)):
                    slowest[finding.topic] = rank
    return {
        rank: [
            finding if len(by_rank) == 1 or finding.topic not in _SPEEDS else _with_fastest(finding, rank, by_rank)
            for finding in findings
            if slowest.get(finding.topic, rank) == rank
        ]
        for rank, findings in by_rank.items()
    }


def _with_fastest(finding: Finding, rank: int, by_rank: Mapping[int, Sequence[Finding]]) -> Finding:
    fastest = max(_speed(each) for found in by_rank.values() for each in found if each.topic == finding.topic)
    times = fastest / _speed(finding)
    return replace(finding, fact=f"{finding.fact}, on the slowest host; the fastest host is {times:.1f} times as fast")


def _speed(finding: Finding) -> float:
    """Returns a number that is larger for a faster host."""
    name = _SPEEDS[finding.topic]
    value = finding.values.get(name, 0.0)
    return 1 / value if name == "seconds" and value else value


def _large_files(folder: Path, nbytes: int, flags: int, progress: Progress) -> list[Finding]:
    source, target = (_native.HostBuffer(nbytes, threads=tuning.HOST_THREADS) for _ in range(2))
    tile = os.urandom(_MEBIBYTE)  # random, because some file systems compress
    data = memoryview(source)
    for at in range(0, nbytes, _MEBIBYTE):
        data[at : at + _MEBIBYTE] = tile
    crcs = _native.crc32_blocks(source.address, nbytes, _MEBIBYTE)
    crc_s = _seconds(lambda: _native.crc32_blocks(source.address, nbytes, _MEBIBYTE))
    copy_s = _seconds(lambda: _native.copy_host([target.address], [source.address], [nbytes], 1))
    ours, raw = folder / "ours", folder / "raw"
    most = 2 * nbytes * (_PAIRS + 1)  # the largest number of bytes to write, and also to read
    writes = _pairs(
        partial(_write_ours, ours, source),
        lambda: _write_raw(raw, data, flags),
        partial(_delete, ours, raw),
        lambda pairs: progress(2 * nbytes * pairs, 2 * most),
    )
    reads = _pairs(
        partial(_read_ours, ours, crcs, target),
        lambda: _read_raw(raw, memoryview(target), flags),
        partial(_forget, ours, raw),
        lambda pairs: progress(most + 2 * nbytes * pairs, 2 * most),
    )
    cpu = nbytes / (crc_s + copy_s) * min(len(os.sched_getaffinity(0)), tuning.IO_THREADS)
    return [_compared(WRITE, nbytes, writes, cpu), _compared(READ, nbytes, reads, cpu)]


def _write_ours(path: Path, source: _native.HostBuffer) -> None:
    layout = _native.FileLayout([0], [source.nbytes], [-1], [], source.nbytes, _MEBIBYTE)
    job = _native.WriteJob(threads=tuning.IO_THREADS, piece_bytes=tuning.WRITE_BYTES)
    try:
        job.add_file(path, layout, 0, source.nbytes, buffer=source)
        job.start()
        job.wait(0)
        job.finish(0, b"")
    finally:
        job.close()


def _read_ours(path: Path, crcs: Sequence[int], target: _native.HostBuffer) -> None:
    nbytes = target.nbytes
    job = _native.ReadJob([str(path)], threads=tuning.IO_THREADS, piece_bytes=tuning.READ_BYTES, block_bytes=_MEBIBYTE)
    job.add(0, 0, nbytes, list(crcs), 0, nbytes, 1, nbytes, target.address, nbytes, owner=target)
    try:
        job.run()
    except _native.DamagedBlock as error:
        raise CheckpointError(f"{path}: the bytes that are read differ from the written bytes: {error}") from None


def _pairs(
    ours: Callable[[], object],
    raw: Callable[[], object],
    before: Callable[[], object],
    after: Callable[[int], object],
) -> list[tuple[float, float]]:
    """Measures `ours` and `raw` in turn, and returns the seconds of each pair of calls.

    The first pair is a warm-up and is left out, unless it takes so long that no other pair follows. `before` is called
    before each pair. `after` is called after each pair, with the number of pairs so far.
    """
    begin = time.monotonic()
    times = []
    for _ in range(_PAIRS + 1):
        before()
        times.append((_seconds(ours), _seconds(raw)))
        after(len(times))
        if time.monotonic() - begin > _ENOUGH_S:
            break
    return times[1:] or times


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _compared(topic: str, nbytes: int, times: list[tuple[float, float]], cpu: float) -> Finding:
    ours = nbytes / statistics.median(ours for ours, _ in times)
    raw = nbytes / statistics.median(raw for _, raw in times)
    ratio = statistics.median(raw / ours for ours, raw in times)
    values = {
        "bytes_per_s": ours,
        "raw_bytes_per_s": raw,
        "ratio": ratio,
        "processor_bytes_per_s": cpu,
        "pairs": float(len(times)),
        "file_bytes": float(nbytes),
    }
    fact = (
        f"{size_text(ours)}/s, {ratio:.2f} of the {size_text(raw)}/s of plain system calls "
        f"({size_text(nbytes)}, median of {len(times)})"
    )
    found = limit_of(values)
    if found == FILE_SYSTEM:
        return fine(topic, f"{fact}; the file system is the limit", **values)
    cores = len(os.sched_getaffinity(0))
    if found == PROCESSORS:
        limit = f"the processors are the limit: {cores} cores copy and checksum at most {size_text(cpu)}/s"
        return Finding(topic, Severity.SLOW, fact, limit, "give the trainer's processes more cores", values)
    return Finding(topic, Severity.SLOW, fact, "neither the file system nor the processors are the limit", "", values)


def _write_raw(path: Path, data: memoryview, flags: int) -> None:
    with opened(path, os.O_WRONLY | os.O_CREAT | flags) as descriptor:
        fallocate(descriptor, len(data))  # if this fails, the only effect is that the file may be fragmented

        def write(at: int) -> None:
            piece = data[at : at + tuning.WRITE_BYTES]
            while piece:
                written = os.pwrite(descriptor, piece, at)
                piece, at = piece[written:], at + written

        _in_pieces(write, len(data), tuning.WRITE_BYTES)
        os.fdatasync(descriptor)


def _read_raw(path: Path, target: memoryview, flags: int) -> None:
    with opened(path, os.O_RDONLY | flags) as descriptor:

        def read(at: int) -> None:
            piece = target[at : at + tuning.READ_BYTES]
            while piece and (count := os.preadv(descriptor, [piece], at)):
                piece, at = piece[count:], at + count

        _in_pieces(read, len(target), tuning.READ_BYTES)


def _in_pieces(work: Callable[[int], None], nbytes: int, piece_bytes: int) -> None:
    with ThreadPoolExecutor(tuning.IO_THREADS) as pool:
        for _ in pool.map(work, range(0, nbytes, piece_bytes)):
            pass


def _delete(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _forget(*paths: Path) -> None:
    """Drops files from the page cache, so that a file system without O_DIRECT reads them again."""
    for path in paths:
        with opened(path, os.O_RDONLY) as descriptor:
            drop_from_cache(descriptor, 0, 0)


def _sync_time(folder: Path) -> Finding:
    times = [_seconds(lambda at=at: write_file(folder / f"synced-{at}", [b"x" * 4096])) for at in range(_SYNCS)]  # type: ignore[misc]
    seconds = statistics.median(times)
    fact = f"a small file is durable after {seconds * 1e3:.1f} ms (median of {_SYNCS})"
    if seconds > _SLOW_SYNC_S:
        cost = (
            f"a commit waits for about 20 such files, {seconds * 20:.1f} s; with `async_save` the training goes on "
            "meanwhile"
        )
        return Finding(SYNC_TIME, Severity.SLOW, fact, cost, "", {"seconds": seconds})
    return fine(SYNC_TIME, fact, seconds=seconds)


def _small_files(folder: Path) -> Finding:
    def make_and_delete() -> None:
        paths = [folder / f"small-{number}" for number in range(_SMALL)]
        for path in paths:
            path.touch()
        for path in paths:
            path.stat()
            path.unlink()

    rate = _SMALL / _seconds(make_and_delete)
    fact = f"{rate:,.0f} files made, looked up and deleted in a second"
    if rate < _SLOW_FILES_PER_S:
        cost = "retention, which runs in the background, and the removal of leftovers take longer"
        return Finding(SMALL_FILES, Severity.SLOW, fact, cost, "", {"files_per_s": rate})
    return fine(SMALL_FILES, fact, files_per_s=rate)
