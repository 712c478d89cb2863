"""How long training waits for an asynchronous save, and how much slower it is while one is under way.

    python benchmarks/stall.py [--ranks 2] [--gigabytes 1.7] [--pairs 9] [--slow-pairs 3] [--folder DIR] [--json]
    python benchmarks/stall.py --ranks 1 --gigabytes 4 --train-steps 5
    python benchmarks/stall.py --first [--first-after 10]

Starts its own ranks. The stall is the time of the call `manager.save(step)`, compared with one parallel memcpy of the
same bytes into warm memory, all ranks at once. For the slow-down, blocks of --train-steps steps are timed alone and
with a save always in flight, in turn, --slow-pairs times; a step's time leaves out the call of `save` itself.

`--first` measures instead the first save of a new manager, --pairs times: the manager is made, training goes on for
--first-after seconds while its host memory is prepared, and the stall of the first save is compared with that of the
third. The steps of these seconds are compared with as many steps that nothing runs beside.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from measuring import Comparison, Contender, Findings, common_arguments, compare, each_rank, run, show
from ours import Ours
from references import (
    Copy,
    DistributedCheckpoint,
    HostBuffer,
    TorchSave,
    bytes_of_all_ranks,
    delete,
    new_folder,
    saving,
)
from training_state import TrainingState, build, rank_tensors, shape_of_size, train_step


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--train-steps", type=int, default=10, help="steps of each block of training")
    parser.add_argument("--first", action="store_true", help="measure the first save of a new manager")
    parser.add_argument("--first-after", type=float, default=10.0, help="seconds of training before the first save")
    run(parser, __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    state = build(shape_of_size(arguments.gigabytes))
    if arguments.first:
        return measure_first(arguments, findings, state)
    ours = Ours(arguments.folder / "ours", state, async_save=True)
    ours.save()
    nbytes = bytes_of_all_ranks(ours.report.nbytes)
    findings.facts["checkpoint_bytes"] = nbytes
    ours.forget()
    measure_stall(arguments, findings, ours, state, nbytes)
    measure_slow_down(arguments, findings, ours, state, nbytes)
    ours.manager.close()
    return None


# -- the first save ---------------------------------------------------------------------------------------


def measure_first(arguments: argparse.Namespace, findings: Findings, state: TrainingState) -> None:
    firsts, laters, beside, alone = [], [], [], []
    steps = steps_that_take(state, arguments.first_after)
    for number in range(arguments.pairs):
        if number % 2 == 0:
            alone.append(train(state, steps))
        ours = Ours(arguments.folder / f"first{number}", state, async_save=True)
        beside.append(train(state, steps))
        firsts.append(stall_of(ours))
        findings.facts.setdefault("first_saves", []).append(parts_of_stall(ours))
        stall_of(ours)
        laters.append(stall_of(ours))
        findings.facts.setdefault("third_saves", []).append(parts_of_stall(ours))
        nbytes = bytes_of_all_ranks(ours.report.nbytes)
        ours.manager.close()
        if number % 2 == 1:
            alone.append(train(state, steps))
        show(f"first saves: {number + 1} of {arguments.pairs}")
    stalls = Comparison("stall of the first save", "stall of the third", "cost", nbytes, tuple(firsts), tuple(laters))
    training = Comparison(
        "training steps while host memory is prepared",
        "training steps alone",
        "cost",
        nbytes,
        tuple(beside),
        tuple(alone),
    )
    findings.comparisons += [stalls, training]
    findings.facts |= {"cores": os.cpu_count(), "steps_before_the_first_save": steps}
    findings.at_most("stall of the first save / of a later one", stalls.ratio, 1.5)
    findings.at_most("training beside the preparation / alone", training.ratio, 1.05)


def steps_that_take(state: TrainingState, seconds: float) -> int:
    """How many training steps take that long, on the slowest rank."""
    train(state, 1)
    return max(1, round(seconds / train(state, 2) * 2))


def stall_of(ours: Ours) -> float:
    """Seconds that `save` held up the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    ours.start()
    elapsed = time.perf_counter() - start
    ours.finish_and_forget()
    return max(each_rank(elapsed))


def parts_of_stall(ours: Ours) -> list[dict[str, float]]:
    """What each rank's last save says of where its stall went."""
    return each_rank({name: round(getattr(ours.report, name), 4) for name in ("stall_s", "plan_s", "copy_s")})


# -- how long training waits ------------------------------------------------------------------------------


def measure_stall(
    arguments: argparse.Namespace, findings: Findings, ours: Ours, state: TrainingState, nbytes: int
) -> None:
    tensors = list(rank_tensors(state).values())
    copy = Copy.plan(tensors, HostBuffer(Copy.needed_bytes(tensors)))
    against_memcpy = compare(ours.stalling(), copy.memcpy(), arguments.pairs, nbytes, "cost")
    findings.comparisons += [
        against_memcpy,
        compare(ours.stalling(), copy.by_torch(), arguments.pairs, nbytes, "cost"),
        compare(ours.stalling(), async_stall(DistributedCheckpoint(state), arguments.folder), arguments.pairs, nbytes),
        compare(ours.stalling(), saving(TorchSave(state), arguments.folder / "reference"), arguments.pairs, nbytes),
    ]
    findings.facts["last_report_by_rank"] = each_rank(
        {name: getattr(ours.report, name) for name in ("nbytes", "seconds", "stall_s", "copy_s", "write_s", "commit_s")}
    )
    findings.at_most("stall of an async save / one parallel memcpy", against_memcpy.ratio, 1.3)


def async_stall(reference: DistributedCheckpoint, root: Path) -> Contender:
    folder, started = root / "reference", []

    def finish() -> None:
        started.pop().result()
        dist.barrier()
        delete(folder)

    return Contender(
        "torch.distributed.checkpoint async_save, stall",
        lambda: started.append(reference.start_save(folder)),
        before=lambda: new_folder(folder),
        after=finish,
    )


# -- how much slower it trains ----------------------------------------------------------------------------


def measure_slow_down(
    arguments: argparse.Namespace, findings: Findings, ours: Ours, state: TrainingState, nbytes: int
) -> None:
    background = Background(ours)
    train(state, arguments.train_steps)
    alone, beside = [], []
    for number in range(arguments.slow_pairs):
        # Alternating, as in every other comparison.
        for is_saving in (False, True) if number % 2 == 0 else (True, False):
            times = beside if is_saving else alone
            times.append(train(state, arguments.train_steps, background.keep_going if is_saving else None))
            background.finish()
        show(f"training with and without a save: pair {number + 1}")
    found = Comparison(
        "training steps with a save in flight", "training steps alone", "cost", nbytes, tuple(beside), tuple(alone)
    )
    findings.comparisons.append(found)
    findings.facts |= {
        "cores": os.cpu_count(),
        "train_steps_of_a_block": arguments.train_steps,
        "saves_in_flight_of_all_blocks": background.count,
        "slow_down_of_training_during_a_save": found.ratio,
    }


def train(state: TrainingState, steps: int, between: Callable[[], object] | None = None) -> float:
    """Seconds of the steps on the slowest rank, without what happens between them."""
    elapsed = 0.0
    for _ in range(steps):
        if between is not None:
            between()
        dist.barrier()
        start = time.perf_counter()
        train_step(state)
        elapsed += time.perf_counter() - start
    return max(each_rank(elapsed))


class Background:
    """Keeps one save in flight: begins the next when all ranks have seen the last one committed."""

    def __init__(self, ours: Ours) -> None:
        self._ours = ours
        self._is_saving = False
        self.count = 0

    def keep_going(self) -> None:
        if self._is_saving and not all(each_rank(self._ours.handle.committed)):
            return
        self.finish()
        self._ours.start()
        self._is_saving = True
        self.count += 1

    def finish(self) -> None:
        if self._is_saving:
            self._ours.finish_and_forget()
            self._is_saving = False


if __name__ == "__main__":
    main()
