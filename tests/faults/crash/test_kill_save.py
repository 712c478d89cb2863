"""SIGKILL of one rank at any point of a save: all or nothing, the same on all other ranks, nothing left behind.

The ranks are real processes with a real TCPStore (crash_worker.py). Each scenario has three saves after a committed
step: a new step, the same step once more, and a third with retention. One file of each is written by all ranks, and
each has three parts: of one rank, of each rank, and a folder that is handed over.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.steps import complete_steps, leftovers, tracker
from tests.support import crash_worker
from tests.support.checkpoints import ROLE, checkpoints, remains
from tests.support.crash_parts import assert_parts, files_below, given_files, given_folder
from tests.support.crash_worker import LOCALHOST, SAVES, TIMEOUT_S, WORLD, Job

# Saves of this many scenarios wait for dead ranks at the same time.
AT_ONCE = 16

FIRST_STEP, FIRST_VERSION = 1, 11

# After as many saves as the index: the version of each step that must be there. Step 1 may go after the last.
AFTER = ({1: 11}, {1: 11, 2: 21}, {1: 11, 2: 22}, {2: 22, 3: 31})

# A rank that waits for a dead one has at most its deadline, and one more if rank 0 died while it acted; the rest is
# for a busy machine.
SURVIVORS_S = 2 * TIMEOUT_S + 6

SEED = 20

ACTS = ("compare_set", "rename", "set")


@dataclass(frozen=True)
class Scenario:
    """Who dies, in which of `points` equal parts of a span of its events, and where the store is.

    Spans: "all"; "writing", from the first native write to the last part that is given to the owner of the shared file,
    or taken, in the save that replaces a step; "parts", all events of writing parts in that save; "given", the removal
    of what was handed over with it; "commit", from rank 0's claim to its word in that save; "renames", before each of
    the two that replace one where nothing can be exchanged, and after; "tracker", before it is replaced for the first
    time.
    """

    victim: int
    part: int
    points: int
    host: str = "test"
    span: str = "all"
    background: bool = False

    def __str__(self) -> str:
        how = "background-" if self.background else ""
        return f"{how}rank{self.victim}-store-of-{self.host}-{self.span}-{self.part + 1}of{self.points}"

    @property
    def exchange(self) -> bool:
        return self.span != "renames"

    @property
    def way(self) -> dict[str, bool]:
        """What decides which events there are."""
        return {"exchange": self.exchange, "background": self.background}


@dataclass(frozen=True)
class Outcome:
    root: Path
    event: str
    ends: list[int]
    reports: dict[int, dict[str, Any]]


def scenarios(points: int, **fields: Any) -> list[Scenario]:
    return [Scenario(part=part, points=points, **fields) for part in range(points)]


SCENARIOS = [
    *scenarios(10, victim=0),
    *scenarios(5, victim=0, host="rank0"),
    *scenarios(5, victim=1),
    *scenarios(2, victim=1, host="rank0"),
    *scenarios(7, victim=0, span="commit"),
    *scenarios(3, victim=0, span="renames"),
    *scenarios(2, victim=0, span="writing"),
    *scenarios(3, victim=1, span="writing"),
    *scenarios(6, victim=0, span="parts"),
    *scenarios(3, victim=1, span="parts"),
    *scenarios(3, victim=0, span="given"),
    *scenarios(2, victim=0, background=True, span="parts"),
    *scenarios(4, victim=0, background=True),
    *scenarios(2, victim=0, background=True, host="rank0"),
    *scenarios(2, victim=1, background=True),
    *scenarios(3, victim=0, background=True, span="commit"),
    *scenarios(2, victim=1, background=True, span="writing"),
]

# Between rename and tracker.
BEFORE_TRACKER = Scenario(victim=0, part=0, points=1, span="tracker")
SCENARIOS.append(BEFORE_TRACKER)

# CI kills in the first part of a span, in every third after it, in the last of three or more, and before and after each
# of the renames. So each span, victim, host of the store and way to save is there.
IN_CI = {
    scenario
    for scenario in SCENARIOS
    if scenario.part % 3 == 0 or scenario.part == scenario.points - 1 >= 2 or scenario.span == "renames"
}

WAYS = ({"exchange": True}, {"exchange": False}, {"background": True})


class Workers:
    """The program that forks ranks, and the jobs it has been given."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port
        self._made = 0
        self._log = (folder / "workers.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, crash_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def close(self) -> None:
        self._process.communicate(timeout=crash_worker.ALARM_S)
        self._log.close()

    def job(self, start: Path | None, host: str = "test", **fields: Any) -> Job:
        """A job in a folder of its own, which begins as a copy of `start`."""
        self._made += 1
        folder = self._folder / str(self._made)
        results = folder / "results"
        results.mkdir(parents=True)
        root = folder / "root"
        if start is not None:
            shutil.copytree(start, root)
        port = self._port if host == "test" else None
        return Job(self._made, str(root), str(results), port, **fields)

    def run(self, jobs: Iterable[Job]) -> None:
        """Runs all, `AT_ONCE` at a time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        under_way = set[int]()
        for job in jobs:
            if len(under_way) == AT_ONCE:
                under_way.remove(int(self._process.stdout.readline()))
            self._process.stdin.write(crash_worker.encode(job))
            self._process.stdin.flush()
            under_way.add(job.number)
        while under_way:
            under_way.remove(int(self._process.stdout.readline()))


def outcome_of(job: Job, event: str = "") -> Outcome:
    reports = {}
    for rank in range(WORLD):
        path = Path(job.results, f"{rank}.json")
        if path.exists():
            reports[rank] = json.loads(path.read_text())
    return Outcome(Path(job.root), event, json.loads(Path(job.results, "ends.json").read_text()), reports)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    running = Workers(tmp_path_factory.mktemp("crash"), store.port)
    yield running
    running.close()


@pytest.fixture(scope="module")
def start(workers: Workers) -> Path:
    """A root with one committed step."""
    job = workers.job(None, saves=((FIRST_STEP, FIRST_VERSION),))
    workers.run([job])
    assert checkpoints(Path(job.root)) == AFTER[0]
    return Path(job.root)


@pytest.fixture(scope="module")
def dry_runs(workers: Workers, start: Path) -> list[tuple[Job, Outcome]]:
    """The saves with nobody killed, in each of WAYS: which events there are."""
    jobs = [workers.job(start, **way) for way in WAYS]
    workers.run(jobs)
    return [(job, outcome_of(job)) for job in jobs]


def events_of(dry_runs: Sequence[tuple[Job, Outcome]], victim: int, exchange: bool, background: bool) -> list[str]:
    (outcome,) = (run for job, run in dry_runs if (job.exchange, job.background) == (exchange, background))
    events: list[str] = outcome.reports[victim]["events"]
    return events


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, workers: Workers, start: Path, dry_runs: list[tuple[Job, Outcome]]
) -> Mapping[Scenario, Outcome]:
    jobs = {}
    full = request.config.getoption("full")
    for scenario in filter(None if full else IN_CI.__contains__, SCENARIOS):
        events = events_of(dry_runs, scenario.victim, **scenario.way)
        at = kill_point(scenario, events)
        count = events[: at + 1].count(events[at])
        job = workers.job(
            start,
            scenario.host,
            victim=scenario.victim,
            kill_at=events[at],
            kill_count=count,
            **scenario.way,
        )
        jobs[scenario] = (job, f"{events[at]}, the {count}. of them, event {at + 1} of {len(events)}")
    workers.run(job for job, _ in jobs.values())
    return {scenario: outcome_of(job, event) for scenario, (job, event) in jobs.items()}


def kill_point(scenario: Scenario, events: list[str]) -> int:
    """The position of the event to die at: any in its part of its span."""
    span = span_of(scenario.span, events)
    first = scenario.part * len(span) // scenario.points
    last = (scenario.part + 1) * len(span) // scenario.points
    return span[random.Random(f"{SEED} {scenario}").randrange(first, last)]


def span_of(name: str, events: list[str]) -> Sequence[int]:
    if name == "all":
        return range(len(events))
    if name in ("parts", "given"):
        return [at for at, event in enumerate(events) if event.startswith(f"1-{name}:")]
    if name == "tracker":
        return [events.index("0:replace")]
    if name == "writing":
        native = [at for at, event in enumerate(events) if event.startswith("1:native_")]
        return range(native[0], native[-1] + 3)
    positions = {label: [at for at, event in enumerate(events) if event == f"1:{label}"] for label in ACTS}
    if name == "commit":
        return range(positions["compare_set"][-1], positions["set"][-1] + 1)
    return [*positions["rename"], positions["rename"][-1] + 1]


def test_saves_that_nobody_disturbs(dry_runs: list[tuple[Job, Outcome]]) -> None:
    for _, outcome in dry_runs:
        assert outcome.ends == [0] * WORLD
        assert [(r["saved"], r["error"]) for r in outcome.reports.values()] == [(len(SAVES), None)] * WORLD
        assert checkpoints(outcome.root) == AFTER[len(SAVES)]
        assert tracker.read_tracker(outcome.root) == 3
        assert remains(outcome.root) == []
        assert_state(outcome.root, len(SAVES), "nobody was killed")
        assert_given(outcome.root.parent, len(SAVES), 1, "nobody was killed")
        assert all(r["events"].count("1:native_wait") == 2 for r in outcome.reports.values()), "nothing is shared"
    # Kill points are numbers of events: there must be enough, of all kinds.
    events = events_of(dry_runs, 0, exchange=True, background=True)
    assert len(events) > 200
    kinds = {event.partition(":")[2] for event in events}
    assert kinds >= {"open", "write", "fsync", "rename", "replace", "mkdir", "stat", "link", "unlink", "rmdir"}
    assert kinds >= {"set", "compare_set", "check", "get", "delete_key"}
    assert kinds >= {"native_start", "native_wait", "native_finish"}
    assert events_of(dry_runs, 0, exchange=False, background=False).count("1:rename") == 2


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(scenario, marks=() if scenario in IN_CI else pytest.mark.full) for scenario in SCENARIOS],
    ids=str,
)
def test_a_rank_is_killed(scenario: Scenario, outcomes: Mapping[Scenario, Outcome], tmp_path: Path) -> None:
    outcome = outcomes[scenario]
    reports = {rank: {**report, "events": len(report["events"])} for rank, report in outcome.reports.items()}
    told = f"{scenario}: killed at {outcome.event}: {reports}"
    expected_ends = [-signal.SIGKILL if rank == scenario.victim else 0 for rank in range(WORLD)]
    assert outcome.ends == expected_ends, told
    saved = saved_by_all(outcome, told)
    # A sweep changes the disk, and a test must find it as the kill has left it.
    root = tmp_path / "root"
    shutil.copytree(outcome.root, root)
    if scenario.exchange:
        assert_state(root, saved, told)
    leftovers.remove_leftovers(root, ROLE, alone=False)
    assert_state(root, saved, told)
    leftovers.remove_leftovers(root, ROLE, alone=True)
    assert_state(root, saved, told)
    assert remains(root) == [], told
    assert_given(outcome.root.parent, saved, scenario.victim, told)


def saved_by_all(outcome: Outcome, told: str) -> int:
    """How many saves the survivors say are committed: they must agree, and on the error after them."""
    said = {(report["saved"], report["error"] and report["error"][0]) for report in outcome.reports.values()}
    assert len(said) == 1, told
    saved, error = said.pop()
    assert error == (None if saved == len(SAVES) else "CommitError"), told
    assert all(report["seconds"] < SURVIVORS_S for report in outcome.reports.values()), told
    return int(saved)


def assert_state(root: Path, saved: int, told: str) -> None:
    """The disk holds, whole, what has been said to be saved and nothing else."""
    found = checkpoints(root)
    wanted = AFTER[saved]
    if saved == len(SAVES) and FIRST_STEP in found:
        # Death may have come before retention.
        wanted = wanted | {FIRST_STEP: FIRST_VERSION}
    assert found == wanted, told
    assert tracker.read_tracker(root) in found, told
    for status in complete_steps(root):
        assert_parts(status.path / ROLE, found[status.step], WORLD)


def assert_given(above: Path, saved: int, victim: int, told: str) -> None:
    """What is handed over stays until its save is committed, and then goes, unless the rank that removes it is dead."""
    for number, (_, version) in enumerate(SAVES):
        left = files_below(given_folder(above, version))
        if number >= saved:
            assert left == given_files(version), told
        elif victim != 0:
            assert left == {}, told


def test_the_tracker_catches_up_at_the_next_save(workers: Workers, outcomes: Mapping[Scenario, Outcome]) -> None:
    """The manifests say what is newest, and the next save repairs the tracker."""
    root = outcomes[BEFORE_TRACKER].root
    assert checkpoints(root) == AFTER[1]
    assert tracker.read_tracker(root) == FIRST_STEP
    again = workers.job(root, saves=((5, 51),))
    leftovers.remove_leftovers(Path(again.root), ROLE, alone=True)
    workers.run([again])
    assert tracker.read_tracker(Path(again.root)) == 5
