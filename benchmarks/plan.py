"""How long one rank looks for its parts of a checkpoint, and how much memory that takes.

    python benchmarks/plan.py [--layers 1666] [--repeats 5] [--folder DIR] [--json]

The checkpoint is of 1,024 ranks (tp 8, pp 8, dp 16) and 10,000 tensors, and read by one rank of another 1,024 (tp 4,
pp 4, dp 64); and one of a single rank, by itself. Manifest and indexes are real, bytes of tensors there are none. What
is measured begins with the manifest and ends with the rows of every tensor.
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

from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.formats.locate import Source, Sources, Wanted
from mcore_ckpt.formats.native.catalog import Catalog
from mcore_ckpt.ranks.topology import RankCoordinates
from mcore_ckpt.sharding.overlap import _placed
from mcore_ckpt.sharding.plan import MODEL, PARAM, ShardKey

SAVED, WANTED, ALONE = Layout(8, 8, 16), Layout(4, 4, 64), Layout(1, 1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1666, help="of six tensors each")
    parser.add_argument("--hidden", type=int, default=4096, help="their width")
    parser.add_argument("--repeats", type=int, default=5, help="the median counts")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the temporary folder of files goes")
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
    # The first stage of two: it has the embedding, whose state is in the files of all data-parallel ranks.
    at = RankCoordinates(tp=1, pp=0, dp=7, etp=1, edp=7)
    near = lambda rank: rank.pp in (0, 1) and rank.tp in (2, 3)  # noqa: E731
    manifest = write_checkpoint(folder / "many", model, SAVED, near)
    findings.facts["files"], findings.facts["tensors"] = len(manifest.files), len(manifest.tensors)
    report(findings, "another layout", arguments.repeats, lambda: plan(folder / "many", model, WANTED, at))
    # 2,500 parameters with their states: 10,000 tensors.
    alone = Model(arguments.layers // 4, 1024, 32768)
    write_checkpoint(folder / "one", alone, ALONE)
    report(findings, "same layout", arguments.repeats, lambda: plan(folder / "one", alone, ALONE, RankCoordinates()))


def report(findings: Findings, what: str, repeats: int, run: Callable[[], list[Source]]) -> None:
    wall, cpu, extra, sources = [], [], [], []
    for _ in range(repeats):
        sources = []
        _placed.cache_clear()
        before = reset_peak_memory()
        start = time.perf_counter(), time.process_time()
        sources = run()
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
        extra.append(peak_memory() - before)
    gc.collect()
    findings.facts[what] = {
        "tensors_filled": len(sources),
        "reads": sum(len(source.reads) for source in sources),
        "rows": sum(read.rows.rows for source in sources for read in source.reads),
        "files_read": len({read.stored.file for source in sources for read in source.reads}),
        "wall_clock_s": statistics.median(wall),
    }
    # Of the processor: it has one thread and reads little, and other work on the machine is not its own.
    findings.at_most(f"plan of one rank, {what}", statistics.median(cpu), 2, "s")
    findings.at_most(f"extra memory of a plan, {what}", max(extra) / 1e6, 500, "MB")


def plan(role_dir: Path, model: Model, wanted: Layout, at: RankCoordinates) -> list[Source]:
    """Finds everything a rank has to fill, in the order of `planning._plan`."""
    manifest = read_manifest(role_dir)
    sources = Sources(Catalog(role_dir, manifest), wanted.topology, at, None)
    parts = wanted.model_parts(model, at)
    found = [_find(sources, part, MODEL) for part in parts]
    for part in wanted.optimizer_parts(parts, at.dp):
        found.append(_find(sources, part, PARAM))
        kinds = sources.moments(part.name, expert=False)
        assert (PARAM, *kinds) == KINDS
        found += [_find(sources, part, kind) for kind in kinds]
    return found


def _find(sources: Sources, part: Part, kind: str) -> Source:
    source = sources.find(Wanted(ShardKey(part.name, kind), part.region, False, "here"))
    assert source is not None
    return source


if __name__ == "__main__":
    main()
