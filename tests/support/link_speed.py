"""Measures how fast one simulated host can send bytes to another over a plain TCP connection, as iperf3 would.

    bytes_per_s(hosts[0], hosts[1], 64 << 20)

This is what a transfer over the same link may be compared with. This file is also the program that runs on both hosts.
"""

import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.hosts import Host  # not on the hosts, where this starts sooner without it

_PIECE = 1 << 20


def bytes_per_s(source: "Host", target: "Host", nbytes: int) -> float:
    """The rate at which bytes from the memory of one host arrive in the memory of another."""
    receiver = _start(target, "receive", target.address, str(nbytes), stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    port = receiver.stdout.readline().strip()
    sender = _start(source, "send", target.address, port, str(nbytes))
    took = float(receiver.communicate()[0])
    assert (sender.wait(), receiver.returncode) == (0, 0)
    return nbytes / took


def _start(host: "Host", *arguments: str, stdout: int | None = None) -> "subprocess.Popen[str]":
    return host.start([sys.executable, "-S", __file__, *arguments], stdout=stdout, text=True)


def _receive(address: str, nbytes: int) -> None:
    buffer = memoryview(bytearray(_PIECE))
    with socket.create_server((address, 0)) as server:
        _say(server.getsockname()[1])
        connection, _ = server.accept()
    with connection:
        began, received = time.monotonic(), 0
        while received < nbytes:
            count = connection.recv_into(buffer)
            if count == 0:
                sys.exit(f"the connection has ended after {received} of {nbytes} bytes")
            received += count
        _say(time.monotonic() - began)


def _say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def _send(address: str, port: int, nbytes: int) -> None:
    piece = memoryview(bytearray(_PIECE))
    with socket.create_connection((address, port)) as connection:
        for first in range(0, nbytes, _PIECE):
            connection.sendall(piece[: nbytes - first])


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive(sys.argv[2], int(sys.argv[3]))
    else:
        _send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
