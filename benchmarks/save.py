"""Compares a durable save with the raw disk, with memcpy and with the saves of torch and Megatron.

    python benchmarks/save.py [--ranks 2] [--gigabytes 1.7] [--pairs 9] [--slow-pairs 3] [--folder DIR] [--json]
    python benchmarks/save.py --ranks 1 --gigabytes 4
    python benchmarks/save.py --ranks 1 --small-tensors 10000     # the cost of a save besides its bytes
    python benchmarks/save.py --only raw,tmpfs                    # some parts of: raw, others, megatron, tmpfs

The references are raw O_DIRECT writes, a parallel memcpy, torch.save, torch.distributed.checkpoint and Megatron's
dist_checkpointing, which needs psutil. The script starts its own ranks. Ours and the reference alternate. The first
save of each side does not count. A ratio is the median over pairs. CPU seconds are measured for a save to --tmpfs
(default /dev/shm), where no disk adds to them.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from measuring import (
    Findings,
    common_arguments,
    compare,
    each_rank,
    peak_memory,
    processor_seconds,
    reset_peak_memory,
    run,
    slowest,
)
from ours import Ours
from references import (
    Copy,
    DistributedCheckpoint,
    HostBuffer,
    TorchSave,
    best_threads,
    buffered_write,
    bytes_of_all_ranks,
    megatron_references,
    padded,
    raw_write,
    saving,
)
from training_state import TrainingState, build, rank_tensors, shape_of_size, shape_of_tensors

PARTS = ("raw", "others", "megatron", "tmpfs")


def main() -> None:
    parser = common_arguments(__doc__, PARTS)
    parser.add_argument(
        "--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in memory, to measure CPU seconds"
    )
    parser.add_argument("--small-tensors", type=int, help="measure a model of about this many small tensors instead")
    run(parser, __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    if arguments.small_tensors is not None:
        measure_small_tensors(arguments, findings)
        return
    state = build(shape_of_size(arguments.gigabytes))
    measure_disk(arguments, findings, state)
    if "tmpfs" in arguments.only:
        measure_tmpfs(arguments, findings, state)


# -- to the disk ------------------------------------------------------------------------------------------


def measure_disk(arguments: argparse.Namespace, findings: Findings, state: TrainingState) -> None:
    ours = Ours(arguments.folder / "ours", state)
    measure_memory(findings, ours)
    nbytes = bytes_of_all_ranks(ours.report.nbytes)
    findings.facts["checkpoint_bytes"] = nbytes
    if "raw" in arguments.only:
        against_raw(arguments, findings, ours, state, nbytes)
    if "others" in arguments.only:
        for reference in (TorchSave(state), DistributedCheckpoint(state)):
            contender = saving(reference, arguments.folder / "reference")
            findings.comparisons.append(compare(ours.saving(), contender, arguments.pairs, nbytes))
    if "megatron" in arguments.only:
        against_megatron(arguments, findings, ours, state, nbytes)
    ours.manager.close()


def measure_memory(findings: Findings, ours: Ours) -> None:
    """Measures the memory of the first save, which allocates the host memory for all later ones."""
    before = reset_peak_memory()
    ours.save()
    peak = peak_memory() - before
    findings.facts["first_save_s"] = max(each_rank(ours.report.seconds))
    findings.facts["extra_host_bytes_of_a_save_by_rank"] = each_rank(peak)
    worst = max(each_rank(peak / ours.report.nbytes))
    findings.at_most("extra host memory of a save / the rank's bytes", worst, 1.1)
    ours.forget()


def against_raw(
    arguments: argparse.Namespace, findings: Findings, ours: Ours, state: TrainingState, nbytes: int
) -> None:
    own, tensors = ours.report.nbytes, list(rank_tensors(state).values())
    buffer = HostBuffer(max(padded(own), Copy.needed_bytes(tensors)))
    threads = best_threads(lambda count: raw_write(arguments.folder, buffer, own, count))
    raw = compare(ours.saving(), raw_write(arguments.folder, buffer, own, threads), arguments.pairs, nbytes)
    copy = Copy.plan(tensors, buffer)
    findings.comparisons += [
        raw,
        compare(ours.saving(), copy.memcpy(), arguments.pairs, nbytes, "cost"),
        compare(ours.saving(), copy.by_torch(), arguments.pairs, nbytes, "cost"),
    ]
    findings.facts |= {"raw_write_threads": threads, "raw_write_gb_per_s": raw.as_json()["reference_gb_per_s"]}
    findings.at_least("durable save / raw O_DIRECT write, speed", raw.ratio, 0.85)


def against_megatron(
    arguments: argparse.Namespace, findings: Findings, ours: Ours, state: TrainingState, nbytes: int
) -> None:
    dp_reshardable, fully_reshardable = megatron_references(state)
    folder = arguments.folder / "reference"
    for reference, pairs, limit in (
        (dp_reshardable, arguments.pairs, 2),
        (fully_reshardable, arguments.slow_pairs, 10),
    ):
        found = compare(ours.saving(), saving(reference, folder), pairs, nbytes)
        findings.comparisons.append(found)
        findings.at_least(f"durable save / {reference.name}, speed", found.ratio, limit)


# -- to memory: CPU seconds -------------------------------------------------------------------------------


def measure_tmpfs(arguments: argparse.Namespace, findings: Findings, state: TrainingState) -> None:
    ours = Ours(arguments.tmpfs / "ours", state)
    ours.save()
    nbytes, own = bytes_of_all_ranks(ours.report.nbytes), ours.report.nbytes
    ours.forget()
    tensors = list(rank_tensors(state).values())
    buffer = HostBuffer(max(own, Copy.needed_bytes(tensors)))
    memcpy = Copy.plan(tensors, buffer).memcpy()
    plain = buffered_write(arguments.tmpfs, buffer, own)
    name = "save to tmpfs, CPU seconds"
    against_memcpy, against_write = (
        compare(ours.saving(name), reference, arguments.pairs, nbytes, "cost", processor_seconds)
        for reference in (memcpy, plain)
    )
    findings.comparisons += [against_memcpy, against_write]
    findings.facts["tmpfs_cpu_s_per_gb"] = against_memcpy.as_json()["ours_median_s"] / nbytes * 1e9
    findings.at_most("CPU seconds of a save to tmpfs / one memcpy's", against_memcpy.ratio, 2.5)
    ours.manager.close()


# -- many small tensors: the cost of a save besides its bytes ---------------------------------------------


def measure_small_tensors(arguments: argparse.Namespace, findings: Findings) -> None:
    state = build(shape_of_tensors(arguments.small_tensors))
    ours = Ours(arguments.folder / "ours", state)
    first = slowest(ours.saving())
    overheads, totals = [], []
    for _ in range(arguments.pairs):
        totals.append(slowest(ours.saving()))
        overheads.append(max(each_rank(overhead_seconds(ours.report))))
    findings.facts |= {
        "tensors_written": sum(each_rank(len(rank_tensors(state)))),
        "checkpoint_bytes": bytes_of_all_ranks(ours.report.nbytes),
        "first_save_s": first,
        "later_saves_s": statistics.median(totals),
        "overhead_ms": [1e3 * overhead for overhead in overheads],
    }
    findings.at_most("a later save outside copy, write and commit", 1e3 * statistics.median(overheads), 20, "ms")
    ours.manager.close()


def overhead_seconds(report: Any) -> float:
    """Returns the seconds of a synchronous save outside of copying, writing (`write_s` covers both) and the commit."""
    return report.seconds - report.write_s - report.commit_s


if __name__ == "__main__":
    main()
