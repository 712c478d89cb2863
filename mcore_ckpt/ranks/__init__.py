"""Reads each rank's place in the parallel layout, and lets ranks agree over a key-value store without collectives.

Public names, for integrations and commands:

- `rendezvous` waits for all ranks, and returns the `Agreement` that connects this rank with them;
- `job_agreement` connects the processes of a command, and `Seat` is the place of one process among them;
- `single_process_agreement` returns the `Agreement` of a process that works alone;
- `agree` returns rank 0's answer on every rank, or raises the same error on every rank;
- `read_topology` returns this rank's coordinates and the sizes of the layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.ranks.job import Seat, job_agreement
    from mcore_ckpt.ranks.meeting import rendezvous, single_process_agreement
    from mcore_ckpt.ranks.rounds import Agreement, agree
    from mcore_ckpt.ranks.topology import read_topology

__all__ = ["Agreement", "Seat", "agree", "job_agreement", "read_topology", "rendezvous", "single_process_agreement"]

__getattr__ = lazy_names(
    __name__,
    {
        "job": ("Seat", "job_agreement"),
        "meeting": ("rendezvous", "single_process_agreement"),
        "rounds": ("Agreement", "agree"),
        "topology": ("read_topology",),
    },
)
