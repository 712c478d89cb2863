"""Preempts trainings at random moments, and looks at what is left.

    scripts/preemptions.sh --preemptions 50 --ranks 8 --seed 1

One training after the other in one folder: each goes on, bit for bit, from what the last save of the one before has
left. At a random moment after all ranks have begun, some ranks get SIGTERM or SIGUSR1, one or several times, or a file
is made. All ranks must end with the guard's status before the deadline, at one step. The newest complete step on disk
is that step, or an older one if rank 0 was told that a save does not fit. Where a rank is killed after the request, the
others must end before the deadline, too, and no complete step may be lost. Exit status 1 if anything was lost, torn,
late or hung. torch and megatron are imported once; every rank of every life is a fork.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.steps.listing import complete_steps
from tests.faults.kills.preempted_life import ALARM_S, STOPPED, Preemption, ledger, run_rank
from tests.support.lives import (
    damage,
    end_store,
    fork_ranks,
    host_store,
    is_what_a_death_causes,
    notes,
    say,
    wait_until_ready,
)

# Of a machine with fewer cores than ranks.
DEADLINE_S = 60.0
# Where a rank dies after the request, the others wait for it until then.
DEADLINE_OF_A_DEATH_S = 20.0
# The longest time from the moment when all ranks have begun to the request.
LATEST_S = 3.0


@dataclass(frozen=True)
class Request:
    """So many seconds after the begin, `victims` get `numbers` in turn; without victims, a file is made.

    `killed`: a rank that is killed `killed_after_s` after that; None: nobody is.
    """

    after_s: float
    victims: tuple[int, ...]
    numbers: tuple[int, ...]
    killed: int | None = None
    killed_after_s: float = 0.0

    def __str__(self) -> str:
        names = ", ".join(signal.Signals(number).name for number in self.numbers)
        what = f"{names} on ranks {list(self.victims)}" if self.victims else "a file"
        death = "" if self.killed is None else f", rank {self.killed} is killed {self.killed_after_s:.2f} s later"
        return f"{what} after {self.after_s:.2f} s{death}"


def drawn(draw: random.Random, number: int, folder: Path, port: int, world: int) -> tuple[Preemption, Request]:
    fast = draw.random() < 0.3
    slow_s = 1000.0 if draw.random() < 0.2 and number > 0 else None
    every = draw.choice([None, 1, 3])
    background = draw.random() < 0.6
    killed = draw.randrange(world) if draw.random() < 0.2 else None
    deadline_s = DEADLINE_S if killed is None else DEADLINE_OF_A_DEATH_S
    life = Preemption(number, str(folder), port, world, deadline_s, background, every, slow_s, fast)
    victims = tuple(sorted(draw.sample(range(world), draw.choice([1, 1, 2, world])))) if draw.random() < 0.8 else ()
    numbers = tuple(draw.choices([signal.SIGTERM, signal.SIGUSR1], k=draw.choice([1, 1, 2, 4])))
    return life, Request(draw.uniform(0, LATEST_S), victims, numbers, killed, draw.uniform(0, 1))


def run(preemptions: int, world: int, seed: int, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """What happened in each life, and what is wrong."""
    draw, (store, port) = random.Random(seed), host_store()
    try:
        for number in range(preemptions):
            life, request = drawn(draw, number, folder, port, world)
            yield _one(life, request)
    finally:
        end_store(store)


def _one(life: Preemption, request: Request) -> tuple[str, list[str]]:
    if not life.fast:
        # This training knows no steps on nodes, and goes on from an older one in the root: it runs on another machine.
        shutil.rmtree(life.node, ignore_errors=True)
    newest_before = newest_on_disk(life)
    pids, read = fork_ranks(life.world, lambda rank, ready: run_rank(life, rank, ready))
    wait_until_ready(read, life.world, ALARM_S)
    os.close(read)
    time.sleep(request.after_s)
    asked = time.time()
    by_rank = {rank: pid for pid, rank in pids.items()}
    if not request.victims:
        life.trigger.touch()
    for number in request.numbers:
        for rank in request.victims:
            os.kill(by_rank[rank], number)
        time.sleep(0.02)
    if request.killed is not None:
        time.sleep(request.killed_after_s)
        os.kill(by_rank[request.killed], signal.SIGKILL)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(by_rank[rank], 0)[1]) for rank in range(life.world)]
    reports = [_report(life, rank) for rank in range(life.world)]
    newest = newest_on_disk(life)
    if request.killed is not None and statuses[request.killed] == -signal.SIGKILL:
        problems = unexpected_ends(statuses, reports, request.killed)
        problems += _late(life, reports, asked) + _older(newest, newest_before)
        life.trigger.unlink(missing_ok=True)
    else:
        problems = _problems(life, statuses, reports, asked) + _of_disk(life, reports, newest, newest_before)
    problems += _of_states(life) + _damage(life)
    steps = sorted({report.get("step") for report in reports}, key=str)
    ways = [
        ("sync", "async")[life.background],
        *(["fast"] * life.fast),
        *(["no time"] * (life.slow_s is not None)),
        f"every {life.saves_every}",
    ]
    saved = {report.get("saved") for report in reports}
    text = f"{request}, {' '.join(ways)} -> stopped at {steps}, saved {sorted(map(str, saved))}, newest {newest}"
    return text, problems


def _report(life: Preemption, rank: int) -> dict[str, Any]:
    path = life.report(rank)
    return json.loads(path.read_text()) if path.exists() else {}


def _problems(life: Preemption, statuses: list[int], reports: list[dict[str, Any]], asked: float) -> list[str]:
    found = [f"rank {rank} has ended with {status}" for rank, status in enumerate(statuses) if status != STOPPED]
    found += [f"rank {rank} has raised {each['error']}" for rank, each in enumerate(reports) if each.get("error")]
    found += _late(life, reports, asked)
    if len({each.get("step") for each in reports}) > 1:
        found.append("the ranks have stopped at different steps")
    if life.trigger.exists():
        found.append("the file is still there")
        life.trigger.unlink()
    return found


def unexpected_ends(statuses: Sequence[int], reports: Sequence[dict[str, Any]], killed: int) -> list[str]:
    """How ranks have ended that the death of the rank `killed` does not explain.

    A survivor has stopped, or has raised because of the death. In both cases there is a report. One that hangs has
    none, because SIGALRM ends it.
    """
    found = []
    for rank, (status, report) in enumerate(zip(statuses, reports, strict=True)):
        if rank == killed:
            continue
        if status not in (STOPPED, 1) or not report:
            hung = f": it has hung for {ALARM_S} s" if status == -signal.SIGALRM else ""
            found.append(f"rank {rank} has ended with {status}{hung}")
        elif report["error"] and not is_what_a_death_causes(report):
            found.append(f"rank {rank} has raised in {report['in']}: {report['error']}")
    return found


def _late(life: Preemption, reports: list[dict[str, Any]], asked: float) -> list[str]:
    """Of ranks with a report. One without has ended in another way than it should, which `unexpected_ends` tells."""
    took = [each["ended"] - asked for each in reports if each]
    return [f"a rank has ended after {seconds:.1f} s" for seconds in took if seconds > life.deadline_s]


def _older(newest: int | None, before: int | None) -> list[str]:
    is_older = before is not None and (newest is None or newest < before)
    return [f"step {before} was complete, and the newest on disk is {newest}"] if is_older else []


def _damage(life: Preemption) -> list[str]:
    return [text for status in complete_steps(life.root) for text in damage(status.path / "actor")]


def _of_disk(life: Preemption, reports: list[dict[str, Any]], newest: int | None, before: int | None) -> list[str]:
    """The newest complete step is the last one, or, where there was no time, not older than the one before."""
    step = reports[0].get("step")
    found = _older(newest, before)
    if life.slow_s is None and newest != step:
        found.append(f"step {step} was the last one, and the newest on disk is {newest}")
    every = life.saves_every
    if every and step and life.slow_s is not None and (newest or 0) < step - step % every:
        found.append(f"step {step - step % every} was saved, and the newest on disk is {newest}")
    return found


def _of_states(life: Preemption) -> list[str]:
    """A step's state is the same whenever it is reached, also in a life that has gone on from an older step."""
    found = []
    for rank in range(life.world):
        digests: dict[int, set[str]] = {}
        for _, step, state in notes(ledger(life.folder, rank)):
            digests.setdefault(step, set()).add(state)
        found += [
            f"rank {rank} had {len(each)} states at step {step}" for step, each in digests.items() if len(each) > 1
        ]
    return found


def newest_on_disk(life: Preemption) -> int | None:
    """In the root or on the node."""
    steps = [each.step for folder in (life.root, life.node) for each in complete_steps(folder)]
    return max(steps, default=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preemptions", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    wrong = done = 0
    with tempfile.TemporaryDirectory(prefix="preemptions-") as folder:
        for text, problems in run(arguments.preemptions, arguments.ranks, arguments.seed, Path(folder)):
            done += 1
            wrong += len(problems)
            say("\n    ".join([f"{done:3} {text}", *problems]))
    say(f"{done} preemptions of {arguments.ranks} ranks, {wrong} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
