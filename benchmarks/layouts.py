"""A load under another parallel layout against one of the layout it was saved with.

    python benchmarks/layouts.py [--ranks 2] [--gigabytes 1.7] [--pairs 9] [--folder DIR] [--json]

Starts its own ranks: data-parallel, tensor-parallel, and two pipeline stages. Each layout's training loads what each
of the others has saved; the page cache forgets the files before. Extra memory is that of a first load.
"""

from __future__ import annotations

import argparse
import ctypes
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from measuring import Contender, Findings, common_arguments, compare, each_rank, peak_memory, reset_peak_memory, run
from ours import Ours
from references import bytes_of_all_ranks, drop_by_rank_0
from training_state import Shape, TrainingState, build, shape_of_size

from mcore_ckpt import CheckpointManager


def main() -> None:
    run(common_arguments(__doc__), __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    ranks, shape = arguments.ranks, shape_of_size(arguments.gigabytes)
    shape = replace(shape, num_layers=2 * max(1, shape.num_layers // 2))  # for two stages
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
    # What saves have freed but the allocator kept would hide what the load takes.
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak_memory()
    contender.run()
    worst = max(each_rank(peak_memory() - before))
    findings.at_most(f"{contender.name}: extra host memory, per rank", worst / 1e6, 512, "MB")


if __name__ == "__main__":
    main()
