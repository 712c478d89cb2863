"""The hosts that tests simulate (tests/support/hosts.py) are apart from each other, and can be lost one by one."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host_jobs import JobServer
from tests.support.hosts import Hosts
from tests.support.link_speed import bytes_per_s
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

TRAIN = Path(__file__).with_name("train_on_hosts.py")
MEGABIT = 1e6
# As many as wait in a socket until they are received.
DATAGRAMS = 100


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    shared = tmp_path / "shared"
    shared.mkdir()
    with Hosts(2, tmp_path, node_bytes=4 << 20, shared=shared) as hosts:
        yield hosts


def names_of_files(hosts: Hosts) -> list[list[str]]:
    return [sorted(path.name for path in host.files.iterdir()) for host in hosts]


def output_of(hosts: Hosts, number: int, script: str) -> str:
    process = hosts[number].start(["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return process.communicate()[0].strip()


def datagrams_that_arrive(hosts: Hosts) -> int:
    """How many of the datagrams that host 1 sends to host 0 get there."""
    receive = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('0.0.0.0', 9)); print('', flush=True)\n"
    )
    receive += "s.settimeout(0.5)\nwhile True: print(len(s.recv(1)), flush=True)"
    send = f"import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('{hosts[0].address}', 9))\n"
    send += f"for _ in range({DATAGRAMS}): s.send(b'x')"
    pipe = subprocess.PIPE
    receiver = hosts[0].start([sys.executable, "-c", receive], stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    assert hosts[1].start([sys.executable, "-c", send]).wait() == 0
    return len(receiver.communicate()[0].splitlines())


def test_four_hosts_train_and_one_is_lost(tmp_path: Path, job_server: JobServer) -> None:
    with Hosts(4, tmp_path) as hosts:
        stay = job_server.start(hosts, 2, TRAIN, {"folder": str(hosts.folder), "then": "stay"})
        all_notes = [[f"rank{2 * number}", f"rank{2 * number + 1}"] for number in range(4)]
        wait_for(lambda: names_of_files(hosts) == all_notes)
        hosts[1].lose()
        for number in (0, 2, 3):
            hosts[number].kill_processes()
        assert [end.status for end in stay.wait()] == [-9] * 8
        hosts.replace(1)
        assert [host.name for host in hosts] == ["host0", "host4", "host2", "host3"]
        assert names_of_files(hosts) == [all_notes[0], [], all_notes[2], all_notes[3]]
        norm = (hosts[2].files / "rank4").read_text()
        # The other way round, on half of the ranks.
        results = job_server.run([hosts[2], hosts[1]], 2, TRAIN, {"folder": str(hosts.folder), "then": "end"})
        assert [result["host"].split()[0] for result in results] == ["host2", "host2", "host4", "host4"]
        assert len({result["host"] for result in results}) == 2
        assert [result["local"] for result in results] == ["0", "1", "0", "1"]
        assert results[0]["seen"] == ["rank0", "rank1", "rank4", "rank5"]
        assert results[2]["seen"] == ["rank2", "rank3"]
        assert float(norm.split()[1]) == pytest.approx(results[0]["grad_norm"], rel=1e-3)


def test_only_the_shared_folder_is_shared(two: Hosts, tmp_path: Path) -> None:
    places = (two.folder, "/dev/shm", "/var/tmp", tmp_path / "shared")
    for place in places:
        assert output_of(two, 0, f"echo here >{place}/note") == ""
    found = [output_of(two, 1, f"cat {place}/note 2>/dev/null") for place in places]
    assert found == ["", "", "", "here"]
    assert output_of(two, 0, "[ -w / ] || [ -w /tmp ] || echo read-only") == "read-only"
    assert [path.name for path in two.folder.iterdir()] == []
    boots = [output_of(two, number, "cat /proc/sys/kernel/random/boot_id") for number in (0, 1, 0)]
    assert boots[0] == boots[2] != boots[1]
    assert output_of(two, 1, "hostname; getent hosts host0 | cut -d' ' -f1").split() == ["host1", two[0].address]


def test_memory_is_limited_and_outlives_processes(two: Hosts) -> None:
    sleeping = two[0].start(["sleep", "600"])
    wait_for(lambda: len(two[0].running()) == 1)
    ballast = two[0].fill(3 << 20)
    assert "No space" in output_of(two, 0, f"head -c 2M /dev/zero >{two.folder}/more")
    two[0].kill_processes()
    assert sleeping.wait() == -9
    assert ballast.stat().st_size == 3 << 20


def test_connections_to_killed_processes_end_and_those_to_a_lost_host_do_not(two: Hosts) -> None:
    with two[0].namespaces.listen() as listening:
        address = listening.getsockname()
        connect = f"import socket, time; s = socket.create_connection({address}); time.sleep(600)"
        connections = []
        for take_away in (two[1].kill_processes, two[1].lose):
            two[1].start([sys.executable, "-c", connect])
            connections.append(listening.accept()[0])
            connections[-1].settimeout(0.3)
            take_away()
    killed, lost = connections
    with killed, lost:
        assert killed.recv(1) == b""
        with pytest.raises(TimeoutError):
            lost.recv(1)


def test_links_are_cut_mended_and_limited(two: Hosts) -> None:
    ping = f"python3 -c \"import socket; socket.create_connection(('{two[0].address}', 9), 0.5)\" 2>&1 | tail -n 1"
    assert "refused" in output_of(two, 1, ping)
    two[0].cut()
    assert "timed out" in output_of(two, 1, ping)
    two[0].mend()
    assert "refused" in output_of(two, 1, ping)
    two[0].link(rate_bit_per_s=80 * MEGABIT)
    for source, target in ((0, 1), (1, 0)):
        assert 2e6 < bytes_per_s(two[source], two[target], 2 << 20) < 13e6
    two[0].link(loss=0.5)
    assert DATAGRAMS * 0.2 < datagrams_that_arrive(two) < DATAGRAMS * 0.8
    two[0].link()
    assert datagrams_that_arrive(two) == DATAGRAMS
    assert bytes_per_s(two[0], two[1], 16 << 20) > 20e6


def test_nothing_is_left_of_hosts(tmp_path: Path) -> None:
    with Hosts(2, tmp_path) as hosts:
        first = hosts[0].start(["sleep", "600"])
        pids = [host.namespaces.pid for host in hosts]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert first.wait() == -9
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
