"""Makes the agreement with which a driver, which is a single process, commits its own role of a step."""

from __future__ import annotations

from mcore_ckpt.io import DiskWatch
from mcore_ckpt.ranks import Agreement, single_process_agreement


def driver_agreement(role: str, timeout_s: float) -> Agreement:
    """Returns an agreement of this process alone, even if it belongs to a process group.

    A commit raises HungDiskError once a single call to the disk has lasted `timeout_s` seconds. Otherwise the driver,
    and with it the whole training, would wait for ever.
    """
    agreement = single_process_agreement(role, timeout_s)
    agreement.runner = DiskWatch(timeout_s, who=f"{role}: ")
    return agreement
