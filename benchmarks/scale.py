"""Measures how the cost of a commit and of a load's plan grows with the number of ranks and of tensors.

    python benchmarks/scale.py [--worlds 8,64,512,4096,16384] [--tensors 100000] [--experts 384] [--folder DIR] [--json]

All ranks but rank 0 are simulated by a few processes (simulated_ranks.py). Rank 0, the key-value store, the reports,
the manifest and the indexes are real; the files have no tensor bytes. Each world saves three times: the first save
tells rank 0 the names of all tensors, the later ones do not. Then one rank plans a load under the same layout, and one
under a layout of half the tensor, pipeline and expert parallelism.

The tensors are those of the model. The optimizer has three for each. With `--experts 0` the model has no experts; then
each rank of a large run holds parts of very many tensors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from measuring import machine_facts
from simulated import Model
from simulated_ranks import HOST, Case, Crowd, Rank0

HIDDEN = 4096
CROWDS = 2
# How long the processes of one world may take together.
WORLD_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=_numbers, default=[8, 64, 512, 4096, 16384], help="numbers of ranks")
    parser.add_argument("--tensors", type=_numbers, default=[100_000], help="numbers of tensors of the model")
    parser.add_argument("--experts", type=int, default=384, help="experts in each layer; 0 for a model without experts")
    parser.add_argument(
        "--folder", type=Path, default=Path("."), help="the folder in which a temporary folder is created"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    own = Path(tempfile.mkdtemp(prefix="mcore_ckpt-benchmark-", dir=arguments.folder.absolute()))
    found: dict[str, Any] = {"machine": machine_facts(own), "worlds": []}
    try:
        for tensors in arguments.tensors:
            for world in arguments.worlds:
                case = Case.of(Model.of_tensors(tensors, HIDDEN, arguments.experts), world)
                row = {"world": world, "tensors": tensors, "experts": arguments.experts}
                row |= {"layout": str(case.layout), **run_world(case, own)}
                found["worlds"].append(row)
                print(told(row), flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(found, indent=1))
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def run_world(case: Case, folder: Path) -> dict[str, Any]:
    """Runs one world in processes of its own and returns its figures."""
    context = multiprocessing.get_context("spawn")
    crowds = min(CROWDS, case.layout.world - 1)
    barrier, results, ready = context.Barrier(crowds + 1), context.Queue(), context.Queue()
    root = Path(tempfile.mkdtemp(dir=folder))
    host = context.Process(target=_host, args=(ready,), daemon=True)
    host.start()
    port = ready.get(timeout=60)
    processes = [context.Process(target=_rank_0, args=(case, root, port, barrier, results), daemon=True)]
    for number in range(crowds):
        ranks = range(1 + number, case.layout.world, crowds)
        processes.append(context.Process(target=_crowd, args=(case, ranks, root, port, barrier, results), daemon=True))
    try:
        for process in processes:
            process.start()
        parts = [_next(results, processes) for _ in processes]
    finally:
        for process in (*processes, host):
            process.terminate()
        shutil.rmtree(root, ignore_errors=True)
    return figures(dict(parts)["rank 0"], [part for name, part in parts if name == "crowd"])


def _next(results: Any, processes: list[Any]) -> tuple[str, Any]:
    ends = time.monotonic() + WORLD_S
    while time.monotonic() < ends:
        if not results.empty():
            return results.get()
        if any(process.exitcode for process in processes):
            break
        time.sleep(0.2)
    raise SystemExit("a process of the simulation has failed, or hangs")


def _host(ready: Any) -> None:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    ready.put(store.port)
    signal.pause()


def _rank_0(case: Case, root: Path, port: int, barrier: Any, results: Any) -> None:
    results.put(("rank 0", Rank0(case, root, port, barrier).run()))


def _crowd(case: Case, ranks: range, root: Path, port: int, barrier: Any, results: Any) -> None:
    results.put(("crowd", Crowd(case, ranks, root, port, barrier).run()))


def figures(rank_0: dict[str, Any], crowds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Joins what rank 0 and the crowds have found."""
    saves = []
    for number, save in enumerate(rank_0["saves"]):
        others = [crowd[number]["committing"] for crowd in crowds]
        last = max(other["submitted_at"] for other in others)
        collect = save.pop("collected_at") - last
        saves.append(
            {
                **save,
                "commit_s": save["ended_at"] - last,
                "collect_s": collect,
                "slowest_other_s": max(other["slowest_s"] for other in others),
                "other": {name: max(other["most"][name] for other in others) for name in others[0]["most"]},
            }
        )
    return {
        "meeting": rank_0["meeting"],
        "saves": saves,
        "load": rank_0["load"],
        "polls_per_s": sum(crowd[-1]["polls_per_s"] for crowd in crowds),
    }


def told(row: dict[str, Any]) -> str:
    """Says in a few lines what one world has cost."""
    lines = [f"{row['world']} ranks, {row['tensors']} tensors, {row['layout']}"]
    for number, save in enumerate(row["saves"], 1):
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in save["phases"].items())
        lines.append(
            f"  save {number}: commit {save['commit_s']:.2f} s (collect {save['collect_s']:.2f}; {phases}), "
            f"open {save['open_s']:.2f} s, cpu {save['cpu_s']:.2f} s, pause {save['longest_pause_s'] * 1e3:.0f} ms, "
            f"memory {save['peak_bytes'] / 1e6:.0f} MB, manifest {save['manifest_bytes'] / 1e6:.1f} MB"
        )
        lines.append(
            f"    rank 0: trainer {save['traffic']}, commits {save['commit_traffic']}, keys {save['keys_before']}; "
            f"others: {save['other']}, {save['slowest_other_s'] * 1e3:.1f} ms"
        )
    lines.append(f"  load: {row['load']}")
    lines.append(f"  meeting: {row['meeting']}, polls {row['polls_per_s']:.0f} a second")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
