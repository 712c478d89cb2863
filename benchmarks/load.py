"""Compares a load into the same layout with the raw disk and with the loads of torch and Megatron.

    python benchmarks/load.py [--ranks 2] [--gigabytes 1.7] [--pairs 9] [--slow-pairs 3] [--folder DIR] [--json]
    python benchmarks/load.py --ranks 1 --gigabytes 4
    python benchmarks/load.py --only raw      # one part of: raw, others, megatron

The references are raw O_DIRECT reads, torch.load, torch.distributed.checkpoint and Megatron's dist_checkpointing, which
needs psutil. The script starts its own ranks. Before each load the files are dropped from the page cache. Every load
ends with the bytes in the training state. Only the raw reference reads the same files into a buffer, on all ranks at
once. Megatron's fully_reshardable is read but not applied, because 0.16.1 cannot apply it with torch's Adam.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from measuring import Findings, common_arguments, compare, extra_memory_by_rank, run
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
    """Saves a checkpoint; returns its side of the pair, with a new manager that holds no memory of the save."""
    ours = Ours(root, state)
    ours.save()
    ours.renew(state)
    return ours


def measure_memory(findings: Findings, ours: Ours) -> None:
    drop_by_rank_0(ours.folder())
    extra = extra_memory_by_rank(ours.load)
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
