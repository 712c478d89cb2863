"""Lets ranks meet under a name that no earlier group of ranks has used.

The job's key-value store outlives the job's processes. `torchrun --max-restarts` starts new workers with the store of
the dead workers (torch 2.13, `DynamicRendezvousHandler.next_rendezvous`). This store still contains all keys of the
dead workers. With numbered names, a name would occur again after a restart, and a rank would accept a dead rank's
message as an answer.

So names are random: rank 0 publishes a new name, and goes on when all other ranks have answered.

All keys are deleted in the end. Each rank deletes its submission when it begins a later round. Rank 0 can be several
failed rounds ahead of the other ranks, so it deletes the outcome of a round only when all ranks have submitted to a
later round. The last rank that closes deletes all other keys.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from mcore_ckpt.errors import AgreementError
from mcore_ckpt.ranks.key_value_store import (
    WaitLimit,
    all_there,
    missing,
    poll,
    silence_of,
    silence_of_rank_0,
    store_failures,
    timeout_of,
    value_of,
)
from mcore_ckpt.ranks.own_store import OwnStore
from mcore_ckpt.ranks.process_groups import has_process_group
from mcore_ckpt.ranks.rounds import Agreement


def rendezvous(name: str, timeout_s: float, topic: str | None = None) -> Agreement:
    """Waits for all ranks of the job, and returns the `Agreement` that connects this rank with them.

    All ranks must call this function with the same names in the same order. The agreement has its own client of the
    job's store, so nothing else waits on that client. In a process without a process group, the agreement has its own
    store.

    Args:
        name: the name of the rendezvous, the same on all ranks.
        timeout_s: the timeout of each wait, in seconds.
        topic: the purpose of the rendezvous, for messages. The default is the name.

    Raises AgreementError if a rank does not arrive before the timeout.
    """
    import torch.distributed as dist

    if not has_process_group():
        return single_process_agreement(name, timeout_s)
    namespace = f"mcore_ckpt/{name}"
    host: Any = dist.distributed_c10d._get_default_store()
    return rendezvous_at(
        host.clone(), dist.get_rank(), dist.get_world_size(), namespace, timeout_s, topic or name, host
    )


def single_process_agreement(name: str, timeout_s: float) -> Agreement:
    """Returns an agreement with this process as its only rank, even if the process belongs to a process group."""
    return Agreement(OwnStore(), 0, 1, f"mcore_ckpt/{name}", timeout_s)


def rendezvous_at(
    store: Any,
    rank: int,
    world_size: int,
    namespace: str,
    timeout_s: float,
    topic: str,
    host: Any = None,
    start_s: float | None = None,
) -> Agreement:
    """Waits for all ranks over a given store, and returns the `Agreement` that connects this rank with them.

    Needs no process group. `topic` is for messages. `start_s` is how many seconds to wait for ranks that have not
    started yet; None: `timeout_s`. The other arguments are as in `Agreement`.
    """
    with store_failures(topic, AgreementError):
        meet = _meet_other_ranks if rank == 0 else _meet_rank_0
        name = meet(store, namespace, rank, world_size, timeout_s if start_s is None else start_s, topic)
    return Agreement(store, rank, world_size, f"{namespace}/{name}", timeout_s, host)


def _meet_other_ranks(store: Any, namespace: str, rank: int, world_size: int, timeout_s: float, topic: str) -> str:
    """Runs on rank 0: publishes a new name, waits until all other ranks have answered, and confirms each answer."""
    name = uuid.uuid4().hex
    answers = [_answer_key(namespace, name, other) for other in range(1, world_size)]
    if not answers:
        return name
    store.set(f"{namespace}/call", name)
    try:
        if not poll(all_there(store, answers), 1, time.monotonic() + timeout_s, WaitLimit()):
            absent = set(missing(store, answers))
            silent = [rank for rank, key in enumerate(answers, 1) if key in absent]
            raise AgreementError(silence_of(topic, silent, timeout_s))
        words = [word.decode() for word in store.multi_get(answers)]
        heard = [_heard_key(namespace, name, other, word) for other, word in enumerate(words, 1)]
        store.multi_set(heard, ["1"] * len(heard))
    finally:
        store.delete_key(f"{namespace}/call")
    return name


def _meet_rank_0(store: Any, namespace: str, rank: int, world_size: int, timeout_s: float, topic: str) -> str:
    """Answers the new name that rank 0 has published, and waits until rank 0 confirms the answer. Returns the name.

    All ranks except rank 0 run this function. The answer contains a random word, and rank 0 confirms that word. So a
    rank ignores a confirmation that was meant for a dead process. If rank 0 publishes another name, the rank answers
    again.
    """
    call, name, heard = f"{namespace}/call", "", ""

    def met() -> bool:
        nonlocal name, heard
        value = value_of(store, call)
        called = name if value is None else value.decode()
        # Read the name before the confirmation. Rank 0 confirms all answers to a name before it publishes the next
        # name. So a rank that has seen the next name also finds the confirmation of its answer to the previous name.
        if heard and store.check([heard]):
            return True
        if called != name:
            if heard:
                # This rank has answered a name of a dead rank 0. Nobody else deletes that answer.
                store.delete_key(_answer_key(namespace, name, rank))
            name, word = called, uuid.uuid4().hex
            heard = _heard_key(namespace, name, rank, word)
            store.set(_answer_key(namespace, name, rank), word)
        return False

    seconds = timeout_of(rank, timeout_s)
    try:
        if not poll(met, world_size, time.monotonic() + seconds, WaitLimit()):
            raise AgreementError(silence_of_rank_0(topic, rank, seconds))
    finally:
        for key in (heard, _answer_key(namespace, name, rank)):
            store.delete_key(key)
    return name


def _answer_key(namespace: str, name: str, rank: int) -> str:
    return f"{namespace}/{name}/here/{rank}"


def _heard_key(namespace: str, name: str, rank: int, word: str) -> str:
    return f"{namespace}/{name}/heard/{rank}/{word}"
