"""Lets rank 0 decide for all ranks, and lets an error of one rank reach all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from mcore_ckpt.io import DiskWatch
from mcore_ckpt.ranks import Agreement, agree, rendezvous


def decided_by_rank_0(name: str, topic: str, question: Any, answer: Callable[[], Any], timeout_s: float) -> Any:
    """Returns rank 0's answer on every rank, because ranks might see different states of a shared file system.

    Args:
        name: a name for the rendezvous of the ranks.
        topic: what is being decided, for messages.
        question: JSON values, which must be the same on all ranks.
        answer: returns JSON values. Only rank 0 calls `answer`, on another thread (see `io/disk_watch.py`). That thread
            does not have this thread's torch modes, current GPU and context variables.
        timeout_s: how long a rank waits for the other ranks, in seconds.

    Raises AgreementError: the questions differ, or a rank is missing.
    """
    with _meeting(name, topic, timeout_s) as agreement:
        return agree(agreement, topic, {"question": question}, lambda: {"is": answer()})["is"]


def on_all_ranks(name: str, topic: str, work: Callable[[], None], timeout_s: float) -> None:
    """Calls `work` on this rank, and returns when `work` has returned on all ranks. Every rank calls this function.

    The arguments are as in `decided_by_rank_0`. `work` must not wait for another rank.

    Raises:
        CheckpointError: `work` raised it on some rank. All ranks raise the same error.
        AgreementError: a rank is missing, or `work` raised another exception.
    """

    def request() -> dict[str, str]:
        work()
        return {}

    with _meeting(name, topic, timeout_s) as agreement:
        agree(agreement, topic, request, dict)


@contextmanager
def _meeting(name: str, topic: str, timeout_s: float) -> Iterator[Agreement]:
    with closing(rendezvous(name, timeout_s, topic)) as agreement:
        agreement.runner = DiskWatch.of_one_call(timeout_s, agreement.rank)
        yield agreement
