"""How much longer training waits for an asynchronous save if a large folder is handed over as a part of the step.

    python benchmarks/step_parts.py [--ranks 2] [--gigabytes 1.7] [--part-gigabytes 1] [--pairs 9] [--folder DIR]

Starts its own ranks. Rank 0 hands over a folder of 16 files before each save of one side, and no part before each save
of the other. The stall is the time of the call `manager.save(step)` on the slowest rank. The files are on the disk
before the call, so that the system does not write them back during one side alone.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch.distributed as dist
from measuring import Contender, Findings, common_arguments, compare, run
from ours import Ours
from references import bytes_of_all_ranks
from training_state import build, shape_of_size

from mcore_ckpt import HandOver
from mcore_ckpt.io.files import write_file

FILES = 16
MOST_S = 0.010


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--part-gigabytes", type=float, default=1.0, help="size of the folder that is handed over")
    run(parser, __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    ours = Ours(arguments.folder / "ours", build(shape_of_size(arguments.gigabytes)), async_save=True)
    part = Part(ours, arguments.folder / "given", int(arguments.part_gigabytes * 1e9))
    ours.save()
    nbytes = bytes_of_all_ranks(ours.report.nbytes)
    ours.forget()
    alone = Contender("stall without a part", ours.start, after=ours.finish_and_forget)
    handed = Contender("stall with a folder handed over", ours.start, before=part.make, after=part.finish_and_forget)
    found = compare(handed, alone, arguments.pairs, nbytes, "cost")
    findings.comparisons.append(found)
    findings.facts["part_bytes"] = part.nbytes
    more_s = statistics.median(found.ours_s) - statistics.median(found.reference_s)
    findings.at_most("longer stall with the part", more_s * 1e3, MOST_S * 1e3, " ms")
    ours.manager.close()


class Part:
    """The folder that rank 0 hands over."""

    def __init__(self, ours: Ours, folder: Path, nbytes: int) -> None:
        self._ours, self._folder, self.nbytes = ours, folder, nbytes

    def make(self) -> None:
        if dist.get_rank() == 0:
            self._folder.mkdir()
            data = bytes(range(256)) * (self.nbytes // FILES // 256)
            for number in range(FILES):
                write_file(self._folder / f"{number:02d}", [data])
            self._ours.manager.attach("rollouts", save=HandOver(self._folder))
        dist.barrier()

    def finish_and_forget(self) -> None:
        self._ours.finish()
        if dist.get_rank() == 0:
            self._ours.manager.detach("rollouts")
            assert not self._folder.exists()
        self._ours.forget()


if __name__ == "__main__":
    main()
