"""How ranks come to agree at all: each takes its seat, under a name that no other group of them has ever had.

The job's key-value store outlives its processes: `torchrun --max-restarts` starts workers anew beside the store of
those that died (torch 2.13, `DynamicRendezvousHandler.next_rendezvous`), with all that these had written there. Counted
names would come again, and a rank would take a dead one's word for an answer.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from mcore_ckpt.errors import AgreementError
from mcore_ckpt.ranks.rounds import Agreement, Limit, missing, no_word, patience, poll, store_failures


def rendezvous(name: str, timeout_s: float, topic: str | None = None) -> Agreement:
    """A seat at the job's store, with a client that nobody else waits on; a store of its own for one process.

    Every rank calls it, for the same names in the same order: it waits for all of them.

    Args:
        name: the same on all ranks.
        timeout_s: how long any wait may take, in seconds.
        topic: what for, in messages; None: the name.

    Raises AgreementError if a rank does not come.
    """
    import torch.distributed as dist

    namespace = f"mcore_ckpt/{name}"
    if not (dist.is_available() and dist.is_initialized()):
        return Agreement(dist.HashStore(), 0, 1, namespace, timeout_s)  # type: ignore[attr-defined]
    host: Any = dist.distributed_c10d._get_default_store()
    return rendezvous_at(
        host.clone(), dist.get_rank(), dist.get_world_size(), namespace, timeout_s, topic or name, host
    )


def rendezvous_at(
    store: Any, rank: int, world_size: int, namespace: str, timeout_s: float, topic: str, host: Any = None
) -> Agreement:
    """As `rendezvous`, at a store that ranks without a process group share; the arguments are those of `Agreement`."""
    with store_failures(topic, AgreementError):
        meet = _call if rank == 0 else _answer
        met = meet(store, namespace, rank, world_size, timeout_s, topic)
    return Agreement(store, rank, world_size, f"{namespace}/{met}", timeout_s, host)


def _call(store: Any, namespace: str, rank: int, world_size: int, timeout_s: float, topic: str) -> str:
    """Rank 0: says a name that is new, and goes on when all have answered to it."""
    name = uuid.uuid4().hex
    store.set(f"{namespace}/call", name)
    here = [_here(namespace, name, other) for other in range(1, world_size)]
    if here:
        if not poll(lambda: store.check(here), world_size, time.monotonic() + timeout_s, Limit()):
            absent = set(missing(store, here))
            silent = [rank for rank, key in enumerate(here, 1) if key in absent]
            raise AgreementError(no_word(topic, silent, timeout_s))
        words = [word.decode() for word in store.multi_get(here)]
        heard = [_heard(namespace, name, other, word) for other, word in enumerate(words, 1)]
        store.multi_set(heard, ["1"] * len(heard))
    return name


def _answer(store: Any, namespace: str, rank: int, world_size: int, timeout_s: float, topic: str) -> str:
    """Other ranks: answers until rank 0 has heard it. What it has heard before was another process's answer."""
    call, name, heard = f"{namespace}/call", "", ""

    def met() -> bool:
        nonlocal name, heard
        called = store.get(call).decode() if store.check([call]) else name
        # After the call: who calls anew has heard all that answered before.
        if heard and store.check([heard]):
            return True
        if called != name:
            name, word = called, uuid.uuid4().hex
            heard = _heard(namespace, name, rank, word)
            store.set(_here(namespace, name, rank), word)
        return False

    seconds = patience(rank, timeout_s)
    if not poll(met, world_size, time.monotonic() + seconds, Limit()):
        raise AgreementError(
            f"{topic}: rank {rank} waited {seconds:g} s for rank 0, which is dead or stuck, or waits for another rank"
        )
    for key in (heard, _here(namespace, name, rank)):
        store.delete_key(key)
    return name


def _here(namespace: str, name: str, rank: int) -> str:
    return f"{namespace}/{name}/here/{rank}"


def _heard(namespace: str, name: str, rank: int, word: str) -> str:
    return f"{namespace}/{name}/heard/{rank}/{word}"
