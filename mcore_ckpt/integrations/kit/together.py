"""Lets rank 0 decide for all ranks, where each rank alone might see another state of a shared file system."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcore_ckpt.ranks import agree, rendezvous


def decided_by_rank_0(name: str, topic: str, question: Any, answer: Callable[[], Any], timeout_s: float) -> Any:
    """Returns rank 0's answer on every rank. Every rank calls it with the same question.

    Args:
        name: a name for the meeting of the ranks, the same on all of them.
        topic: what is being decided, for messages.
        question: a plain JSON value that is the same on all ranks.
        answer: returns a plain JSON value. It is called only on rank 0.
        timeout_s: how long a rank waits for the others, in seconds.

    Raises AgreementError: the questions differ, or a rank is missing.
    """
    return agree(rendezvous(name, timeout_s, topic), topic, {"question": question}, lambda: {"is": answer()})["is"]
