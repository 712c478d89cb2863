"""A checkpoint merged into a HuggingFace model against a copy of its files by the raw disk; and the memory that takes.

    python benchmarks/merge.py [--gigabytes 8] [--pairs 9] [--folder DIR] [--json]

The checkpoint has a Qwen3's tensors under tp = 2, pp = 2, and random bytes. Before each side, the page cache forgets
the files that are read; the raw side reads and writes the same bytes past it, piece by piece on several threads, and
makes them durable.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from measuring import Contender, Findings, common_arguments, compare, peak_memory, reset_peak_memory, run
from references import best_threads, deleting, drop_caches, raw_copy
from synthetic_checkpoint import qwen3_of_size, write_checkpoint

from mcore_ckpt.hf.merge import MergeRequest, merge

DTYPES = {"as saved": None, "float16": torch.float16}

# In a process of its own: what else this one has loaded would hide what merging takes.
CHILD = "import sys, merge; merge.print_peak_memory(*sys.argv[1:])"


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
        findings.at_most(
            f"extra memory, {name}", extra_memory(source, arguments.folder / "child", name) / 1e6, 1000, "MB"
        )
    copying = lambda threads: raw_copy(files, arguments.folder / "raw", threads, source)  # noqa: E731
    threads = best_threads(copying, rounds=1)
    findings.facts["raw_copy_threads"] = threads
    found = compare(merging(source, arguments.folder / "merged"), copying(threads), arguments.pairs, nbytes)
    findings.comparisons.append(found)
    findings.at_least(f"{found.what} / {found.reference}, speed", found.ratio, 0.7)


def merging(source: Path, target: Path) -> Contender:
    return Contender(
        "merge", lambda: merge(MergeRequest(source, target)), before=lambda: drop_caches(source), after=deleting(target)
    )


def extra_memory(source: Path, target: Path, name: str) -> int:
    drop_caches(source)
    command = [sys.executable, "-c", CHILD, str(source), str(target), name]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    deleting(target)()
    return int(json.loads(done.stdout))


def print_peak_memory(source: str, target: str, name: str) -> None:
    before = reset_peak_memory()
    merge(MergeRequest(Path(source), Path(target), dtype=DTYPES[name]))
    print(peak_memory() - before)


if __name__ == "__main__":
    main()
