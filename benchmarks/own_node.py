"""Makes a rank of a benchmark a node of its own: with its own host name, and a folder in memory that only it sees.

It takes root. The network is the machine's own.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from pathlib import Path

# linux/sched.h
_CLONE_NEWNS, _CLONE_NEWUTS = 0x20000, 0x4000000


def become_node(number: int, folder: Path) -> None:
    """Takes this process into namespaces of its own, in which `folder` is an empty tmpfs."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS) != 0:
        raise SystemExit(f"ranks cannot become nodes ({os.strerror(ctypes.get_errno())}): run this as root")
    socket.sethostname(f"node{number}")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=90%", "tmpfs", str(folder)], check=True)


def in_limited_network(gigabits: float, command: list[str]) -> list[str]:
    """Returns a command that runs another one in a network of its own, whose links all share one rate."""
    limit = f"tc qdisc add dev lo root tbf rate {gigabits}gbit burst 2mb limit 8mb"
    return ["unshare", "--net", "sh", "-c", f'ip link set lo up && {limit} && exec "$@"', "sh", *command]
