"""Kills trainings at random points and looks at what is left.

    scripts/chaos.sh --kills 200 --seed 1 [--chains 3] [--part-megabytes 0] [--log FILE]

A chain is one folder of checkpoints and one training after the other: each loads what the killed one before it has
left, bit for bit, or the run fails. torch and megatron are imported once; every rank of every life is a fork.
Exit status 1 if anything was lost, torn, or hung.

Saves are sync or async, of new steps and existing ones, with `renameat2`'s exchange or two renames. An event, at which
a kill may come, is any `open`, `write`, `fsync`, `rename`, `mkdir`, `stat`, `unlink`, `rmdir`, native write, or message
to the key-value store. Bytes are compared by `zlib.crc32` of whole files, not by this package's reader, and states by
digests of weights, optimizer, scheduler and every generator that were noted before the save. In a collective of the
training, gloo has its own error. One seed draws a rank's kill points; which of two ranks comes first is up to the
machine. The run of docs/reliability.md had the same result twice with one seed, once with twenty other processes on two
cores.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.steps import listing as steps
from tests.faults.kills.life import ALARM_S, LAYOUT, TIMEOUT_S, WORLD, Life, ledger, run_rank
from tests.support.lives import (
    bury,
    damage,
    end_store,
    fork_ranks,
    host_store,
    is_what_a_death_causes,
    notes,
    say,
    swept,
    wait_until_ready,
)

ROLE = "actor"
# A rank that waits for a dead one has its deadline, and one more if rank 0 died while it acted; the rest is for a busy
# machine.
SURVIVORS_S = 2 * TIMEOUT_S + 20
# Of the lives that are to be killed by an event, some pass it by, since events differ from run to run.
LIVES_PER_KILL = 4


@dataclass(frozen=True)
class Plan:
    """Who is killed, and when: at an event of their own (`life` says which), or so many seconds from the start."""

    life: Life
    victims: tuple[int, ...]
    after_s: float | None = None

    def __str__(self) -> str:
        who = "both ranks" if len(self.victims) == WORLD else f"rank {self.victims[0]}"
        life = self.life
        when = f"{life.kill_phase} {life.kill_at}" if self.after_s is None else f"after {self.after_s:.2f} s"
        ways = [("sync", "async")[life.background], *(["two renames"] * (not life.exchange)), *(["again"] * life.again)]
        return f"{who}, {when}, {' '.join(ways)}"


@dataclass
class Outcome:
    """What became of a life: `ends` by rank, what survivors raised, and what is wrong."""

    ends: list[int]
    reports: dict[int, dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    newest: int | None = None
    seconds: float = 0.0

    @property
    def killed(self) -> list[int]:
        return [rank for rank, end in enumerate(self.ends) if end == -signal.SIGKILL]

    @property
    def survivors(self) -> str:
        told = [f"rank {r} {report['error'][0] if report['error'] else 'ended'}" for r, report in self.reports.items()]
        return ", ".join(told) or "nobody left"


class Chain:
    """One folder of checkpoints, and the lives of the training that writes it."""

    def __init__(self, seed: str, folder: Path, port: int, part_megabytes: int = 0) -> None:
        self._random = random.Random(seed)
        self._part_megabytes = part_megabytes
        self._folder = folder
        self._port = port
        self._lives = 0
        self._events: dict[int, Counter[str]] = {}
        self._length_s = 0.0
        folder.mkdir(parents=True)

    def run(self, kills: int) -> Iterator[dict[str, Any]]:
        """The log's records: the first and the last life are not killed."""
        yield self._record(self._undisturbed("first"), Plan(self._life(), ()), "first")
        outcome = self._undisturbed("measured")  # has a checkpoint to load, and old ones to delete
        self._events = {rank: Counter(report["events"]) for rank, report in outcome.reports.items()}
        self._length_s = outcome.seconds
        yield self._record(outcome, Plan(self._life(), ()), "measured")
        done = 0
        for _ in range(LIVES_PER_KILL * kills):
            if done == kills:
                break
            plan = self._plan()
            outcome = self._live(plan)
            done += bool(outcome.killed)
            yield self._record(outcome, plan, "kill" if outcome.killed else "missed")
        last = self._undisturbed("last")
        hidden = [path.name for path in self._folder.joinpath("root").rglob(".*")]
        left = [name for name in hidden if name != file_names.RUN_FILE]
        if left:
            last.problems.append(f"left behind: {left}")
        yield self._record(last, Plan(self._life(), ()), "last")

    def _life(self, **changes: Any) -> Life:
        return Life(self._lives, str(self._folder), self._port, part_megabytes=self._part_megabytes, **changes)

    def _undisturbed(self, name: str) -> Outcome:
        outcome = self._live(Plan(self._life(), ()))
        errors = {rank: report["error"] for rank, report in outcome.reports.items() if report["error"]}
        if errors or len(outcome.reports) < WORLD:
            outcome.problems.append(f"the {name} life was not to be killed: {outcome.ends} {errors}")
        return outcome

    def _plan(self) -> Plan:
        draw = self._random
        victims = draw.choice([(0,), (1,), (0, 1)])
        life = self._life(background=draw.random() < 0.5, exchange=draw.random() < 0.75, again=draw.random() < 0.4)
        if draw.random() < 0.3:
            return Plan(life, victims, after_s=draw.uniform(0, self._length_s))
        rank = draw.choice(victims)
        phase = draw.choice(sorted(self._events[rank]))
        at = draw.randint(1, self._events[rank][phase])
        return Plan(replace(life, kill_rank=rank, kill_phase=phase, kill_at=at), victims)

    def _live(self, plan: Plan) -> Outcome:
        self._lives += 1
        acknowledged = self._acknowledged()
        before = {status.step for status in steps.complete_steps(plan.life.root)}
        pids, read = fork_ranks(WORLD, lambda rank, ready: run_rank(plan.life, rank, ready))
        started = wait_until_ready(read, WORLD, ALARM_S)
        kill_at = None if plan.after_s is None else started + plan.after_s
        ends, stuck = bury(pids, plan.victims, kill_at, SURVIVORS_S)
        os.close(read)
        outcome = Outcome(ends, reports_of(plan.life), seconds=time.monotonic() - started)
        if stuck:
            outcome.problems.append(f"ranks {stuck} have hung")
        self._check_survivors(outcome)
        self._check_disk(plan, outcome, before, acknowledged)
        self._check_ledgers(outcome)
        return outcome

    def _check_survivors(self, outcome: Outcome) -> None:
        bad = {rank: end for rank, end in enumerate(outcome.ends) if end not in (0, -signal.SIGKILL)}
        outcome.problems += [f"rank {rank} has ended with {end}" for rank, end in bad.items()]
        for rank, report in outcome.reports.items():
            error = report["error"]
            if error is not None and not (outcome.killed and is_what_a_death_causes(report)):
                outcome.problems.append(f"rank {rank} has raised in {report['in']}: {error}")

    def _check_disk(self, plan: Plan, outcome: Outcome, before: set[int], acknowledged: int | None) -> None:
        with swept(plan.life.root, [ROLE], plan.life.exchange) as root:
            complete = steps.complete_steps(root)
            for status in complete:
                outcome.problems += [f"torn: {text}" for text in damage(status.path / ROLE)]
            outcome.newest = complete[-1].step if complete else None
        known = max((step for step in (acknowledged, self._acknowledged()) if step is not None), default=None)
        if known is not None and (outcome.newest is None or outcome.newest < known):
            outcome.problems.append(f"lost: step {known} was committed, the newest there is {outcome.newest}")
        if before and not complete:
            outcome.problems.append(f"lost: there were steps {sorted(before)}, now there is none")

    def _check_ledgers(self, outcome: Outcome) -> None:
        """Whatever has happened in between, a step's state is the same, when it is saved and when it is loaded."""
        for rank in range(WORLD):
            digests: dict[int, set[str]] = {}
            for what, step, *of in self._notes(rank):
                if what in ("saving", "loaded"):
                    digests.setdefault(step, set()).update(of)
            for step, different in digests.items():
                if len(different) > 1:
                    outcome.problems.append(f"rank {rank} has had {len(different)} different states at step {step}")

    def _acknowledged(self) -> int | None:
        """The newest step that a rank was told is committed."""
        found = [step for rank in range(WORLD) for what, step, *_ in self._notes(rank) if what == "committed"]
        return max(found, default=None)

    def _notes(self, rank: int) -> list[list[Any]]:
        return notes(ledger(self._folder, rank))

    def _record(self, outcome: Outcome, plan: Plan, kind: str) -> dict[str, Any]:
        return {
            "chain": self._folder.name,
            "life": self._lives,
            "kind": kind,
            "plan": str(plan) if plan.victims else "nobody",
            "phase": ("time" if plan.after_s is not None else plan.life.kill_phase) if plan.victims else "",
            "killed": outcome.killed,
            "survivors": outcome.survivors,
            "newest": outcome.newest,
            "problems": outcome.problems,
        }


def reports_of(life: Life) -> dict[int, dict[str, Any]]:
    found = {rank: life.report(rank) for rank in range(WORLD)}
    return {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}


def run_chain(seed: str, folder: Path, kills: int, write: int, part_megabytes: int) -> None:
    pid, port = host_store()
    try:
        for record in Chain(seed, folder, port, part_megabytes).run(kills):
            os.write(write, (json.dumps(record) + "\n").encode())
    finally:
        end_store(pid)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chains", type=int, default=3, help="trainings at the same time; a part of the seed")
    parser.add_argument("--part-megabytes", type=int, default=0, help="size of the part that is a folder; 0: small")
    parser.add_argument("--log", type=Path, help="where the log goes, too")
    arguments = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chain = partial(run_chain, part_megabytes=arguments.part_megabytes)
        records = run_chains(chain, arguments.seed, arguments.chains, arguments.kills, Path(folder))
        return report(records, arguments)


def run_chains(
    run_chain: Callable[[str, Path, int, int], None], seed: int, chains: int, number_of: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """The records of so many chains, which have `number_of` kills or other faults between them."""
    read, write = os.pipe()
    pids = []
    for number in range(chains):
        share = number_of // chains + (number < number_of % chains)
        pid = os.fork()
        if pid == 0:
            os.close(read)
            status = 1
            try:
                run_chain(f"{seed} {number}", folder / str(number), share, write)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    os.close(write)
    with os.fdopen(read) as lines:
        for line in lines:
            yield json.loads(line)
    for pid in pids:
        if os.waitpid(pid, 0)[1]:
            yield {"kind": "broken", "problems": ["a chain has not ended well: see above"], "phase": "", "killed": []}


def report(records: Iterator[dict[str, Any]], arguments: argparse.Namespace) -> int:
    kills, problems, phases = 0, 0, Counter[str]()
    lines = [f"seed {arguments.seed}, {arguments.chains} chains of lives of {WORLD} ranks, {LAYOUT.precision}"]
    say(lines[0])
    for record in records:
        problems += len(record["problems"])
        if record["kind"] == "kill":
            kills += 1
            phases[record["phase"]] += 1
        if record["kind"] == "kill" or record["problems"]:
            lines.append(line_of(record, kills))
            say(lines[-1])
    by_phase = ", ".join(f"{phase} {count}" for phase, count in sorted(phases.items()))
    lines.append(f"{kills} kills ({by_phase}), {problems} problems")
    say(lines[-1])
    if arguments.log is not None:
        arguments.log.write_text("\n".join(lines) + "\n")
    return 0 if kills == arguments.kills and not problems else 1


def line_of(record: dict[str, Any], number: int) -> str:
    if record["kind"] == "broken":
        return record["problems"][0]
    what = f"{number:3} chain {record['chain']}: {record['plan']} -> {record['survivors']}; newest {record['newest']}"
    return "\n    ".join([what, *map(str, record["problems"])])


if __name__ == "__main__":
    sys.exit(main())
