"""Compares merging a checkpoint into a HuggingFace model with a raw copy of its files, and measures its memory.

    python benchmarks/merge.py [--gigabytes 8] [--pairs 9] [--folder DIR] [--json]

The checkpoint has the tensors of a Qwen3 under tp = 2 and pp = 2, filled with random bytes. Before each measurement the
files to read are dropped from the page cache. The raw copy bypasses the page cache: several threads read and write the
same bytes piece by piece, and make them durable.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measuring import Contender, Findings, common_arguments, compare, peak_memory, reset_peak_memory, run
from references import deleting, drop_caches, extra_memory, quickest_raw_copy
from synthetic_checkpoint import qwen3_of_size, write_checkpoint

from mcore_ckpt.tools.convert.merge import MergeRequest, merge

DTYPES = {"as saved": None, "float16": torch.float16}

# Runs in a process of its own, because the memory of this one would hide what merging needs.
CHILD = "merge.print_peak_memory"


def main() -> None:
    parser = common_arguments(__doc__)
    parser.set_defaults(ranks=1, gigabytes=8.0)
    run(parser, __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    source = write_checkpoint(arguments.folder / "source", qwen3_of_size(arguments.gigabytes))
    files = sorted(path for path in source.rglob("*.pt") if path.is_file())
    nbytes = sum(path.stat().st_size for path in files)
    findings.facts["bytes"] = nbytes
    for name in DTYPES:
        extra = extra_memory(CHILD, source, arguments.folder / "child", name)
        findings.at_most(f"extra memory, {name}", extra / 1e6, 1000, "MB")
    copying = quickest_raw_copy(files, arguments.folder / "raw", source, findings)
    found = compare(merging(source, arguments.folder / "merged"), copying, arguments.pairs, nbytes)
    findings.comparisons.append(found)
    findings.at_least(f"{found.what} / {found.reference}, speed", found.ratio, 0.7)


def merging(source: Path, target: Path) -> Contender:
    return Contender(
        "merge", lambda: merge(MergeRequest(source, target)), before=lambda: drop_caches(source), after=deleting(target)
    )


def print_peak_memory(source: str, target: str, name: str) -> None:
    before = reset_peak_memory()
    merge(MergeRequest(Path(source), Path(target), dtype=DTYPES[name]))
    print(peak_memory() - before)


if __name__ == "__main__":
    main()
