"""Names the host that a process runs on."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

# Stands for what the system does not tell, as in a container that hides /proc/sys.
NOT_TOLD = "unknown"


def this_host() -> str:
    """Returns the host's name, its boot id and the pid namespace of this process, separated by spaces.

    The name is not enough, because two containers can have the same one and still number their processes separately,
    and keep their files apart.
    """
    boot = namespace = NOT_TOLD
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip() or NOT_TOLD
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {namespace}"
