"""Names the host that a process runs on."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def this_host() -> str:
    """Returns the host's name, its boot id and the pid namespace of this process, separated by spaces.

    The name is not enough: two containers can have the same name, although each has its own process numbers and files.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
