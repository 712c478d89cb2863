"""Simulates several hosts on one machine, so that tests can lose one: each has its own network, memory and processes.

    with Hosts(4, tmp_path) as hosts:                # hosts[0].name is "host0"; all reach each other by name
        hosts[0].start(["program"], env={...})       # a Popen: a child of this process, and a process of the host
        hosts[0].kill_processes()                    # what they have put into hosts.folder stays, as in /dev/shm
        hosts[1].lose()                              # the others get no answer any more; its memory is gone
        hosts.replace(1)                             # hosts[1] is now an empty host4, with an address of its own
        hosts[2].link(rate_bit_per_s=1e9, loss=0.01), hosts[2].cut(), hosts[2].mend()
        hosts[3].files                               # its part of hosts.folder, as this process may reach it

On each host, `hosts.folder`, /dev/shm and /var/tmp are in memory of its own; `shared`, if given, is one folder for all.
Everything else is read-only. Each host has a boot id of its own. What all hosts share is the clock: the kernel has no
namespace for the time of day, so a test of a wrong clock has to patch `time.time` in its ranks. The kernel of CI cannot
delay packets either (no netem). rank_server.py runs the ranks of a job on hosts, link_speed.py measures a link.

A host is the namespaces that its first process keeps alive. That process ends when this one does, however it ends, and
with it go all processes, interfaces and mounts of the host: nothing is left to be swept.
"""

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.support import small_disks
from tests.support.namespaces import Namespaces
from tests.support.waiting import wait_for

# Interface of a host, by the name that gloo and NCCL are told.
INTERFACE = "eth0"

_NETWORK = ipaddress.ip_network("10.77.0.0/16")
_MAX_HOSTS = 1000

_ISOLATE = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork")

_PROBE = """
ip link add name probe0 type veth peer name probe1
ip link add name probe2 type bridge
mount -t tmpfs tmpfs /mnt
"""

_SWITCH = """
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
ip link add name switch type bridge
ip link set switch up
# What is to be lost goes to an interface that leads nowhere.
ip link add name nowhere type veth peer name nobody
ip link set nowhere up
echo $$
exec cat >/dev/null 2>&1
"""

_HOST = """
name=$1 folder=$2 size=$3 names=$4 shared=$5
shift 5
read -r pid _ </proc/self/stat # as it is known outside, of which /proc still tells
mount -t proc proc /proc
echo "$name" >/proc/sys/kernel/hostname
# What is below /dev/shm must be mounted elsewhere before that is hidden.
mount --bind "$names" /etc/hosts
[ -z "$shared" ] || mount --bind "$shared" /mnt
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /var/tmp
mkdir -p "$folder" $shared # again
mount -t tmpfs -o "size=$size" tmpfs "$folder"
[ -z "$shared" ] || mount --move /mnt "$shared"
cat /proc/sys/kernel/random/uuid >/var/tmp/boot_id
mount --bind /var/tmp/boot_id /proc/sys/kernel/random/boot_id
for place; do mount -o remount,bind,ro "$place"; done
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
ip link set lo up
trap '' CHLD # the kernel buries children that this process inherits
echo "$pid"
exec cat >/dev/null 2>&1
"""


class Hosts:
    """Several hosts at one switch. A context manager, which skips the test where there can be none.

    Attributes:
        folder: memory of each host's own, at the same path on all of them.
    """

    def __init__(self, count: int, tmp_path: Path, node_bytes: int = 256 << 20, shared: Path | None = None) -> None:
        self.folder = tmp_path / "node"
        self._count = count
        self._node_bytes = node_bytes
        self._shared = shared
        self._names = tmp_path / "names_of_hosts"
        self._made = 0
        self._hosts: list[Host] = []
        self._switch: _Anchor | None = None

    def __enter__(self) -> "Hosts":
        _skip_if_impossible()
        self.folder.mkdir()
        addresses = [f"{_address(number)} host{number}\n" for number in range(_MAX_HOSTS)]
        self._names.write_text("127.0.0.1 localhost\n" + "".join(addresses))
        self._switch = _Anchor(("unshare", "--net"), _SWITCH)
        try:
            # They make their mounts beside each other.
            anchors = [self._anchor(number) for number in range(self._count)]
            self._hosts = [self._connected(anchor) for anchor in anchors]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __getitem__(self, number: int) -> "Host":
        return self._hosts[number]

    def __iter__(self) -> Iterator["Host"]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def replace(self, number: int) -> "Host":
        """Puts a new, empty host in the place of one, which is lost if it was not before."""
        self._hosts[number].lose()
        self._hosts[number] = self._connected(self._anchor(self._made))
        return self._hosts[number]

    def close(self) -> None:
        """Ends all hosts."""
        for host in self._hosts:
            host.lose()
        if self._switch is not None:
            self._switch.end()

    def _anchor(self, number: int) -> "_Anchor":
        read_only = {_mount_point(Path(path)) for path in ("/", "/tmp", self.folder)} - {Path("/dev/shm")}
        arguments = (f"host{number}", self.folder, self._node_bytes, self._names, self._shared or "")
        return _Anchor(_ISOLATE, _HOST, *arguments, *sorted(read_only))

    def _connected(self, anchor: "_Anchor") -> "Host":
        number, self._made = self._made, self._made + 1
        assert self._switch is not None
        host = Host(f"host{number}", Namespaces(anchor.pid, _address(number)), self.folder, anchor, self._switch.pid)
        host.connect()
        return host


class Host:
    """One simulated host.

    Attributes:
        name: its hostname.
        namespaces: where its processes are.
        files: its part of `Hosts.folder`, as a process outside may reach it for as long as the host lives.
    """

    def __init__(self, name: str, namespaces: Namespaces, folder: Path, anchor: "_Anchor", switch: int) -> None:
        self.name = name
        self.namespaces = namespaces
        self.files = Path(f"/proc/{namespaces.pid}/root{folder}")
        self._anchor = anchor
        self._switch = switch
        self._processes: list[subprocess.Popen[Any]] = []

    @property
    def address(self) -> str:
        return self.namespaces.address

    def connect(self) -> None:
        """Connects the host to the switch."""
        ends = ("netns", str(self._switch), "type", "veth", "peer", "name", INTERFACE, "netns", str(self._anchor.pid))
        _run("ip", "link", "add", "name", self.name, *ends)
        prefix = f"{self.address}/{_NETWORK.prefixlen}"
        _run_in(self._anchor.pid, "ip", "address", "add", prefix, "dev", INTERFACE)
        _run_in(self._anchor.pid, "ip", "link", "set", INTERFACE, "up")
        _run_in(self._switch, "ip", "link", "set", self.name, "master", "switch", "up")

    def start(self, command: Sequence[str], env: Mapping[str, str] = {}, **of_popen: Any) -> subprocess.Popen[Any]:
        """Starts a process on the host. `env` is added to the environment of this process."""
        with self.namespaces.forking() as enter:
            process = subprocess.Popen(command, env=os.environ | env, preexec_fn=enter, **of_popen)
        self._processes.append(process)
        return process

    def running(self) -> set[int]:
        """The processes that run on the host, by the pids that they have there. The first, which keeps it, is left out.

        Empty for a host that is lost.
        """
        found = set()
        for folder in Path(f"/proc/{self._anchor.pid}/root/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found.add(int(folder.name))
        return found - {1}

    def kill_processes(self) -> None:
        """Kills all processes at once, and returns when they have ended. The host's memory stays, and so its files."""
        wait_for(self._nobody_is_left)

    def _nobody_is_left(self) -> bool:
        # In the host, "all" (-1) are its processes but the first. Again and again: somebody may just be entering it.
        with self.namespaces.forking() as enter:
            subprocess.run(["sh", "-c", "kill -s KILL -- -1"], preexec_fn=enter, stderr=subprocess.DEVNULL)
        return not self.running()

    def lose(self) -> None:
        """Takes the host away for ever, with its memory. Like one without power, it does not say good-bye to others."""
        if self._anchor.ended:
            return
        # First: a process that is killed closes its connections, which those at the other end would be told.
        self.cut()
        self._anchor.kill()
        for process in self._processes:
            process.wait()
        self._anchor.end()

    def cut(self) -> None:
        """Interrupts the link. Nobody is told; packets get lost."""
        _run_in(self._switch, "ip", "link", "set", self.name, "down")

    def mend(self) -> None:
        """Has the link work again after `cut`."""
        _run_in(self._switch, "ip", "link", "set", self.name, "up")

    def link(self, rate_bit_per_s: float | None = None, loss: float = 0.0) -> None:
        """Limits the rate of the link in each direction (None: no limit), and loses a share of all packets.

        Of the kernel's packets, which between simulated hosts have up to 64 KiB.
        """
        port = (self._switch, self.name)
        for pid, interface in ((self._anchor.pid, INTERFACE), port):
            _limit(pid, interface, rate_bit_per_s)
        _lose_packets(*port, loss)

    def fill(self, nbytes: int) -> Path:
        """Takes so many bytes of the host's memory, and returns the file that has them."""
        return small_disks.fill(self.files, nbytes)


class _Anchor:
    """A process that keeps namespaces alive. It ends with this process, at the end of its standard input."""

    def __init__(self, isolate: Sequence[str], script: str, *arguments: object) -> None:
        command = [*isolate, "sh", "-euc", script, "sh", *map(str, arguments)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            # A session of its own, for Ctrl-C.
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )  # fmt: skip
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """Of the process; once it has made what its script says."""
        if self._pid is None:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"a host could not be made: {self._process.communicate()[1]}")
            self._pid = int(line)
        return self._pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kills the process, and by that all others of its namespace of processes."""
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        self._process.communicate()


def _skip_if_impossible() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can simulate hosts: they need network namespaces and mounts")
    for program in ("ip", "tc", "nsenter", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"hosts are simulated with {program}, which is not installed (packages iproute2, util-linux)")
    done = subprocess.run([*_ISOLATE, "sh", "-euc", _PROBE], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"the kernel cannot simulate hosts, or does not allow it: {done.stderr.strip()}")


def _address(number: int) -> str:
    return str(_NETWORK[number + 1])


def _mount_point(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.is_mount())


def _limit(pid: int, interface: str, rate_bit_per_s: float | None) -> None:
    if rate_bit_per_s is None:
        _run_in(pid, "tc", "qdisc", "del", "dev", interface, "root", check=False)
        return
    # What may pass at once: 5 ms of the rate, but at least one packet of the kernel.
    burst = max(int(rate_bit_per_s / 8 * 0.005), 70_000)
    limits = ("rate", f"{int(rate_bit_per_s)}bit", "burst", str(burst), "limit", str(4 * burst))
    _run_in(pid, "tc", "qdisc", "replace", "dev", interface, "root", "tbf", *limits)


def _lose_packets(pid: int, interface: str, share: float) -> None:
    """Loses packets in both directions, with a filter that draws a number for each."""
    _run_in(pid, "tc", "qdisc", "del", "dev", interface, "clsact", check=False)
    if not share:
        return
    # Classic BPF: load a random number; if it is not below the share, no match; else a match.
    draw = f"4,32 0 0 {0xFFFFF000 + 56},53 0 1 {int(share * 2**32)},6 0 0 0,6 0 0 {2**32 - 1}"
    away = ("action", "mirred", "egress", "redirect", "dev", "nowhere")
    _run_in(pid, "tc", "qdisc", "add", "dev", interface, "clsact")
    for direction in ("ingress", "egress"):
        bpf = ("protocol", "all", "bpf", "bytecode", draw)
        _run_in(pid, "tc", "filter", "add", "dev", interface, direction, *bpf, *away)


def _run_in(pid: int, *command: str, check: bool = True) -> None:
    _run("nsenter", "--target", str(pid), "--net", *command, check=check)


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
