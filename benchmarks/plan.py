"""Measures how long one rank takes to plan a load, and how much memory that needs.

    python benchmarks/plan.py [--layers 1666] [--repeats 5] [--folder DIR] [--json]

There are two cases. In the first case, 1,024 ranks (tp 8, pp 8, dp 16) have saved 10,000 tensors, and one rank of
another 1,024 (tp 4, pp 4, dp 64) plans its load. In the second case, a single rank has saved and plans its load.
Manifest and indexes are real; the files have no tensor bytes. The measurement begins with reading the manifest and ends
when the rows to read of every tensor are known.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import Findings, machine_facts, peak_memory, print_found, reset_peak_memory
from simulated import KINDS, Layout, Model, Part, write_checkpoint

from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.formats.locate import Located, Locator, Wanted
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.ranks.topology import RankCoordinates
from mcore_ckpt.sharding.overlap import _placed
from mcore_ckpt.sharding.plan import MODEL, PARAM, ShardKey

SAVED, WANTED, ALONE = Layout(8, 8, 16), Layout(4, 4, 64), Layout(1, 1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1666, help="number of layers, of six tensors each")
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size of the layers")
    parser.add_argument("--repeats", type=int, default=5, help="number of measurements; the result is their median")
    parser.add_argument(
        "--folder", type=Path, default=Path("."), help="the folder in which a temporary folder is created"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    own = Path(tempfile.mkdtemp(prefix="mcore_ckpt-benchmark-", dir=arguments.folder.absolute()))
    try:
        findings = Findings()
        measure(arguments, findings, own)
        found: dict[str, Any] = {"machine": machine_facts(own), **findings.as_json()}
    finally:
        shutil.rmtree(own)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print_found(found)


def measure(arguments: argparse.Namespace, findings: Findings, folder: Path) -> None:
    model = Model(arguments.layers, arguments.hidden, 131072)
    # A rank of the first stage has the embedding, whose state is in the files of all data-parallel ranks.
    at = RankCoordinates(tp=1, pp=0, dp=7, etp=1, edp=7)
    near = lambda rank: rank.pp in (0, 1) and rank.tp in (2, 3)  # noqa: E731
    manifest = write_checkpoint(folder / "many", model, SAVED, near)
    findings.facts["files"], findings.facts["tensors"] = len(manifest.files), len(manifest.tensors)
    report(findings, "another layout", arguments.repeats, lambda: plan(folder / "many", model, WANTED, at))
    # 2,500 parameters, each with three tensors of optimizer state, are 10,000 tensors.
    alone = Model(arguments.layers // 4, 1024, 32768)
    write_checkpoint(folder / "one", alone, ALONE)
    report(findings, "same layout", arguments.repeats, lambda: plan(folder / "one", alone, ALONE, RankCoordinates()))


def report(findings: Findings, what: str, repeats: int, run: Callable[[], list[Located]]) -> None:
    wall, cpu, extra, located = [], [], [], []
    for _ in range(repeats):
        located = []
        _placed.cache_clear()
        before = reset_peak_memory()
        start = time.perf_counter(), time.process_time()
        located = run()
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
        extra.append(peak_memory() - before)
    gc.collect()
    findings.facts[what] = {
        "tensors_filled": len(located),
        "reads": sum(len(tensor.reads) for tensor in located),
        "rows": sum(read.rows.rows for tensor in located for read in tensor.reads),
        "files_read": len({read.stored.file for tensor in located for read in tensor.reads}),
        "wall_clock_s": statistics.median(wall),
    }
    # CPU time, because a plan runs on one thread and reads little, and wall-clock time includes other programs' work.
    findings.at_most(f"plan of one rank, {what}", statistics.median(cpu), 2, "s")
    findings.at_most(f"extra memory of a plan, {what}", max(extra) / 1e6, 500, "MB")


def plan(role_dir: Path, model: Model, wanted: Layout, at: RankCoordinates) -> list[Located]:
    """Locates everything that a rank has to fill, in the order of `mcore_ckpt.load.plan`."""
    locator = Locator(NativeReader.open(role_dir), RankPosition(wanted.topology, at))
    parts = wanted.model_parts(model, at)
    found = [_find(locator, part, MODEL) for part in parts]
    for part in wanted.optimizer_parts(parts, at):
        found.append(_find(locator, part, PARAM))
        kinds = locator.moments(part.name)
        assert (PARAM, *kinds) == KINDS
        found += [_find(locator, part, kind) for kind in kinds]
    return found


def _find(locator: Locator, part: Part, kind: str) -> Located:
    located = locator.find(Wanted(ShardKey(part.name, kind), part.region, "here"))
    assert located is not None
    return located


if __name__ == "__main__":
    main()
