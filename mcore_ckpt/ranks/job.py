"""Connects the processes of a command that torchrun, or another launcher with the same variables, has started.

This module uses no process group. A process group would wait half an hour for a dead rank, and would not name the rank.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from mcore_ckpt.errors import AgreementError, CheckpointError
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.key_value_store import store_failures
from mcore_ckpt.ranks.meeting import rendezvous_at, single_process_agreement
from mcore_ckpt.ranks.rounds import Agreement

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seat:
    """The number of this process among the command's processes, and the host and port of the store that they share."""

    rank: int
    world_size: int
    place: tuple[str, int]
    hosts_store: bool

    @staticmethod
    def read(variables: Mapping[str, str]) -> Seat | None:
        """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; None if the process works alone. Raises ValueError."""
        world_size = int(variables.get("WORLD_SIZE", "1"))
        if world_size == 1:
            return None
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in variables]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing")
        rank = int(variables["RANK"])
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK is {rank}, WORLD_SIZE is {world_size}")
        # Rank 0 hosts the store, unless torchrun's agent already hosts it.
        hosts_store = rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return Seat(rank, world_size, (variables["MASTER_ADDR"], int(variables["MASTER_PORT"])), hosts_store)


@contextmanager
def job_agreement(name: str, seat: Seat | None, timeout_s: float, start_s: float) -> Iterator[Agreement]:
    """Yields the agreement of all processes of a command, or of this process alone.

    If a rank of a training starts a command, the command inherits the training's variables, and waits for processes
    that nobody has started. So the command soon logs that it waits, and what to do.

    Args:
        name: the command's name.
        seat: the place of this process; None if it works alone.
        timeout_s: the timeout of each wait after all processes have met, in seconds.
        start_s: how long a process waits for the other processes to start, in seconds.

    Raises AgreementError if a rank is missing.
    """
    if seat is None:
        yield single_process_agreement(name, timeout_s)
        return
    agreement = _meet(name, seat, timeout_s, start_s)
    with agreement.call(name):
        yield agreement
    _leave(name, agreement)


def _meet(name: str, seat: Seat, timeout_s: float, start_s: float) -> Agreement:
    import torch.distributed as dist

    is_one = f"{name}: RANK and WORLD_SIZE say that this is process {seat.rank} of {seat.world_size}"
    alone = "If this process should work alone, for example because a training has started it, unset WORLD_SIZE"
    place = f"{seat.place[0]}:{seat.place[1]}"
    waits = f"{is_one}: it waits up to {start_s:g} s for the other processes at {place}. {alone}"
    notice = threading.Timer(deadlines.NOTICE_S, logger.warning, (waits,))
    notice.daemon = True
    notice.start()
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            *seat.place, is_master=seat.hosts_store, timeout=timedelta(seconds=start_s), wait_for_workers=False
        )
        namespace, topic = f"mcore_ckpt/{name}", "connecting the ranks"
        return rendezvous_at(store, seat.rank, seat.world_size, namespace, timeout_s, topic, start_s=start_s)
    except (AgreementError, RuntimeError) as error:
        raise AgreementError(f"{is_one}, but the processes have not met at {place}: {error}. {alone}") from error
    finally:
        notice.cancel()


def _leave(name: str, agreement: Agreement) -> None:
    """Waits, on rank 0, until all processes have left the agreement.

    If rank 0 hosts the store, the other processes must read the last message before rank 0 ends.
    """
    with suppress(CheckpointError), store_failures(name, AgreementError):
        round_ = agreement.begin("leaving", timeout_s=deadlines.EXIT_WAIT_S)
        round_.submit({})
        if agreement.is_coordinator:
            round_.collect(AgreementError)
