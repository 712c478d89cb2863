"""A checkpoint resharded offline against a copy of its files by the raw disk; and the memory that takes.

    python benchmarks/reshard.py [--gigabytes 4] [--pairs 9] [--folder DIR] [--json]

Saves once, from one rank. Before each side, the page cache forgets the files that are read; the raw side reads and
writes the same bytes past it, piece by piece on several threads, and makes them durable.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from measuring import Contender, Findings, common_arguments, compare, peak_memory, reset_peak_memory, run
from ours import Ours
from references import best_threads, deleting, drop_caches, extra_memory, raw_copy
from training_state import build, shape_of_size

from mcore_ckpt.tools.find import select
from mcore_ckpt.tools.reshard.reshard import reshard
from mcore_ckpt.tools.reshard.target import WantedLayout

LAYOUTS = {
    "pp2, dp2": WantedLayout(pp=2, dp=2),
    "tp2": WantedLayout(tp=2),
    "tp2, pp2, dp2": WantedLayout(tp=2, pp=2, dp=2),
}

# In a process of its own: what the training has left behind would hide what resharding takes.
CHILD = "reshard.print_peak_memory"


def main() -> None:
    parser = common_arguments(__doc__)
    parser.set_defaults(ranks=1)
    run(parser, __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    shape = shape_of_size(arguments.gigabytes)
    # So that two pipeline ranks can share them.
    shape = replace(shape, num_layers=max(2, shape.num_layers // 2 * 2))
    ours = Ours(arguments.folder / "source", build(shape))
    ours.save()
    ours.manager.close()
    source = ours.folder()
    files = sorted(path for path in source.rglob("*") if path.is_file())
    nbytes = sum(path.stat().st_size for path in files)
    findings.facts["bytes"] = nbytes
    for name in LAYOUTS:
        extra = extra_memory(CHILD, source, arguments.folder / "child", name)
        findings.at_most(f"extra memory, to {name}", extra / 1e6, 1000, "MB")
    copying = lambda threads: raw_copy(files, arguments.folder / "raw", threads, source)  # noqa: E731
    threads = best_threads(copying, rounds=1)
    findings.facts["raw_copy_threads"] = threads
    for name, wanted in LAYOUTS.items():
        contender = resharding(source, arguments.folder / "resharded", name, wanted)
        found = compare(contender, copying(threads), arguments.pairs, nbytes)
        findings.comparisons.append(found)
        findings.at_least(f"{contender.name} / {found.reference}, speed", found.ratio, 0.5)


def resharding(source: Path, root: Path, name: str, wanted: WantedLayout) -> Contender:
    return Contender(
        f"reshard to {name}",
        lambda: reshard(select(source), root, wanted),
        before=lambda: drop_caches(source),
        after=deleting(root),
    )


def print_peak_memory(source: str, root: str, name: str) -> None:
    before = reset_peak_memory()
    reshard(select(Path(source)), Path(root), LAYOUTS[name])
    print(peak_memory() - before)


if __name__ == "__main__":
    main()
