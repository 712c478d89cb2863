"""Runs the phases of a load on all ranks together: plan, check that no tensor is left over, fill.

Both `load.py` (this package's checkpoints) and `huggingface.py` (HuggingFace folders) consist of these phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeVar

import torch

from mcore_ckpt.formats.locate import Locator
from mcore_ckpt.io import _native
from mcore_ckpt.io.device_waits import wait_for_gpu
from mcore_ckpt.load.broadcast import Batch, batches, broadcast, to_read
from mcore_ckpt.load.fill import TensorFill
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, done_before
from mcore_ckpt.ranks.topology import Replicas
from mcore_ckpt.sharding.plan import ShardKey, runs

Plan = TypeVar("Plan")

Runs = list[tuple[int, int]]
"""Positions in a reader's list of names, as inclusive runs (first, last), which are short enough to send to rank 0."""


def plan_together(
    agreement: Agreement,
    topic: str,
    plan: Callable[[], tuple[Plan, Record]],
    check: Callable[[Plan, Sequence[Record]], Record],
) -> tuple[Plan, Record]:
    """Plans on every rank, then checks the reports of all ranks on rank 0. The training state does not change.

    Args:
        agreement: this rank's agreement.
        topic: the name of this round, for messages.
        plan: returns this rank's plan and its report to rank 0.
        check: raises, on rank 0, if the ranks' reports do not fit together. The value that `check` returns goes to all
            ranks.

    Returns this rank's plan, and what `check` has returned.

    Raises CheckpointError: `plan` or `check` raised it on some rank. All ranks raise the same type.
    """
    plans: list[Plan] = []

    def work() -> Record:
        own, report = plan()
        plans.append(own)
        return report

    def combine(reports: Sequence[Record]) -> Record:
        return check(plans[0], reports)

    outcome = decide(agreement, topic, work, combine)
    return plans[0], outcome


def fill_together(
    agreement: Agreement,
    replicas: Replicas,
    topic: str,
    fills: Sequence[TensorFill],
    fill: Callable[[Sequence[TensorFill]], int],
    apply: Callable[[], None] = lambda: None,
) -> int:
    """Fills the tensors that this rank reads and, with `load_replicas="broadcast"`, sends them to the replicas.

    Args:
        agreement: this rank's agreement.
        replicas: the ranks that hold the same tensors as this rank.
        topic: the name of this round, for messages.
        fills: one fill for each tensor that this rank loads.
        fill: fills tensors from the checkpoint and returns the number of bytes read.
        apply: restores the state that is not stored as tensors, once the tensors are filled.

    Returns the number of bytes that this rank has read.

    Raises CheckpointError: `fill` raised it on some rank. All ranks raise the same type. Tensors may have changed.
    """
    shared: list[Batch] = []

    def work() -> int:
        wait_for_gpu(agreement.timeout_s)  # kernels in flight may still read the old state
        try:
            with torch.no_grad():
                shared.extend(batches(fills))
                nbytes = fill(to_read(fills, shared, agreement.rank))
                apply()
            return nbytes
        finally:
            # The read jobs share up to 257 MiB of buffers, pinned if the tensors are on a GPU. Free this memory for the
            # training.
            _native.free_idle_buffers()

    filled = done_before(agreement, work)
    decide(agreement, topic, filled.record, lambda _: {})
    broadcast(shared, replicas)
    return filled.result()


def positions_taken(locator: Locator, keys: Iterable[ShardKey]) -> Runs:
    """Returns the positions, in the checkpoint's list of names, of the tensors that this rank takes."""
    stored = (locator.stored_key(key) for key in keys)
    return runs(locator.reader.names[key.name] for key in stored if key is not None)


def names_left_over(locator: Locator, taken: Iterable[Iterable[tuple[int, int]]]) -> list[str]:
    """Returns the names of the checkpoint's tensors that no rank takes, given the `positions_taken` of each rank.

    The caller must refuse such tensors. Otherwise they are lost silently.
    """
    left = bytearray(b"\1") * len(locator.reader.names)
    for first, last in chain.from_iterable(taken):
        left[first : last + 1] = bytes(last + 1 - first)
    return [name for name, position in locator.reader.names.items() if left[position]]
