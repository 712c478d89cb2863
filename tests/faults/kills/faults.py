"""Disturbs trainings at random moments without killing them, and looks at what they do and at what is left.

    scripts/fault_chaos.sh --faults 100 --seed 1 [--chains 3] [--log FILE]

A rank is stopped and continued, the disk is frozen and thawed, connections are slow or cut, another user interferes.
Each chain has a file system and a network of its own, so this needs root's rights. Exit status 1 if anything was lost,
torn, or hung beyond the deadlines of docs/reliability.md; 77 if this cannot be done here.

A fault lasts up to two and a half times the trainings' `timeout_s` of 4 s. The disk is frozen by `FIFREEZE` on ext4,
connections are slowed to 200 kbit/s, and the other user tries to rename, delete, make, write, link, list and chmod in
the root. A call that has failed on one rank is made again on all. No call may take longer than `timeout_s` and 3 s (a
rank that is itself stopped, as much longer; without a network, twice the fault and 5 s longer, because the client of
torch's store has no deadline).
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.steps import listing as steps
from tests.faults.kills.chaos import Chain, Outcome, Plan, reports_of, run_chains
from tests.faults.kills.disturbed_life import TIMEOUT_S, DisturbedLife, run_rank
from tests.faults.kills.life import ALARM_S, WORLD
from tests.support.lives import bury, end_store, fork_ranks, host_store, say, wait_until_ready
from tests.support.small_disks import NOBODY, ext4, frozen

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000  # linux/sched.h
IMPOSSIBLE = 77
LONGEST_S = 2.5 * TIMEOUT_S
# A rank waits for its own part or for the others, and these 1.5 s longer; what is beyond is for a busy machine.
MOST_S = TIMEOUT_S + 3.0


@dataclass(frozen=True)
class Fault:
    """What is done to a life, how long after its begin, and for how long."""

    kind: str
    after_s: float
    lasts_s: float
    rank: int = 0

    def __str__(self) -> str:
        who = f" rank {self.rank}" if self.kind == "stop" else ""
        return f"{self.kind}{who} after {self.after_s:.2f} s for {self.lasts_s:.2f} s"

    def may_take_s(self, rank: int) -> float:
        """How long a call of a rank may take."""
        if self.kind == "stop" and self.rank == rank:
            return MOST_S + self.lasts_s
        # The client of torch's store has no deadline of its own, and TCP tries again ever more rarely.
        return MOST_S + (2 * self.lasts_s + 5 if self.kind in ("cut", "slow") else 0)


class Disturbed(Chain):
    """One folder of checkpoints, and the lives of the training that writes it."""

    def run(self, faults: int) -> Iterator[dict[str, Any]]:
        """The log's records: the first life is not disturbed."""
        whole = self._disturb(Fault("nothing", 0.0, 0.0))
        self._length_s = whole.seconds
        yield self._told(whole, Fault("nothing", 0.0, 0.0))
        for _ in range(faults):
            kind = self._random.choice(sorted(KINDS))
            after, lasts = self._random.uniform(0, self._length_s), self._random.uniform(0.2, LONGEST_S)
            fault = Fault(kind, after, lasts, self._random.randrange(WORLD))
            yield self._told(self._disturb(fault), fault)

    def _disturb(self, fault: Fault) -> Outcome:
        life = DisturbedLife(self._lives, str(self._folder), self._port, background=self._random.random() < 0.5)
        self._lives += 1
        acknowledged = self._acknowledged()
        before = {status.step for status in steps.complete_steps(life.root)}
        pids, read = fork_ranks(WORLD, lambda rank, ready: run_rank(life, rank, ready))
        started = wait_until_ready(read, WORLD, ALARM_S)
        by_rank = {rank: pid for pid, rank in pids.items()}
        problems: list[str] = []
        disturbing = threading.Thread(target=_disturb, args=(fault, life, by_rank, problems))
        disturbing.start()
        ends, _ = bury(pids, (), None, 0)
        disturbing.join()
        os.close(read)
        outcome = Outcome(ends, reports_of(life), problems, seconds=time.monotonic() - started)
        outcome.problems += [f"rank {rank} has ended with {end}" for rank, end in enumerate(ends) if end]
        for rank, report in outcome.reports.items():
            if report["error"] and not report["is_gloo"]:
                outcome.problems.append(f"rank {rank} has raised in {report['in']}: {report['error']}")
            slow = [call for call in report["calls"] if call[1] > fault.may_take_s(rank)]
            outcome.problems += [f"hung: rank {rank} was in {name} for {s:.1f} s: {error}" for name, s, error in slow]
        self._check_disk(Plan(life, ()), outcome, before, acknowledged)
        self._check_ledgers(outcome)
        return outcome

    def _told(self, outcome: Outcome, fault: Fault) -> dict[str, Any]:
        calls = [call for report in outcome.reports.values() for call in report["calls"]]
        errors = Counter(error.partition(":")[0] for _, _, error in calls if error)
        longest = max((seconds for _, seconds, _ in calls), default=0.0)
        return {
            "chain": self._folder.name,
            "kind": fault.kind,
            "fault": str(fault),
            "errors": dict(errors),
            "longest": longest,
            "newest": outcome.newest,
            "problems": outcome.problems,
        }


def _disturb(fault: Fault, life: DisturbedLife, pids: dict[int, int], problems: list[str]) -> None:
    try:
        if fault.kind in KINDS:
            time.sleep(fault.after_s)
            KINDS[fault.kind](fault, life, pids)
    except Exception as error:
        problems.append(f"{fault}: {type(error).__name__}: {error}")
    finally:
        life.is_over.touch()


def _stop(fault: Fault, life: DisturbedLife, pids: dict[int, int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # the life is over already
        os.kill(pids[fault.rank], signal.SIGSTOP)
        time.sleep(fault.lasts_s)
        os.kill(pids[fault.rank], signal.SIGCONT)


def _freeze(fault: Fault, life: DisturbedLife, pids: dict[int, int]) -> None:
    with frozen(life.disk):
        time.sleep(fault.lasts_s)


def _network(begin: str, end: str) -> Callable[[Fault, DisturbedLife, dict[int, int]], None]:
    def disturb(fault: Fault, life: DisturbedLife, pids: dict[int, int]) -> None:
        subprocess.run(begin.split(), check=True)
        time.sleep(fault.lasts_s)
        subprocess.run(end.split(), check=True)

    return disturb


def _interfere(fault: Fault, life: DisturbedLife, pids: dict[int, int]) -> None:
    """Another user tries to change whatever there is. Raises RuntimeError if that succeeds once."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            status = _changes_something(life.root, pids, time.monotonic() + fault.lasts_s)
        finally:
            os._exit(status)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError("another user has changed something")


def _changes_something(root: Path, pids: dict[int, int], until: float) -> bool:
    names = [root, *(root / name for name in ("actor", "global_steps_1", "global_steps_1/actor", ".lock", "x/y"))]
    tries: list[Callable[[Path], Any]] = [
        lambda path: path.rename(root.parent / "taken"),
        lambda path: path.unlink(),
        lambda path: path.mkdir(parents=True),
        lambda path: path.write_bytes(b"x"),
        lambda path: path.symlink_to("/tmp"),
        lambda path: path.chmod(0o777),
        lambda path: list(path.iterdir()),
        *(lambda path, pid=pid: os.kill(pid, signal.SIGSTOP) for pid in pids.values()),
    ]
    while time.monotonic() < until:
        for path in names:
            for attempt in tries:
                with contextlib.suppress(OSError):
                    attempt(path)
                    return True
        time.sleep(0.01)
    return False


KINDS = {
    "stop": _stop,
    "freeze": _freeze,
    "slow": _network("tc qdisc add dev lo root tbf rate 200kbit burst 2kb latency 1s", "tc qdisc del dev lo root"),
    "cut": _network("ip link set lo down", "ip link set lo up"),
    "interfere": _interfere,
}


def run_chain(seed: str, folder: Path, faults: int, write: int) -> None:
    """A chain in namespaces of its own, on a file system of its own."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS | _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no namespaces of mounts and networks can be made")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    pid, port = host_store()
    try:
        chain = Disturbed(seed, folder, port)
        with ext4(DisturbedLife(0, str(folder), port).disk, mebibytes=256) as disk:
            disk.chmod(0o1777)  # as /tmp is
            for record in chain.run(faults):
                os.write(write, (json.dumps(record) + "\n").encode())
    finally:
        end_store(pid)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chains", type=int, default=3, help="trainings at the same time; a part of the seed")
    parser.add_argument("--log", type=Path, help="where the log goes, too")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        say("disks and networks of its own need root's rights")
        return IMPOSSIBLE
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        os.chmod(folder, 0o755)
        records = run_chains(run_chain, arguments.seed, arguments.chains, arguments.faults, Path(folder))
        return report(records, arguments)


def report(records: Iterator[dict[str, Any]], arguments: argparse.Namespace) -> int:
    kinds, problems, lines = Counter[str](), 0, [f"seed {arguments.seed}, {arguments.chains} chains"]
    for record in records:
        problems += len(record["problems"])
        if record["kind"] in KINDS:
            kinds[record["kind"]] += 1
        lines.append(line_of(record, kinds.total()))
        say(lines[-1])
    by_kind = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    lines.append(f"{kinds.total()} faults ({by_kind}), {problems} problems")
    say(lines[-1])
    if arguments.log is not None:
        arguments.log.write_text("\n".join(lines) + "\n")
    return 0 if kinds.total() == arguments.faults and not problems else 1


def line_of(record: dict[str, Any], number: int) -> str:
    if record["kind"] == "broken":
        return record["problems"][0]
    errors = ", ".join(f"{count} {name}" for name, count in record["errors"].items()) or "nothing raised"
    what = f"{number:3} chain {record['chain']}: {record['fault']} -> {errors}; longest call {record['longest']:.1f} s"
    return "\n    ".join([f"{what}; newest {record['newest']}", *map(str, record["problems"])])


if __name__ == "__main__":
    sys.exit(main())
