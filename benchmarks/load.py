"""A load into the same layout against the raw disk, torch.load, torch.distributed.checkpoint and megatron's own.

    python benchmarks/load.py [--ranks 2] [--gigabytes 1.7] [--pairs 9] [--slow-pairs 3] [--folder DIR] [--json]
    python benchmarks/load.py --ranks 1 --gigabytes 4
    python benchmarks/load.py --only raw      # a part of it: raw, others, megatron

Starts its own ranks. Before each load, the page cache forgets the files that are read. Every side ends with the bytes
in the training state; the raw one reads the same files into a buffer, all ranks at once. `megatron` needs psutil.
megatron's fully_reshardable is read but not applied: 0.16.1 cannot, with torch's Adam.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

from measuring import Findings, common_arguments, compare, each_rank, peak_memory, reset_peak_memory, run
from ours import Ours
from references import (
    DistributedCheckpoint,
    HostBuffer,
    Reference,
    TorchSave,
    best_threads,
    bytes_of_all_ranks,
    delete,
    drop_by_rank_0,
    loading,
    megatron_references,
    new_folder,
    padded,
    raw_read,
)
from training_state import TrainingState, build, shape_of_size

PARTS = ("raw", "others", "megatron")


def main() -> None:
    parser = common_arguments(__doc__, PARTS)
    run(parser, __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    state = build(shape_of_size(arguments.gigabytes))
    ours = save_once(arguments.folder / "ours", state)
    measure_memory(findings, ours)
    nbytes = bytes_of_all_ranks(sum(path.stat().st_size for path in ours.files_of_rank()))
    findings.facts["bytes_read_by_all_ranks"] = nbytes
    if "raw" in arguments.only:
        against_raw(arguments, findings, ours, nbytes)
    if "others" in arguments.only:
        for reference in (TorchSave(state), DistributedCheckpoint(state)):
            against(reference, arguments, findings, ours, nbytes, arguments.pairs)
    if "megatron" in arguments.only:
        for reference in megatron_references(state):
            against(reference, arguments, findings, ours, nbytes, arguments.slow_pairs)
    ours.manager.close()


def save_once(root: Path, state: TrainingState) -> Ours:
    """A manager that has saved a checkpoint and holds none of a save's memory."""
    ours = Ours(root, state)
    ours.save()
    ours.renew(state)
    return ours


def measure_memory(findings: Findings, ours: Ours) -> None:
    drop_by_rank_0(ours.folder())
    # What the save has freed but the allocator kept would hide what the load takes.
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak_memory()
    ours.load()
    extra = each_rank(peak_memory() - before)
    findings.facts["extra_host_bytes_of_a_load_by_rank"] = extra
    findings.at_most("extra host memory of a load, per rank", max(extra) / 1e6, 512, "MB")


def against_raw(arguments: argparse.Namespace, findings: Findings, ours: Ours, nbytes: int) -> None:
    files = ours.files_of_rank()
    buffer = HostBuffer(padded(max(path.stat().st_size for path in files)))
    forget = lambda: drop_by_rank_0(ours.folder())  # noqa: E731
    threads = best_threads(lambda count: raw_read(files, buffer, count, forget))
    found = compare(ours.loading(), raw_read(files, buffer, threads, forget), arguments.pairs, nbytes)
    findings.comparisons.append(found)
    findings.facts |= {"raw_read_threads": threads, "raw_read_gb_per_s": found.as_json()["reference_gb_per_s"]}
    findings.at_least("load / raw O_DIRECT read, speed", found.ratio, 0.85)


def against(
    reference: Reference, arguments: argparse.Namespace, findings: Findings, ours: Ours, nbytes: int, pairs: int
) -> None:
    folder = arguments.folder / "reference"
    new_folder(folder)
    reference.save(folder)
    findings.comparisons.append(compare(ours.loading(), loading(reference, folder), pairs, nbytes))
    delete(folder)


if __name__ == "__main__":
    main()
