"""Connects the ranks of a job that torchrun, or another launcher with the same variables, has started.

It needs no process group, which would wait half an hour for a rank that is dead, and would not name it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from mcore_ckpt.errors import AgreementError, CheckpointError
from mcore_ckpt.ranks.key_value_store import store_failures
from mcore_ckpt.ranks.meeting import rendezvous_at
from mcore_ckpt.ranks.rounds import Agreement

_TOPIC = "connecting the ranks"


def job_agreement(variables: Mapping[str, str], timeout_s: float) -> Any:
    """Returns a context manager that yields the agreement of all ranks.

    Args:
        variables: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.
        timeout_s: the timeout of each wait, in seconds.

    Raises ValueError if a variable is missing or invalid. The context manager raises AgreementError if a rank is
    missing.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in variables]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK is {rank}, WORLD_SIZE is {world_size}")
    # torchrun's agent hosts a store already, unless it is told not to.
    hosts_store = rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    place = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    return _joined(place, rank, world_size, hosts_store, timeout_s)


@contextmanager
def _joined(
    place: tuple[str, int], rank: int, world_size: int, hosts_store: bool, timeout_s: float
) -> Iterator[Agreement]:
    import torch.distributed as dist

    with store_failures(_TOPIC, AgreementError):
        store = dist.TCPStore(  # type: ignore[attr-defined]
            *place, is_master=hosts_store, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    agreement = rendezvous_at(store, rank, world_size, "mcore_ckpt/doctor", timeout_s, _TOPIC)
    yield agreement
    _leave(agreement)


def _leave(agreement: Agreement) -> None:
    """Ends together. If rank 0 hosts the store, it must not end before the others have read its last word."""
    with suppress(CheckpointError), store_failures(_TOPIC, AgreementError):
        round_ = agreement.begin("leaving")
        round_.submit({})
        if agreement.is_coordinator:
            round_.collect(AgreementError)
