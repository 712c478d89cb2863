"""Trains, saves, fails, dies and comes back for an hour, and looks whether anything grows.

    scripts/soak.sh --minutes 60 --seed 1 [--log FILE] [--result FILE] [--leak KIND...]

One training after the other, under changing layouts, loads what the one before it has left, bit for bit, or the run
fails. Long lives, of minutes, alternate with short ones. torch and megatron are imported once; every rank of every life
is a fork. Exit status 1 if anything was lost, torn, hung, raised where it must not, or was not flat.

One seed draws the layout (DP, TP, EP, TP with EP, PP, virtual stages, one rank); sync and async saves, exchanges and
two renames; one root or two in one life: one with two roles and, in some lives, a HuggingFace model and `keep_every`,
one with a remote store, from which it comes back after its disk was lost; new steps, existing steps saved again, saves
on the heels of others, rollbacks in the middle of a life, pins, and `mcore-ckpt list`, `verify` and `prune`; faults
that come and go (`ENOSPC`, `EIO`, `EMFILE`, `EINTR`, short writes, no `O_DIRECT`, on one rank or both, and a disk with
2 ms per call); who dies, and when: no one, one rank or all, by SIGKILL. What is loaded is compared by digests that were
noted before the save: each rank's state under the same layout, all tensors under another one. A curve is judged in a
life of at least 96 samples: the least of its last quarter may be no more than the least of the second one and a
tolerance.
"""

import argparse
import contextlib
import datetime
import io
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.main import main as command_line
from mcore_ckpt.io import tuning
from mcore_ckpt.steps import listing as steps
from tests.faults.soak.arithmetic import compile_nothing
from tests.faults.soak.flatness import judge
from tests.faults.soak.interning import settle_interned_strings
from tests.faults.soak.soaked_life import (
    ALARM_S,
    LAYOUTS,
    LEAKS,
    PAIR,
    ROOTS,
    SINGLE,
    TIMEOUT_S,
    SoakedLife,
    ledger,
    root_of,
    run_rank,
)
from tests.faults.soak.usage import Usage
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

# A rank that waits for a dead one has its deadline, and one more if rank 0 died while it acted; the rest is for a busy
# machine.
SURVIVORS_S = 2 * TIMEOUT_S + 30
COMMANDS_EVERY_S = 12.0
NOBODY: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """`kill_s`: when the victims die, from the start. None: the life ends by itself."""

    life: SoakedLife
    victims: tuple[int, ...] = NOBODY
    kill_s: float | None = None
    loses_disk: bool = False

    def __str__(self) -> str:
        life = self.life
        ways = [
            life.layout,
            "+".join(life.roots),
            ("sync", "async")[life.background],
            *(["two renames"] * (not life.exchanges)),
            *(["hf_model"] * life.hf_model),
            *([f"keep_every {life.keep_every}"] * (life.keep_every is not None)),
            *(["from the remote store"] * self.loses_disk),
        ]
        who = (
            f"ranks {list(self.victims)} die at {self.kill_s:.0f} s"
            if self.victims
            else f"closes at {life.seconds:.0f} s"
        )
        return f"{', '.join(ways)}; {who}"


@dataclass
class Outcome:
    plan: Plan
    started: float
    seconds: float
    ends: list[int]
    reports: dict[int, dict[str, Any]]
    problems: list[str] = field(default_factory=list)

    @property
    def killed(self) -> int:
        return self.ends.count(-signal.SIGKILL)


class Soak:
    def __init__(self, seed: str, folder: Path, minutes: float, leaks: tuple[str, ...] = ()) -> None:
        self._seed = seed
        self._draw = random.Random(seed)
        self._folder = folder
        self._seconds = 60 * minutes
        self._leaks = leaks
        self._begun = time.monotonic()
        self._lives = 0
        self._closed: set[str] = set()
        root_of(folder, "").mkdir(parents=True)

    def run(self) -> Iterator[Outcome]:
        """The last life is not killed, and nothing is left behind.

        It is long enough to remove what others have left in the remote store, which have no process there to ask for.
        """
        while self._left() > 0:
            yield self._live(self._plan())
        life = self._life(roots=(PAIR, SINGLE), seconds=tuning.ABANDONED_S + 5.0)
        last = self._live(Plan(life))
        stays = (file_names.PINNED_FILE, file_names.RUN_FILE)
        left = [str(path) for path in root_of(self._folder, "").rglob(".*") if path.name not in stays]
        if left:
            last.problems.append(f"left behind: {left}")
        yield last

    def _left(self) -> float:
        return self._seconds - (time.monotonic() - self._begun)

    def _life(self, **changes: Any) -> SoakedLife:
        return SoakedLife(self._lives, self._seed, str(self._folder), 0, leaks=self._leaks, **changes)

    def _plan(self) -> Plan:
        draw = self._draw
        is_long = self._lives % 4 == 0
        seconds = draw.uniform(0.06, 0.1) * max(self._seconds, 2400) if is_long else draw.uniform(4, 25)
        seconds = min(seconds, max(5.0, self._left()))
        roots = draw.choice([(PAIR,), (SINGLE,), (PAIR, SINGLE), (SINGLE, PAIR)])
        life = self._life(
            seconds=seconds,
            layout=draw.choice(sorted(LAYOUTS)),
            roots=roots,
            every_s=draw.uniform(0.4, 1.0),
            background=draw.random() < 0.5,
            exchanges=draw.random() < 0.75,
            hf_model=draw.random() < 0.4,
            max_to_keep=draw.choice([2, 3]),
            keep_every=draw.choice([None, None, 10]),
        )
        loses = draw.random() < 0.5 and life.roots[0] == SINGLE and SINGLE in self._closed
        victims = draw.choice([NOBODY, (0,), (1,), (0, 1)] if life.world == 2 else [NOBODY, (0,)])
        if not victims:
            return Plan(life, loses_disk=loses)
        return Plan(replace(life, seconds=1e9), victims, kill_s=seconds, loses_disk=loses)

    def _live(self, plan: Plan) -> Outcome:
        self._lives += 1
        if plan.loses_disk:
            shutil.rmtree(root_of(self._folder, SINGLE))
        store, port = host_store()
        life = replace(plan.life, port=port)
        companion = self._accompany(life)
        pids, read = fork_ranks(life.world, lambda rank, ready: run_rank(life, rank, ready))
        started = wait_until_ready(read, life.world, ALARM_S)
        kill_at = None if plan.kill_s is None else started + plan.kill_s
        ends, stuck = bury(pids, plan.victims, kill_at, SURVIVORS_S)
        os.close(read)
        end_store(store)
        outcome = Outcome(plan, started - self._begun, time.monotonic() - started, ends, _reports(life))
        outcome.problems += self._dismiss(companion, life)
        if stuck:
            outcome.problems.append(f"ranks {stuck} have hung")
        self._check_survivors(outcome)
        self._check_disk(outcome)
        self._closed = set(life.roots) if not outcome.killed and not outcome.problems else set()
        return outcome

    def _check_survivors(self, outcome: Outcome) -> None:
        for rank, report in outcome.reports.items():
            outcome.problems += [f"rank {rank} has logged: {text}" for text in report["logged"]]
            if report["error"] is not None and not (outcome.killed and is_what_a_death_causes(report)):
                outcome.problems.append(f"rank {rank} has raised in {report['in']}: {report['error']}")
        missing = set(range(len(outcome.ends))) - outcome.reports.keys()
        if len(missing) > outcome.killed:
            outcome.problems.append(f"ranks {sorted(missing)} have said nothing: {outcome.ends}")

    def _check_disk(self, outcome: Outcome) -> None:
        life = outcome.plan.life
        for name, roles in ROOTS.items():
            with swept(root_of(self._folder, name), roles, life.exchanges) as root:
                # A step of several roles is complete when the last is committed, but each counts as soon as it is.
                there = steps.list_steps(root)
                for status in there:
                    for role in status.committed:
                        outcome.problems += [f"torn: {text}" for text in damage(status.role_dir(role))]
                for role in roles:
                    last, later = self._acknowledged(f"{name}/{role}")
                    found = {status.step for status in there if role in status.committed}
                    if last and not found & (last | later) and not self._may_lose(name, outcome):
                        lost = f"{name}/{role} had step {min(last)}, now there are {sorted(found)}"
                        outcome.problems.append(f"lost: {lost}")

    def _may_lose(self, name: str, outcome: Outcome) -> bool:
        """Without its disk a root begins again with what the remote store has."""
        return outcome.plan.loses_disk and name == SINGLE and outcome.killed

    def _acknowledged(self, seat: str) -> tuple[set[int], set[int]]:
        """The step that a rank was told of last that it is committed, and those of saves after it.

        Not the highest: a life that loads an older step, or from another root, saves lower ones, and from then on the
        higher ones are of a branch that retention may delete.
        """
        told = [each for rank in (0, 1) for each in notes(ledger(self._folder, rank)) if each[1] == seat]
        last = max((_turn(each[3]) for each in told if each[0] == "committed"), default=(-1, -1))
        return (
            {each[2] for each in told if each[0] == "committed" and _turn(each[3]) == last},
            {each[2] for each in told if each[0] == "saving" and _turn(each[3]) > last},
        )

    # -- commands beside the training --------------------------------------------------------------------------------

    def _accompany(self, life: SoakedLife) -> int:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                self._run_commands(life)
            finally:
                os._exit(1)
        return pid

    def _run_commands(self, life: SoakedLife) -> None:
        draw = random.Random(f"{life.seed} {life.number} commands")
        with self._command_log(life).open("a", buffering=1) as log:
            while True:
                time.sleep(COMMANDS_EVERY_S)
                root = str(root_of(life.folder, draw.choice(life.roots)))
                command = draw.choice(
                    [
                        ["list", root],
                        ["list", "--json", root],
                        ["verify", root],
                        ["prune", "--dry-run", "--max-to-keep", "3", root],
                        ["prune", "--max-to-keep", "3", root],
                    ]
                )
                log.write(json.dumps([command, *_run_command(command)]) + "\n")

    def _command_log(self, life: SoakedLife) -> Path:
        return Path(life.folder, f"life{life.number}.commands")

    def _dismiss(self, companion: int, life: SoakedLife) -> list[str]:
        """What was wrong with the commands."""
        os.kill(companion, signal.SIGTERM)
        os.waitpid(companion, 0)
        log = self._command_log(life)
        found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [f"{' '.join(command)}: status {status}: {text}" for command, status, text in found if status]


def _turn(number: str) -> tuple[int, int]:
    """When a save was asked for, from its number: the life, and the count in it."""
    life, save = number.split(".")
    return int(life), int(save)


def _run_command(command: list[str]) -> tuple[int, str]:
    """Its exit status and what it has said, in a process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        status = 99
        try:
            status = command_line(command) or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    os.close(write)
    with os.fdopen(read) as lines:
        text = lines.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text[-2000:]


def _reports(life: SoakedLife) -> dict[int, dict[str, Any]]:
    found = {rank: life.report(rank) for rank in range(life.world)}
    return {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}


def record_of(outcome: Outcome) -> dict[str, Any]:
    """What the result keeps of a life. Its samples are [seconds, saves, *Usage] for each rank."""
    life = outcome.plan.life
    counts: Counter[str] = Counter()
    for what, number, *did in notes(ledger(life.folder, 0)):
        if (what, number) == ("did", life.number):
            counts[did[0]] += did[1]
    samples = [notes(life.samples(rank)) for rank in range(life.world)]
    verdicts = {rank: judge([Usage(*each[2:]) for each in of]) for rank, of in enumerate(samples)}
    return {
        "life": life.number,
        "plan": str(outcome.plan),
        "started": round(outcome.started, 1),
        "seconds": round(outcome.seconds, 1),
        "killed": outcome.killed,
        "saves": max((each[1] for of in samples for each in of), default=0),
        "counts": counts,
        "problems": outcome.problems
        + [f"rank {rank}: {verdict}" for rank, of in verdicts.items() for verdict in of if not verdict.is_flat],
        "verdicts": {rank: [[v.kind, v.before, v.after, v.tolerance] for v in of] for rank, of in verdicts.items()},
        "samples": samples,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="where the log goes, too")
    parser.add_argument("--result", type=Path, help="where samples and verdicts go, as JSON")
    parser.add_argument("--leak", nargs="*", choices=LEAKS, default=[], help="leak at each save, to be found")
    arguments = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    compile_nothing()
    settle_interned_strings()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, _log(arguments.log) as tell:
        soak = Soak(str(arguments.seed), Path(folder, "soak"), arguments.minutes, tuple(arguments.leak))
        tell(f"seed {arguments.seed}, {arguments.minutes:g} minutes")
        result: dict[str, Any] = {**facts(arguments), "lives": []}
        for outcome in soak.run():
            result["lives"].append(record_of(outcome))
            tell(line_of(result["lives"][-1]))
            if arguments.result is not None:
                arguments.result.write_text(json.dumps(result))
        tell(summary(result))
    return 1 if any(life["problems"] for life in result["lives"]) else 0


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "seed": arguments.seed,
        "minutes": arguments.minutes,
    }


def line_of(life: dict[str, Any]) -> str:
    judged = sum(map(len, life["verdicts"].values()))
    what = f"{life['started'] / 60:5.1f} min, life {life['life']}: {life['plan']}: {life['saves']} saves"
    flat = f"; {judged} curves judged" if judged else ""
    return "\n    ".join([what + flat, *map(str, life["problems"])])


def summary(result: dict[str, Any]) -> str:
    lives = result["lives"]
    counts: Counter[str] = sum((Counter(life["counts"]) for life in lives), Counter())
    counts["saves"] = sum(life["saves"] for life in lives)
    counts["lives"] = len(lives)
    counts["ranks killed"] = sum(life["killed"] for life in lives)
    counts["curves judged"] = sum(len(of) for life in lives for of in life["verdicts"].values())
    told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return f"{told}; {sum(len(life['problems']) for life in lives)} problems"


@contextlib.contextmanager
def _log(path: Path | None) -> Iterator[Any]:
    with path.open("w", buffering=1) if path is not None else io.StringIO() as file:

        def tell(line: str) -> None:
            say(line)
            file.write(line + "\n")

        yield tell


if __name__ == "__main__":
    sys.exit(main())
