"""What every load does on all ranks together: plan, check that nothing is left over, fill.

A load of this package's own checkpoint (`load.py`) and of a HuggingFace folder (`huggingface.py`) are both these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from mcore_ckpt.formats.locate import Locator
from mcore_ckpt.load.broadcast import Batch, batches, broadcast, to_read
from mcore_ckpt.load.fill import TensorFill
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.ranks.topology import Replicas
from mcore_ckpt.sharding.plan import ShardKey, runs

Plan = TypeVar("Plan")

Runs = list[tuple[int, int]]
"""Positions in a reader's list of names, as inclusive runs: short enough to send to rank 0."""


def plan_together(
    agreement: Agreement,
    topic: str,
    plan: Callable[[], tuple[Plan, Record]],
    check: Callable[[Plan, Sequence[Record]], None],
) -> Plan:
    """Every rank plans; rank 0 checks what the ranks report. Nothing of the training state changes.

    Args:
        agreement: this rank's agreement.
        topic: what is being done, for messages.
        plan: returns this rank's plan, and what rank 0 has to know of it.
        check: on rank 0, raises if the ranks' reports do not fit together.

    Raises:
        CheckpointError: what `plan` or `check` raised on any rank; the same type on all.
    """
    plans: list[Plan] = []

    def work() -> Record:
        own, report = plan()
        plans.append(own)
        return report

    def combine(reports: Sequence[Record]) -> Record:
        check(plans[0], reports)
        return {}

    decide(agreement, topic, work, combine)
    return plans[0]


def fill_together(
    agreement: Agreement,
    replicas: Replicas,
    topic: str,
    fills: Sequence[TensorFill],
    fill: Callable[[Sequence[TensorFill]], int],
) -> int:
    """Every rank fills the tensors that it reads itself; replicas get the others by broadcast. Returns the bytes read.

    Args:
        agreement, replicas: this rank's.
        topic: what is being done, for messages.
        fills: all tensors that this rank wants.
        fill: fills tensors from the checkpoint, and returns how many bytes it has read.

    Raises:
        CheckpointError: what `fill` raised on any rank, the same type on all. Tensors may have changed.
    """
    nbytes: list[int] = []
    shared: list[Batch] = []

    def work() -> Record:
        if torch.cuda.is_available():
            # Kernels that still use the old state must not meet the new one.
            torch.cuda.synchronize()
        with torch.no_grad():
            shared.extend(batches(fills))
            nbytes.append(fill(to_read(fills, shared, agreement.rank)))
        return {}

    decide(agreement, topic, work, lambda _: {})
    broadcast(shared, replicas)
    return nbytes[0]


def positions_taken(locator: Locator, keys: Iterable[ShardKey]) -> Runs:
    """The positions of the tensors that this rank takes, under the names that the checkpoint has for them."""
    stored = (locator.stored_key(key) for key in keys)
    return runs(locator.reader.names[key.name] for key in stored if key is not None)


def names_left_over(locator: Locator, taken: Iterable[Iterable[tuple[int, int]]]) -> list[str]:
    """The tensors of the checkpoint that no rank takes: they would be lost without a word.

    Args:
        locator: any rank's.
        taken: the `positions_taken` of each rank.
    """
    positions = {at for runs_of_rank in taken for first, last in runs_of_rank for at in range(first, last + 1)}
    return [name for name, position in locator.reader.names.items() if position not in positions]
