"""Kills trainings in the fast tier, and hosts of theirs, at random points, and looks at what the next one recovers.

    scripts/fast_chaos.sh --kills 100 --seed 1 [--log FILE]

Each life is a job on four simulated hosts: it recovers what the life before has left, trains, and saves each step.
Then all processes die, or those of one host, or a host is lost for good and replaced by an empty one; what is left of
the job is killed, as torchrun does it. Exit status 1 if anything was lost that should be there, torn, or hung; 77 if
hosts cannot be simulated here.

What should be there follows from what ranks were told before the kill: a step is not lost

- that was reported as durable;
- that was reported as copied, if no more hosts have been lost since than it had copies, and no newer one was copied;
- that was reported as committed, if no host has been lost since.

Each host has one or two ranks and a folder of memory. A life saves four steps with one or two copies; some are also
copied to the root. A kill comes at a random time, or when a rank has come to the n-th event of the start, a recovery, a
save, a commit, the copying, the copy to the root, a deletion or the answers to other hosts. The rest of the job is
killed then, or has to end by its deadline. States are compared by a digest of weights and optimizer that was noted
before the save.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint.file_names import RUN_FILE
from tests.support.host_jobs import Job, JobServer
from tests.support.hosts import Host, Hosts
from tests.support.lives import say

LIFE = Path(__file__).with_name("fast_life.py")
HOSTS = 4
STEPS = 4
# (tensor, pipeline) sizes.
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
# About how many events a rank has in each phase of a life, and how often the phase is drawn. An event that does not
# come is at the end of the life.
PHASES = {
    "set up": (55, 1),
    "recover": (25, 3),
    "save": (110, 2),
    "commit": (30, 3),
    "copies": (90, 3),
    "drain": (90, 2),
    "files": (14, 1),
    "deletion": (70, 2),
    "peer": (40, 2),
}
# A life takes some seconds. A machine may be busy.
LIFE_S = 60.0
# What waits for a dead rank has its deadline (fast_life.TIMEOUT_S), and at most two of them one after the other.
SURVIVORS_S = 45.0
COLLECTIVE_S = 8.0
# Names of errors that a rank may raise when another has died. Of gloo, there are several.
DEATH_CAUSES = ("CommitError", "AgreementError", "EarlierSaveError", "RuntimeError", "BackendError", "NetworkError")


@dataclass(frozen=True)
class Plan:
    """One life, and who is killed when.

    Attributes:
        victims: "job" (all processes), "processes" (those of one host first), "host" (for good), or "hosts" (two).
        numbers: the hosts that this is about.
        stop_phase, stop_at: the event at which rank `stop_rank` stops and the kill begins. Empty: after `after_s`.
        rest_s: how long the rest of the job lives on, in seconds. None: until it ends by itself.
        order: the hosts, in the order of the job.
    """

    life: int
    victims: str
    numbers: tuple[int, ...]
    stop_rank: int
    stop_phase: str
    stop_at: int
    after_s: float | None
    rest_s: float | None
    order: tuple[int, ...]
    ranks_per_host: int
    layout: dict[str, int]
    fast: dict[str, int | None]

    @property
    def loses_hosts(self) -> bool:
        return self.victims in ("host", "hosts")

    def __str__(self) -> str:
        names = ", ".join(map(str, self.numbers))
        who = {"job": "all processes", "processes": f"processes of host {names}"}.get(self.victims, f"host {names}")
        when = f"at {self.stop_phase} {self.stop_at}" if self.after_s is None else f"after {self.after_s:.2f} s"
        job = f"{HOSTS * self.ranks_per_host} ranks tp{self.layout['tp']} pp{self.layout['pp']}"
        rest = "" if self.rest_s is not None else ", the rest lives on"
        return f"{who} {when}{rest}; {job} replicas {self.fast['replicas']}"


@dataclass
class Claim:
    """A step that a rank was told is safe. `lost`: how many hosts were lost since."""

    life: int
    step: int
    kind: str
    replicas: int
    lost: int = 0

    @property
    def holds(self) -> bool:
        return {"committed": self.lost == 0, "copied": self.lost <= self.replicas, "durable": True}[self.kind]


@dataclass
class Outcome:
    """What has become of a life."""

    plan: Plan
    problems: list[str] = field(default_factory=list)
    loaded: int | None = None
    wanted: int = 0
    told: Counter[str] = field(default_factory=Counter)
    killed_in: str = ""
    seconds: float = 0.0


class Oracle:
    """Knows what ranks were told, and so what must be recovered."""

    def __init__(self) -> None:
        self._claims: list[Claim] = []
        self._states: dict[int, dict[int, str]] = {}

    @property
    def wanted(self) -> int:
        """The step that must be there; 0 if there may be none."""
        return max((claim.step for claim in self._claims if claim.holds), default=0)

    def note_loaded(self, step: int, states: set[str]) -> list[str]:
        """Returns what is wrong with a step that a life has recovered, and the digests of its state on all ranks."""
        problems = []
        if step < self.wanted:
            lost = next(claim for claim in self._claims if claim.step == self.wanted and claim.holds)
            problems.append(f"lost: step {self.wanted} was {lost.kind} in life {lost.life}, step {step} was recovered")
        if step:
            saved = self._states.get(step, {})
            sure = max((c.life for c in self._claims if c.step == step and c.holds), default=-1)
            allowed = {state for life, state in saved.items() if life >= sure}
            if not states <= allowed:
                problems.append(f"torn: the state of step {step} is not the one that was saved (lives {sorted(saved)})")
        # Later steps are of a training that was given up.
        self._claims = [claim for claim in self._claims if claim.step <= step]
        return problems

    def note_saved(self, life: int, step: int, state: str) -> None:
        self._states.setdefault(step, {})[life] = state

    def note_told(self, claim: Claim) -> None:
        if claim.kind == "copied":  # an older step may be deleted then, also one that has more copies
            self._claims = [each for each in self._claims if each.kind != "copied" or each.step >= claim.step]
        self._claims.append(claim)

    def note_lost_host(self) -> None:
        for claim in self._claims:
            claim.lost += 1


class Chain:
    """Four hosts, and the lives of a training on them."""

    def __init__(self, seed: str, folder: Path, server: JobServer) -> None:
        self._random = random.Random(seed)
        self._folder = folder
        self._shared = folder / "shared"
        self._ledger = self._shared / "ledger"
        self._ledger.mkdir(parents=True)
        self._server = server
        self._oracle = Oracle()
        self._lives = 0

    def run(self, kills: int) -> Iterator[Outcome]:
        """Yields what becomes of each life. The last one is not killed."""
        with Hosts(HOSTS, self._folder, shared=self._shared) as hosts:
            for _ in range(kills):
                yield self._live(hosts, self._plan())
            last = self._live(hosts, self._last_plan())
            hidden = [path for host in hosts for path in host.files.rglob(".*")] + [*self._shared.rglob("root/*/.*")]
            left = [path for path in hidden if not path.name.startswith((RUN_FILE, ".run-"))]
            if left:
                last.problems.append(f"left behind: {[str(path) for path in left]}")
            yield last

    def _plan(self) -> Plan:
        draw = self._random
        self._lives += 1
        ranks_per_host = draw.choice((1, 1, 2))
        tp, pp = draw.choice(LAYOUTS)
        replicas = draw.choice((1, 1, 1, 2))
        victims = draw.choice(("job", "processes", "host", "host" if replicas == 1 else "hosts"))
        order = tuple(draw.sample(range(HOSTS), HOSTS))
        phase = draw.choices(list(PHASES), [weight for _, weight in PHASES.values()])[0]
        at_event = draw.random() < 0.75
        return Plan(
            life=self._lives,
            victims=victims,
            numbers=tuple(draw.sample(range(HOSTS), 2 if victims == "hosts" else 1)),
            # The lead of a host, of which there is most to see.
            stop_rank=draw.randrange(HOSTS) * ranks_per_host,
            stop_phase=phase if at_event else "time",
            # Half of them in the first tenth: at the beginning there are more things that happen once.
            stop_at=1 + int(PHASES[phase][0] * draw.random() ** 3) if at_event else 0,
            after_s=None if at_event else draw.uniform(0, 2),
            rest_s=None if victims == "processes" and draw.random() < 0.4 else draw.choice((0, 0, 0.1, 0.5)),
            order=order,
            ranks_per_host=ranks_per_host,
            layout={"tp": tp, "pp": pp},
            fast={
                "replicas": replicas,
                "keep": draw.choice((1, 2)),
                "durable_every": draw.choice((2, 3)),
                "bytes_per_s": draw.choice((None, None, 2_000_000)),
            },
        )

    def _last_plan(self) -> Plan:
        self._lives += 1
        fast = {"replicas": 1, "keep": 2, "durable_every": 2}
        return Plan(self._lives, "nobody", (), 0, "", 0, None, None, (0, 1, 2, 3), 1, {"tp": 2, "pp": 2}, fast)

    def _live(self, hosts: Hosts, plan: Plan) -> Outcome:
        outcome = Outcome(plan, wanted=self._oracle.wanted)
        started = time.monotonic()
        places = [hosts[number] for number in plan.order]
        arguments = asdict(plan) | {
            "folder": str(hosts.folder),
            "root": str(self._shared / "root"),
            "ledger": str(self._ledger),
            "steps": STEPS,
            "wanted": outcome.wanted,
        }
        job = self._server.start(places, plan.ranks_per_host, LIFE, arguments, timeout_s=COLLECTIVE_S)
        if plan.victims == "nobody":
            self._wait(job, outcome, LIFE_S)
            outcome.problems += self._failures(plan.life)
        else:
            self._wait_for_moment(plan, outcome)
            outcome.problems += self._failures(plan.life)
            self._kill(hosts, places, plan, job, outcome)
        self._judge(plan, outcome)
        if plan.loses_hosts:
            for number in plan.numbers:
                self._oracle.note_lost_host()
                hosts.replace(number)
        outcome.seconds = time.monotonic() - started
        if outcome.problems:
            outcome.problems.append(f"the log of the life:\n{job.log[-20_000:]}")
        return outcome

    def _wait_for_moment(self, plan: Plan, outcome: Outcome) -> None:
        started = time.monotonic()
        ready_at = None
        while True:
            now = time.monotonic()
            notes = self._notes(plan.life)
            if ready_at is None and any(note[0] == "ready" for _, note in notes):
                ready_at = now
            if plan.after_s is not None and ready_at is not None and now - ready_at >= plan.after_s:
                return
            if any(note[0] == "stopped" for _, note in notes):
                return
            if any(note[0] == "raised" for _, note in notes):
                return
            if now - started > LIFE_S:
                outcome.problems.append(f"hung: neither the moment nor an end has come after {LIFE_S} s")
                return
            time.sleep(0.003)

    def _kill(self, hosts: Hosts, places: list[Host], plan: Plan, job: Job, outcome: Outcome) -> None:
        victims = [hosts[number] for number in plan.numbers]
        outcome.killed_in = self._last_words(plan.life)
        for victim in victims:
            if plan.loses_hosts:
                victim.lose()
            elif plan.victims == "processes":
                victim.kill_processes()
        rest = [host for host in places if plan.victims == "job" or host not in victims]
        stopped = hosts[plan.order[plan.stop_rank // plan.ranks_per_host]]
        if plan.rest_s is None:
            # Also the host of the rank that has stopped, for nothing lives on there.
            stopped.kill_processes()
            if places[0] in (*victims, stopped):  # it had the key-value store of the job
                self._end(rest)
            self._wait(job, outcome, SURVIVORS_S)
        else:
            time.sleep(plan.rest_s)
        self._end(rest)
        if plan.rest_s is not None:
            self._wait(job, outcome, LIFE_S)

    @staticmethod
    def _end(hosts: list[Host]) -> None:
        for host in hosts:
            host.kill_processes()

    @staticmethod
    def _wait(job: Job, outcome: Outcome, seconds: float) -> None:
        try:
            job.wait(seconds)
        except AssertionError:
            outcome.problems.append(f"hung: ranks run on after {seconds} s")

    def _judge(self, plan: Plan, outcome: Outcome) -> None:
        notes = self._notes(plan.life)
        loaded = {(note[1], note[2]) for _, note in notes if note[0] == "loaded"}
        steps = {step for step, _ in loaded}
        if len(steps) > 1:
            outcome.problems.append(f"torn: ranks have recovered different steps: {sorted(steps)}")
        if steps:
            outcome.loaded = steps.pop()
            states = {state for _, state in loaded}
            outcome.problems += self._oracle.note_loaded(outcome.loaded, states)
        for _, note in notes:
            if note[0] == "saving":
                self._oracle.note_saved(plan.life, note[1], note[2])
            elif note[0] in ("committed", "copied", "durable"):
                outcome.told[note[0]] += 1
                self._oracle.note_told(Claim(plan.life, note[1], note[0], plan.fast["replicas"]))
            elif note[0] == "raised" and not note[2].endswith(DEATH_CAUSES):
                outcome.problems.append(f"raised in {note[1]}: {note[2]}: {note[3]}")
        if plan.victims == "nobody" and not any(note[0] == "over" for _, note in notes):
            outcome.problems.append("the last life did not end well")

    def _failures(self, life: int) -> Iterator[str]:
        """What has failed on ranks before anybody was killed."""
        for rank, note in self._notes(life):
            skipped = note[0] == "not copied" and note[2].startswith("a newer step")
            if note[0] in ("raised", "failed", "not copied", "not durable") and not skipped:
                yield f"rank {rank} before the kill: {note}"

    def _last_words(self, life: int) -> str:
        """The last thing that rank 0 has noted."""
        notes = [note for rank, note in self._notes(life) if rank == 0 and note[0] not in ("events", "stopped")]
        return " ".join(map(str, notes[-1][:2])) if notes else "start"

    def _notes(self, life: int) -> list[tuple[int, list[Any]]]:
        found = []
        for path in sorted(self._ledger.glob(f"{life}.*")):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # the rest is being written, or its rank was killed
                    found.append((int(path.suffix[1:]), json.loads(line)))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="where the log goes, too")
    arguments = parser.parse_args()
    server = JobServer()
    try:
        with tempfile.TemporaryDirectory(prefix="fast-chaos-") as folder:
            return report(Chain(str(arguments.seed), Path(folder), server).run(arguments.kills), arguments)
    except pytest.skip.Exception as reason:
        say(str(reason))
        return 77
    finally:
        server.close()


def report(outcomes: Iterator[Outcome], arguments: argparse.Namespace) -> int:
    kinds, phases, problems = Counter[str](), Counter[str](), 0
    lines = [f"seed {arguments.seed}, lives of {HOSTS} hosts"]
    say(lines[0])
    for outcome in outcomes:
        problems += len(outcome.problems)
        if outcome.plan.victims != "nobody":
            kinds[outcome.plan.victims] += 1
            phases[outcome.plan.stop_phase] += 1
        lines.append(line_of(outcome))
        say(lines[-1])
    lines.append(f"{kinds.total()} kills ({_counts(kinds)}; {_counts(phases)}), {problems} problems")
    say(lines[-1])
    if arguments.log is not None:
        arguments.log.write_text("\n".join(lines) + "\n")
    return 0 if not problems else 1


def line_of(outcome: Outcome) -> str:
    plan = outcome.plan
    who = "nobody" if plan.victims == "nobody" else str(plan)
    told = _counts(outcome.told) or "nothing"
    what = f"{plan.life:3} {who} -> recovered {outcome.loaded} (at least {outcome.wanted}), {outcome.killed_in}, {told}"
    return "\n    ".join([f"{what}, {outcome.seconds:.1f} s", *outcome.problems])


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))


if __name__ == "__main__":
    sys.exit(main())
