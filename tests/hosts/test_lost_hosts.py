"""Trainings whose checkpoints are in their nodes' memory come back exactly, as long as some node has each byte."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_jobs import JobServer
from tests.support.hosts import Hosts

RANKS = Path(__file__).with_name("fast_ranks.py")
TP2_PP2: dict[str, Any] = {"tp": 2, "pp": 2}


class Run:
    """A training on simulated hosts that has been saved and killed.

    Each rank of a host saves steps 1 to 3, each with a part of its own, with one copy on the next host; step 2 is also
    in the root.
    """

    def __init__(self, hosts: Hosts, server: JobServer, root: Path, layout: dict[str, Any], **fast: Any) -> None:
        self._hosts, self._server, self._ranks = hosts, server, 2 * len(hosts)
        self._arguments = {
            "folder": str(hosts.folder),
            "root": str(root),
            "fast": {"replicas": 1, "keep": 2, "durable_every": 2, **fast},
        }
        job = server.start(hosts, 2, RANKS, self._arguments | {"do": "save", "layout": layout, "steps": 3})
        ends = job.wait()
        assert [end.status for end in ends] == [-9] * len(ends), job.log
        self.note = json.loads((root / "note.json").read_text())

    def recovered(self, hosts: list[Any], layout: dict[str, Any], **fast: Any) -> list[dict[str, Any]]:
        """What each rank of a new job finds that runs on these hosts."""
        arguments = self._arguments | {"do": "recover", "layout": layout}
        arguments["fast"] = arguments["fast"] | fast
        found: list[dict[str, Any]] = self._server.run(hosts, 2, RANKS, arguments)
        for each in found:  # whatever number of ranks has loaded
            prompts = {f"{rank}": f"step {each['step']}, rank {rank}; " for rank in range(self._ranks)}
            assert each["prompts"] == prompts | {"1": ""}
        return found


def test_hosts_are_lost_one_after_the_other(tmp_path: Path, job_server: JobServer) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with Hosts(4, tmp_path, shared=root) as hosts:
        run = Run(hosts, job_server, root, TP2_PP2)
        # All processes died, and the ranks are numbered the other way round.
        for found in run.recovered(list(hosts)[::-1], TP2_PP2):
            assert (found["step"], found["state"]) == (3, run.note["states"]["3"])
            assert found["losses"] == run.note["losses"]
            assert found["seen"] == [0, 1, 2]
            assert found["path"].startswith(str(hosts.folder))
        # One host is replaced by an empty one.
        hosts[1].lose()
        hosts.replace(1)
        for found in run.recovered(list(hosts), TP2_PP2):
            assert (found["step"], found["losses"]) == (3, run.note["losses"])
        # Half of the hosts are gone, and the layout is another one.
        hosts[3].lose()
        for found in run.recovered([hosts[0], hosts[2]], {"tp": 4}):
            assert (found["step"], found["state"]) == (3, run.note["states"]["3"])
        # Two neighbours are gone: host 0 and host 1, which had its copies.
        hosts[0].lose()
        for found in run.recovered([hosts[2], hosts[1]], {"tp": 2, "pp": 2}):
            assert (found["step"], found["state"]) == (2, run.note["states"]["2"])
            assert found["path"].startswith(str(root))
            assert "are on no node that is left" in found["skipped"][0]
            assert "host0" in found["skipped"][0]


def test_data_parallel_replicas_need_no_copies(tmp_path: Path, job_server: JobServer) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with Hosts(4, tmp_path, shared=root) as hosts:
        run = Run(hosts, job_server, root, {"tp": 2}, durable_every=None)
        model_files = [sorted(host.files.rglob("global_steps_3/*/model/*/*.pt")) for host in hosts]
        assert [len(files) for files in model_files] == [2, 2, 0, 0]
        for number in (1, 3):
            hosts[number].lose()
        for found in run.recovered([hosts[0], hosts[2]], {"tp": 2}, durable_every=None):
            assert (found["step"], found["state"]) == (3, run.note["states"]["3"])
    assert [path.name for path in root.iterdir()] == ["note.json"]


@pytest.mark.full
def test_other_layouts(tmp_path: Path, job_server: JobServer) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with Hosts(4, tmp_path, shared=root) as hosts:
        run = Run(hosts, job_server, root, {"tp": 1}, durable_every=None)
        for layout in ({"tp": 2, "pp": 2}, {"tp": 4}, {"pp": 2}):
            for found in run.recovered(list(hosts), layout, durable_every=None):
                assert (found["step"], found["state"]) == (3, run.note["states"]["3"])
