"""Compares resharding a checkpoint offline with a raw copy of its files, and measures its memory.

    python benchmarks/reshard.py [--gigabytes 4] [--pairs 9] [--folder DIR] [--json]

One rank saves the checkpoint once. Before each measurement the files to read are dropped from the page cache. The raw
copy bypasses the page cache: several threads read and write the same bytes piece by piece, and make them durable.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from measuring import Contender, Findings, common_arguments, compare, peak_memory, reset_peak_memory, run
from ours import Ours
from references import deleting, drop_caches, extra_memory, quickest_raw_copy
from training_state import build, shape_of_size

from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.examine.select import select

LAYOUTS = {
    "pp2, dp2": WantedLayout(pp=2, dp=2),
    "tp2": WantedLayout(tp=2),
    "tp2, pp2, dp2": WantedLayout(tp=2, pp=2, dp=2),
}

# Runs in a process of its own, because memory left from the training would hide what resharding needs.
CHILD = "reshard.print_peak_memory"


def main() -> None:
    parser = common_arguments(__doc__)
    parser.set_defaults(ranks=1)
    run(parser, __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    shape = shape_of_size(arguments.gigabytes)
    # The number of layers is even, so that two pipeline ranks can share them.
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
    copying = quickest_raw_copy(files, arguments.folder / "raw", source, findings)
    for name, wanted in LAYOUTS.items():
        contender = resharding(source, arguments.folder / "resharded", name, wanted)
        found = compare(contender, copying, arguments.pairs, nbytes)
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
