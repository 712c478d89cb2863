"""What saves into the fast tier and the choice of a step to load cost with very many nodes, computed by the real code.

    python benchmarks/fast_scale.py [--nodes 8,64,256,1024] [--ranks-per-node 8] [--tensors 100000] [--json]

No file is written and nothing is sent: the manifest, the placement, the leads' reports and rank 0's answer are made and
taken apart as in a job of so many nodes, and their sizes are those that would be sent. The model is that of scale.py.

- manifest: with the placement and without it, and how long rank 0 takes to place the files, and a lead to read it.
- spreading: the manifest goes from node to node; each node sends it to at most eight others.
- choosing: each lead reports three steps; rank 0 finds the whole ones and answers all ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from simulated import Model, SavedFiles
from simulated_ranks import Case

from mcore_ckpt.checkpoint.manifest import (
    FileRecord,
    IndexPlace,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.config import FastTier
from mcore_ckpt.fast.found import found_on_nodes, spread_folder, why_not_whole
from mcore_ckpt.fast.tcp_transport import TcpTransport
from mcore_ckpt.fast.tier import NodeTier
from mcore_ckpt.load.candidates import candidates_of
from mcore_ckpt.ranks.key_value_store import pack, unpack
from mcore_ckpt.ranks.node_map import NodeMap
from mcore_ckpt.save.nodes import place_files
from mcore_ckpt.save.rank_reports import FileReport
from mcore_ckpt.sharding.plan import runs
from mcore_ckpt.steps.choice import choose
from mcore_ckpt.steps.node_steps import HeldRole, node_steps
from mcore_ckpt.steps.trainer_lock import TrainerLock

Result = TypeVar("Result")
HIDDEN, EXPERTS, STEPS, BRANCHES = 4096, 384, 3, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=_numbers, default=[8, 64, 256, 1024], help="numbers of nodes")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--tensors", type=int, default=100_000, help="tensors of the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = []
    for nodes in arguments.nodes:
        found.append(figures(Model.of_tensors(arguments.tensors, HIDDEN, EXPERTS), nodes, arguments.ranks_per_node))
        print(told(found[-1]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps(found, indent=1))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def figures(model: Model, count: int, ranks_per_node: int) -> dict[str, Any]:
    world = count * ranks_per_node
    hosts = [f"node{rank // ranks_per_node}" for rank in range(world)]
    nodes = NodeMap.of(hosts, hosts)
    plain, written = manifest_of(model, world)
    (_, placement), first_place_s = timed(lambda: place_files(written, nodes, 1, 7))
    _, place_s = timed(lambda: place_files(written, nodes, 1, 8))
    manifest = replace(plain, placement=placement)
    data = encode_manifest(manifest)
    _, read_s = timed(lambda: decode_manifest(data))
    return {
        "nodes": count,
        "ranks": world,
        "files": len(manifest.files),
        "manifest_bytes": len(data),
        "placement_bytes": len(data) - len(encode_manifest(plain)),
        "first_place_s": first_place_s,
        "place_s": place_s,
        "read_s": read_s,
        "hops": math.ceil(math.log(max(2, count), BRANCHES)),
        "manifest_bytes_sent_by_a_node": BRANCHES * len(data),
        **choice(nodes, manifest),
    }


def manifest_of(model: Model, world: int) -> tuple[Manifest, list[tuple[int, FileReport]]]:
    """Returns the manifest of a save without its placement, and what the ranks have reported as written."""
    layout = Case.of(model, world).layout
    saved = SavedFiles(model, layout)
    names = [parameter.name for pp in range(layout.pp) for parameter in model.stage(pp, layout.pp)]
    positions = {name: number for number, name in enumerate(names)}
    files = [
        FileRecord(
            file.path,
            file.kind,
            rank,
            1 << 30,
            0x12345678,
            IndexPlace(1 << 29, 1 << 20, 0x12345678),
            Holds.of(positions[part.name] for part in file.parts),
        )
        for rank in range(world)
        for file in saved.of(rank)
        if file.writers[-1] == rank
    ]
    manifest = Manifest(
        step=1,
        role="actor",
        roles=("actor",),
        attempt="a" * 32,
        created="2026-01-01T00:00:00+00:00",
        versions={},
        contents=("model", "optimizer"),
        topology=layout.topology,
        ranks=tuple(saved.ranks),
        stages=(),
        tensors=tuple(names),
        files=tuple(files),
    )
    return manifest, [(file.rank, FileReport(file.path, file.kind, file.size, file.crc32, None, "")) for file in files]


def choice(nodes: NodeMap, manifest: Manifest) -> dict[str, Any]:
    """The round in which all ranks agree on the step to load."""
    assert manifest.placement is not None
    by_node: list[list[int]] = [[] for _ in nodes.all]
    for position, holders in enumerate(manifest.placement.by_file):
        for node in holders:
            by_node[node].append(position)
    reports = [pack({"held": _held(manifest, positions)}) for positions in by_node]
    tier = _tier(nodes)
    others = pack({"held": []})

    def answer() -> bytes:
        records = [unpack(others)] * sum(len(node.ranks) for node in nodes.all)
        for node, report in zip(nodes.all, reports, strict=True):
            records[node.lead] = unpack(report)
        found = found_on_nodes(tier, records)
        chosen = choose(node_steps(found, ("actor",), partial(why_not_whole, tier)), ("actor",))
        return pack({"candidates": candidates_of("actor", chosen.steps, tier)})

    answered, answer_s = timed(answer)

    def receive() -> None:
        candidates = unpack(answered)["candidates"]
        folder = spread_folder(tier, "actor", candidates[0], None)
        object.__setattr__(folder, "_manifest", manifest)  # it has been read from this node's folder
        assert len(folder._by_path) == len(manifest.files)

    _, receive_s = timed(receive)
    return {
        "report_bytes": max(map(len, reports)),
        "answer_bytes": len(answered),
        "answer_s": answer_s,
        "receive_s": receive_s,
    }


def _held(manifest: Manifest, positions: Sequence[int]) -> list[list[Any]]:
    heads = [replace(manifest.head, step=step, role="actor", attempt="a" * 32) for step in range(STEPS)]
    return [HeldRole(head, len(manifest.files), tuple(runs(positions)), True, 7).to_record() for head in heads]


def _tier(nodes: NodeMap) -> NodeTier:
    folder = Path("/dev/shm/run")
    addressed = NodeMap(tuple(replace(node, address="10.0.0.1:4000") for node in nodes.all))
    lock = TrainerLock(folder, "actor")
    return NodeTier(FastTier(folder), "actor", addressed, 1, 8, folder, TcpTransport(b"secret", 60.0), None, lock)


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def told(row: dict[str, Any]) -> str:
    sizes = f"manifest {row['manifest_bytes'] / 1e6:.1f} MB (placement {row['placement_bytes'] / 1e3:.0f} kB)"
    placing = f"placed in {row['first_place_s']:.2f} s the first time, then {row['place_s']:.3f} s"
    answer = f"answer {row['answer_bytes'] / 1e3:.0f} kB in {row['answer_s']:.2f} s, taken in {row['receive_s']:.2f} s"
    return (
        f"{row['nodes']} nodes, {row['ranks']} ranks, {row['files']} files: {sizes}, {placing}, read in "
        f"{row['read_s']:.2f} s, {row['hops']} hops; choosing: report {row['report_bytes']} bytes, {answer}"
    )


if __name__ == "__main__":
    main()
