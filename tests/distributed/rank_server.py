"""Runs tests on several ranks, one after the other, for a pytest in another process (tests/distributed/conftest.py).

    python rank_server.py REPLIES_FD FOLDER PATH...

The server imports torch, megatron and the tests of PATH... once and forks the ranks of each world size. They stay for
as long as tests of this world size follow each other and none fails. Requests and replies are lines of JSON:

    reply     {"tests": [{"file", "name", "id", "world", "marks"}], "errors": {file: text}}    after the start
    request   {"id": ...}                                                                      on standard input
    reply     {"outcome": "passed" | "failed" | "skipped", "text": ...}
"""

import gc
import json
import os
import select
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from tests.distributed import forked_ranks

# The marks by which the other pytest selects tests.
MARKS = ("full",)


class RankServer:
    """A pytest plug-in that runs its tests on request, on forked ranks."""

    __name__ = "rank_server"  # by this name the conftest knows that it is in a server

    def __init__(self, requests: IO[str], replies: IO[str], folder: Path) -> None:
        self._requests, self._replies, self._folder = requests, replies, folder
        self._errors: dict[str, str] = {}
        self._pool: Pool | None = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors[report.nodeid] = report.longreprtext

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._reply({"tests": [_described(item) for item in session.items], "errors": self._errors})
        # Ranks share the memory that nobody writes to, and a collection of garbage writes to all.
        gc.collect()
        gc.freeze()
        for line in self._requests:
            self._reply(self._run(session.config, items, json.loads(line)["id"]))
        self._end_pool()
        return True

    def _run(self, config: pytest.Config, items: dict[str, pytest.Item], test: str) -> dict[str, str]:
        world = world_of(items[test])
        assert world is not None
        if self._pool is not None and self._pool.world != world:
            self._end_pool()
        if self._pool is None:
            self._pool = Pool.start(world, config, items, self._folder)
        reply = self._pool.run(test)
        if reply["outcome"] == "failed":
            # Some ranks may wait for a collective that the others never enter.
            self._end_pool()
        return reply

    def _end_pool(self) -> None:
        if self._pool is not None:
            self._pool.end()
            self._pool = None

    def _reply(self, reply: dict[str, Any]) -> None:
        self._replies.write(json.dumps(reply) + "\n")
        self._replies.flush()


def world_of(item: pytest.Item) -> int | None:
    """The number of ranks that a test runs on; None if it does not say."""
    mark = item.get_closest_marker("world")
    return None if mark is None else int(mark.args[0])


def _described(item: pytest.Item) -> dict[str, Any]:
    marks = [mark for mark in MARKS if item.get_closest_marker(mark)]
    file, _, name = item.nodeid.partition("::")
    shows = [mark.args for mark in item.iter_markers("shows")]
    return {"file": file, "name": name, "id": item.nodeid, "world": world_of(item), "marks": marks, "shows": shows}


@dataclass
class Pool:
    """The ranks of one world size, each of which waits for the next test."""

    world: int
    log: Path
    ranks: forked_ranks.Ranks | None = None
    tests: list[IO[str]] = field(default_factory=list)
    """For each rank, where it reads the test to run."""
    outcomes: list[IO[str]] = field(default_factory=list)
    """For each rank, where it writes the outcome."""

    @classmethod
    def start(cls, world: int, config: pytest.Config, items: dict[str, pytest.Item], folder: Path) -> "Pool":
        from tests.distributed.rank_setup import COLLECTIVE_TIMEOUT

        log = folder / "ranks.log"
        log.write_text("")
        pool = cls(world, log)
        pipes = [(os.pipe(), os.pipe()) for _ in range(world)]

        def work(rank: int) -> None:
            (read, _), (_, write) = pipes[rank]
            for other, ((_, tests), (outcomes, written)) in enumerate(pipes):
                # A rank that dies must close the last copy of its end.
                for descriptor in (tests, outcomes, *([written] if other != rank else [])):
                    os.close(descriptor)
            serve(rank, config, items, folder, os.fdopen(read), os.fdopen(write, "w"))

        pool.ranks = forked_ranks.start(world, work, log, COLLECTIVE_TIMEOUT)
        for (read, tests), (outcomes, write) in pipes:
            os.close(read)
            os.close(write)
            pool.tests.append(os.fdopen(tests, "w"))
            pool.outcomes.append(os.fdopen(outcomes))
        return pool

    def run(self, test: str) -> dict[str, str]:
        """The outcome of a test. All ranks have the same one, unless one has died."""
        for pipe in self.tests:
            pipe.write(test + "\n")
            pipe.flush()
        replies: dict[int, str] = {}
        while len(replies) < self.world:
            waiting = [rank for rank in range(self.world) if rank not in replies]
            readable, _, _ = select.select([self.outcomes[rank] for rank in waiting], [], [])
            for rank in waiting:
                if self.outcomes[rank] in readable:
                    replies[rank] = self.outcomes[rank].readline()
                    if not replies[rank]:
                        return {"outcome": "failed", "text": f"rank {rank} has died:\n{self.log.read_text()}"}
        reply = json.loads(replies[0])
        if reply["outcome"] == "failed":
            reply["text"] += f"\n{self.log.read_text()}"
        return reply

    def end(self) -> None:
        """Ends the ranks: those that wait for a test end by themselves, the others are killed."""
        for pipe in (*self.tests, *self.outcomes):
            pipe.close()
        assert self.ranks is not None
        forked_ranks.wait(self.ranks)


def serve(
    rank: int, config: pytest.Config, items: dict[str, pytest.Item], folder: Path, tests: IO[str], outcomes: IO[str]
) -> None:
    """Runs the tests that are asked for, on one rank."""
    from _pytest.runner import runtestprotocol

    from tests.distributed.rank_setup import set_up

    # Ranks that shared pytest's numbered folders would race.
    own = folder / f"rank{rank}"
    own.mkdir(exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(own)
    set_up(config)
    for line in tests:
        reports = runtestprotocol(items[line.strip()], log=False, nextitem=None)
        outcomes.write(json.dumps(_outcome(reports)) + "\n")
        outcomes.flush()


def _outcome(reports: list[pytest.TestReport]) -> dict[str, str]:
    for outcome in ("failed", "skipped"):
        told = [report for report in reports if report.outcome == outcome]
        if told:
            sections = [f"--- {name} ---\n{text}" for report in told for name, text in report.sections]
            return {"outcome": outcome, "text": "\n".join([*(report.longreprtext for report in told), *sections])}
    return {"outcome": "passed", "text": ""}


def main() -> None:
    forked_ranks.die_with_parent()
    replies, folder, *paths = sys.argv[1:]
    # Output is captured in memory, of which each rank has its own; files would be shared.
    options = (
        "--full",
        "--capture=sys",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-o",
        "tmp_path_retention_policy=failed",
    )
    with os.fdopen(int(replies), "w") as file:
        # pytest puts another object in the place of sys.stdin.
        pytest.main([*options, *paths], plugins=[RankServer(sys.stdin, file, Path(folder))])


if __name__ == "__main__":
    main()
