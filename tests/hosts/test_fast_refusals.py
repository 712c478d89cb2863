"""What the fast tier refuses, and what it makes of full folders, wrong clocks, other jobs, and bad bytes and hosts.

The cases share a few jobs (fast_bad_input.py), because a job takes longer to start than a case.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_jobs import Job, JobServer
from tests.support.hosts import Host, Hosts

RANKS = Path(__file__).with_name("fast_bad_input.py")
NODE_BYTES = 32 << 20
# What is left of a host's folder when it has been filled. A rank has some 240 KiB in a step.
LEFT_BYTES = 300 << 10
CASES_S = 90.0

Results = list[dict[str, Any]]


@dataclass
class Play:
    """Jobs that do cases on two hosts, and do to the hosts what the cases ask for."""

    hosts: Hosts
    server: JobServer
    shared: Path
    full: bool = False
    logs: list[str] = field(default_factory=list)
    refused: Results = field(default_factory=list)
    _fillings: list[Path] = field(default_factory=list)

    def do(self, *cases: str, on: list[Host] | None = None, dies: bool = False) -> Results:
        """Runs cases in one job, and returns what each rank has found, by case. With `dies`, all ranks die then."""
        folders = {"folder": str(self.hosts.folder), "shared": str(self.shared)}
        arguments = {"cases": cases, "dies": dies, "full": self.full, **folders}
        job = self.server.start(on or list(self.hosts), 1, RANKS, arguments)
        self._serve(job, cases)
        ends = job.wait(CASES_S)
        self.logs.append(job.log)
        assert [end.status for end in ends] == [-9 if dies else 0] * len(ends), job.log
        if dies:
            return [json.loads(path.read_text()) for path in sorted(self.shared.glob("results.*"))]
        return [end.result for end in ends]

    def _serve(self, job: Job, cases: tuple[str, ...]) -> None:
        actions: dict[str, Callable[[str], object]] = {
            "fill": self._fill,
            "empty": lambda _: self._fillings.pop().unlink(),
            "cut": lambda _: self.hosts[1].cut(),
            "mend": lambda _: self.hosts[1].mend(),
            "slow": lambda _: self.hosts[1].link(rate_bit_per_s=1e6),
            "fast": lambda _: self.hosts[1].link(),
            "second": lambda _: self.refused.extend(self.do("second")),
            "strip": lambda case: [path.unlink() for path in self.step_of(0, case, 2).rglob("*.pt")],
        }
        while not job.has_ended():
            for path in self.shared.glob("*.ask.*"):
                case, _, action = path.name.split(".")
                if case in cases:
                    path.unlink()
                    actions[action](case)
                    (self.shared / f"{case}.done.{action}").touch()
            time.sleep(0.005)

    def _fill(self, _: str) -> None:
        host = self.hosts[1]
        used = sum(path.stat().st_size for path in host.files.rglob("*") if path.is_file())
        self._fillings.append(host.fill(NODE_BYTES - used - LEFT_BYTES))

    def step_of(self, host: int, case: str, step: int) -> Path:
        return self.hosts[host].files / case / f"global_steps_{step}" / "actor"

    def rot(self, host: int) -> None:
        """Changes a bit in the middle of each optimizer file of step 2 of the case `rot`."""
        for path in self.step_of(host, "rot", 2).rglob("distrib_optim_*.pt"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


@dataclass(frozen=True)
class Story:
    """What the ranks of four jobs have found, one after the other."""

    live: Results
    refused: Results
    after_death: Results
    after_death_log: str
    after_loss: Results
    root: Path


def played(hosts: Hosts, server: JobServer, shared: Path) -> Story:
    play = Play(hosts, server, shared)
    live = play.do("settings", "full", "clock", "limited", "slow", "nonsense", "rot", "locked", dies=True)
    play.rot(0)
    after_death = play.do("heir", "rotten")
    log = play.logs[-1]
    hosts.replace(0)
    play.rot(1)
    return Story(live, play.refused, after_death, log, play.do("rotten"), shared)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, job_server: JobServer) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("refusals")
    shared = folder / "shared"
    shared.mkdir()
    with Hosts(2, folder, node_bytes=NODE_BYTES, shared=shared) as hosts:
        yield played(hosts, job_server, shared)


@pytest.fixture
def play(tmp_path: Path, job_server: JobServer) -> Iterator[Play]:
    shared = tmp_path / "shared"
    shared.mkdir()
    with Hosts(2, tmp_path, node_bytes=NODE_BYTES, shared=shared) as hosts:
        yield Play(hosts, job_server, shared, full=True)


# -- what a manager refuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("too many replicas", "InvalidArgumentError", "on 3 nodes, but the job has only 2 .*: use replicas=1"),
        ("one failure domain", "InvalidArgumentError", "only 0 nodes are outside the failure domain 'rack 7' of host0"),
        ("different settings", "InvalidArgumentError", "rank 0 has .*'keep': 2.*, rank 1 has .*'keep': 3"),
        (
            "no space",
            "NoRoomError",
            rf"on host1 would have to hold \d+ bytes of memory, but only {LEFT_BYTES} bytes are available: 5 steps",
        ),
    ],
)
def test_managers_are_refused(story: Story, case: str, kind: str, message: str) -> None:
    """On all ranks; and the next one, which is not wrong, is not."""
    for found in story.live:
        assert found["settings"][case][0] == kind
        assert re.search(message, found["settings"][case][1]), found["settings"][case][1]


# -- what happens in a save -------------------------------------------------------------------------------------


def test_a_folder_becomes_full(story: Story) -> None:
    for found in story.live:
        kind, message = found["full"]["failed"]
        assert (kind, "rank 1" in message, "No space left" in message) == ("CommitError", True, True)
        assert found["full"]["before"] == {"step": 1, "is_exact": True, "skipped": []}
        assert found["full"]["copies"] is None
        assert found["full"]["after"] == {"step": 3, "is_exact": True, "skipped": []}


def test_a_clock_that_is_wrong_by_a_year_changes_nothing(story: Story) -> None:
    years = [
        json.loads((story.root / f"clock/global_steps_{step}/actor/manifest.json").read_text())["created"][:4]
        for step in (2, 4)
    ]
    assert int(years[0]) < int(years[1])
    for found in story.live:
        assert found["clock"]["found"] == [
            {"copies": [None, None], "step": step, "is_exact": True, "skipped": []} for step in (2, 4)
        ]


def test_copies_are_limited_to_a_rate(story: Story) -> None:
    for found in story.live:
        # Of two steps, at 1 MiB a second.
        assert found["limited"]["seconds"] > 2 * 200_000 / (1 << 20)


@pytest.mark.parametrize("case", ["limited", "slow"])
def test_saves_do_not_wait_for_slow_copies(story: Story, case: str) -> None:
    """The step that is saved last gets its copies; of one that has got none, the report says why."""
    for found in story.live:
        assert found[case]["under_way"]
        first, skipped, last = found[case]["problems"]
        assert skipped == "a newer step was saved before the copies of this step could begin"
        assert first is last is None


def test_another_job_in_the_same_folders_is_refused(story: Story) -> None:
    for found in story.refused:
        kind, message = found["second"]["refused"]
        assert kind == "LockedError"
        assert re.search(r"locked/\.actor\.trainer\.json: process \d+ on host0 saves actor here, and is alive", message)


def test_the_lock_of_a_dead_job_is_taken_over(story: Story) -> None:
    for found in story.after_death:
        assert found["heir"]["step"] == 2
        assert found["heir"]["saved"] == ["", ""]


# -- bytes and words of other hosts -----------------------------------------------------------------------------


def test_a_rotten_file_is_read_from_its_copy(story: Story) -> None:
    for found in story.after_death:
        assert found["rotten"] == {"step": 2, "is_exact": True, "skipped": []}
    warning = r"distrib_optim_\S+ is read from host1:\S+, because \S+: tensor .* have a wrong CRC: they are damaged"
    assert re.search(warning, story.after_death_log)


def test_a_step_with_rotten_files_only_is_not_loaded(story: Story) -> None:
    """Nor a byte of it: the state is that of the step before."""
    for found in story.after_loss:
        rotten = found["rotten"]
        assert (rotten["step"], rotten["is_exact"]) == (1, True)
        assert "distrib_optim" in rotten["skipped"][0]
        assert "wrong CRC" in rotten["skipped"][0]


# For each kind of nonsense, what says so in a recovery, and while copies are made.
NONSENSE = {
    "other bytes": ("the index at byte .* has a wrong CRC", "has a wrong CRC"),
    "other names": ("sent a listing that makes no sense", "refused"),
    "huge sizes": ("has 4611686018427387904 bytes", "sent 4611686018427387904 bytes"),
    "unknown status": ("does not answer as a peer server does", "does not answer as a peer server does"),
    "half an answer": ("host1: ", "host1: "),
}


def check_nonsense(found: dict[str, Any], kind: str) -> None:
    in_recovery, in_copies = NONSENSE[kind]
    loaded = found["loaded"]
    assert (loaded["step"], loaded["is_exact"]) == (1, True)
    assert re.search(in_recovery, loaded["skipped"][0]), loaded["skipped"][0]
    assert re.search(f"host0 has got 0 of .* files: .*{in_copies}", found["problem"]), found["problem"]
    assert found["copies"] is None
    assert found["after"] == {"step": 2, "is_exact": True, "skipped": []}


def test_a_host_that_sends_other_bytes(story: Story) -> None:
    for found in story.live:
        assert found["nonsense"].keys() == {"other bytes"}
        check_nonsense(found["nonsense"]["other bytes"], "other bytes")


@pytest.mark.full
def test_a_host_that_sends_other_nonsense(play: Play) -> None:
    for found in play.do("nonsense"):
        assert found["nonsense"].keys() == NONSENSE.keys()
        for kind in NONSENSE:
            check_nonsense(found["nonsense"][kind], kind)


# -- hosts ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_host_alone_is_refused(play: Play) -> None:
    (found,) = play.do("alone", on=[play.hosts[0]])
    kind, message = found["alone"]["refused"]
    assert kind == "InvalidArgumentError"
    assert re.search(r"on 2 nodes, but the job has only 1 \(host0\): use replicas=0 or more nodes", message)


@pytest.mark.full
def test_a_slow_link(play: Play) -> None:
    for found in play.do("slow_link"):
        first, _, last = found["slow_link"]["problems"]
        assert first is last is None


@pytest.mark.full
def test_a_host_that_is_silent_for_a_while(play: Play) -> None:
    first, second = play.do("silent")
    assert "no word from rank 1" in first["silent"]["problem"]
    assert second["silent"]["problem"] is not None
    assert first["silent"]["copies"] is second["silent"]["copies"] is None
