"""Compares a load into another parallel layout with a load into the layout of the save.

    python benchmarks/layouts.py [--ranks 2] [--gigabytes 1.7] [--pairs 9] [--folder DIR] [--json]

The script starts its own ranks. The layouts are data-parallel, tensor-parallel and two pipeline stages. The training of
each layout loads the checkpoints of the others; before each load the files are dropped from the page cache. The extra
memory is that of the first load.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from measuring import Contender, Findings, common_arguments, compare, extra_memory_by_rank, run
from ours import Ours
from references import bytes_of_all_ranks, drop_by_rank_0
from training_state import Shape, TrainingState, build, shape_of_size

from mcore_ckpt import CheckpointManager


def main() -> None:
    run(common_arguments(__doc__), __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    ranks, shape = arguments.ranks, shape_of_size(arguments.gigabytes)
    shape = replace(shape, num_layers=2 * max(1, shape.num_layers // 2))  # the number of layers is even, for two stages
    layouts = {f"dp{ranks}": {}, f"tp{ranks}": {"tp": ranks}, "pp2": {"pp": 2}}
    folders = {name: save(shape, arguments.folder / name, sizes) for name, sizes in layouts.items()}
    for target, sizes in layouts.items():
        state = build(shape, **sizes)
        same = loading(state, folders[target], f"load {target} into {target}")
        for source in (name for name in layouts if name != target):
            other = loading(state, folders[source], f"load {source} into {target}")
            measure_memory(findings, other)
            found = compare(other, same, arguments.pairs, nbytes(folders[target]), "cost")
            findings.comparisons.append(found)
            findings.at_most(f"{found.what} / into its own, time", found.ratio, 1.5)


def save(shape: Shape, root: Path, sizes: dict[str, int]) -> Path:
    state = build(shape, **sizes)
    ours = Ours(root, state)
    ours.save()
    ours.manager.close()
    return ours.folder()


def loading(state: TrainingState, folder: Path, name: str) -> Contender:
    manager = CheckpointManager(folder.parent.parent, state.model, state.optimizer, state.scheduler)
    return Contender(name, lambda: manager.load(path=folder), before=lambda: drop_by_rank_0(folder))


def nbytes(folder: Path) -> int:
    own = sum(path.stat().st_size for path in folder.rglob("*.pt")) if dist.get_rank() == 0 else 0
    return bytes_of_all_ranks(own)


def measure_memory(findings: Findings, contender: Contender) -> None:
    contender.before()
    worst = max(extra_memory_by_rank(contender.run))
    findings.at_most(f"{contender.name}: extra host memory, per rank", worst / 1e6, 512, "MB")


if __name__ == "__main__":
    main()
