"""Reads what NCCL writes under NCCL_DEBUG=INFO."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

# Each communicator has one rank 0, which says once that it is ready. Newer versions name the function before "comm",
# and the ids of the GPU and of the communicator after it.
_READY = re.compile(r"\bcomm 0x[0-9a-f]+ rank 0 n[rR]anks \d+ .*Init COMPLETE")


def variables(folder: Path) -> dict[str, str]:
    """Returns the variables with which each process writes a log of its own into a folder."""
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{folder}/nccl.%h.%p"}


def communicators(texts: Iterable[str]) -> int:
    """Counts the communicators that were made, from the logs of all processes of a job."""
    return sum(bool(_READY.search(line)) for text in texts for line in text.splitlines())


def communicators_in(folder: Path) -> int:
    """Counts the communicators that the processes with logs in a folder have made so far."""
    return communicators(path.read_text(errors="replace") for path in folder.glob("nccl.*"))
