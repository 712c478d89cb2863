"""Defines positions in the data, and divides them anew for another number of data-parallel ranks.

Each rank puts its own position into `extra_state`, where it is stored as plain values: `{MARK: 1, "kind": ..., "state":
...}`. A load under the same data-parallel size gives each rank its own position back. A load under another size reads
the positions of all saved ranks. Each kind of position has a rule that divides these positions, or refuses to
(docs/how_to/resume.md).

A position belongs to a data-parallel rank, so ranks that differ only in their tensor, context or pipeline place have
the same position. A save compares the fields that must be equal on these ranks (`ShardedPosition.compared`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.errors import CheckpointMismatchError, InvalidArgumentError
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.sample_share import SampleShare, divided_anew

# The key by which a stored position is recognized. Its value is the version of the form.
MARK = "mcore_ckpt.data_position"
_VERSION = 1


@dataclass(frozen=True, eq=False)
class ShardedPosition:
    """The position of one data-parallel rank in the data.

    After a load, the object can also have the positions of all saved ranks.

    Make a position with one of the functions whose names begin with `of`, and pass it to `save` in `extra_state`. The
    `extra_state` that `load` returns contains the position again.

    Attributes:
        kind: the kind of position.
        state: the position of this rank, as plain values. None after a load if no saved position was this rank's own.
        name: where the position is in `extra_state`, for messages.
        rank, size: after a load, the data-parallel rank that loads, and the data-parallel size.
        states: after a load under another data-parallel size, the positions of all saved ranks.

    Example:
        >>> position = ShardedPosition.of_consumed(4096)
        >>> manager.save(100, extra_state={"data": position})  # doctest: +SKIP
        >>> manager.load().extra_state["data"].for_rank()  # doctest: +SKIP
        4096
    """

    kind: str
    state: Any
    name: str = "the data position"
    rank: int = 0
    size: int = 1
    states: tuple[Any, ...] | None = None

    @staticmethod
    def of_consumed(samples: int) -> ShardedPosition:
        """Returns the position of ranks that take turns and take equally many samples, as Megatron's samplers do.

        `for_rank` returns the same number under any data-parallel size.

        Args:
            samples: how many samples all data-parallel ranks together have taken (Megatron's `consumed_samples`).
        """
        return ShardedPosition("consumed", _count("samples", samples))

    @staticmethod
    def of_share(share: SampleShare) -> ShardedPosition:
        """Returns the position of a rank that may have taken more or fewer samples than the other ranks.

        `for_rank` returns a `SampleShare`. Under any sequence of data-parallel sizes, each sample is taken once.

        Args:
            share: the samples that the rank takes, and how many of them it has taken.
        """
        return ShardedPosition("share", {**vars(share), "left": list(share.left)})

    @staticmethod
    def of_streams(offsets: Mapping[str, Any]) -> ShardedPosition:
        """Returns the position of a rank that reads some shards of the data, such as files.

        `for_rank` returns a dict of the same form as `offsets`. Under another size, all shards are sorted by name
        (`shard_2` before `shard_10`) and dealt to the ranks in turn.

        Args:
            offsets: the rank's place in each of its shards, including shards that it has not begun or has finished.
        """
        if not all(isinstance(shard, str) for shard in offsets):
            raise InvalidArgumentError("offsets has names of shards that are no strings")
        return ShardedPosition("streams", dict(offsets))

    @staticmethod
    def of_dataloader(state: Mapping[str, Any]) -> ShardedPosition:
        """Returns the position of torchdata's `StatefulDataLoader`.

        `for_rank` returns the state under the same data-parallel size. Under another size, `for_rank` returns None if
        the loaders of all ranks are at the end of an epoch. In this case, begin the next epoch without a state.
        Otherwise `for_rank` raises an error, because the state of the loader's own sampler cannot be divided.

        Args:
            state: what `loader.state_dict()` returns (torchdata 0.11).
        """
        return ShardedPosition("dataloader", dict(state))

    @staticmethod
    def of_energon(
        workers: Sequence[Any], next_worker: int, micro_batch_size: int | None, has_workers: bool = True
    ) -> ShardedPosition:
        """Returns the position of Megatron-Energon's loader, as `integrations.energon.position_of` makes it.

        `for_rank` returns a dict of these four arguments. Under another data-parallel size, the workers of all ranks
        are put together in order and divided, as `energon checkpoint redist` (7.4) does. So the total number of workers
        stays the same, and must be divisible by the new number of ranks.

        Args:
            workers: the states of the rank's workers, as plain values.
            next_worker: the worker that gives the next sample.
            micro_batch_size: the micro batch size, if the loader has one.
            has_workers: False if the loader reads in the trainer's process. Then `workers` has one state.
        """
        state = {"workers": list(workers), "next_worker": next_worker, "micro_batch_size": micro_batch_size}
        return ShardedPosition("energon", {**state, "has_workers": has_workers})

    @property
    def record(self) -> dict[str, Any]:
        """The form in which the position is stored.

        After a load under another size, the record has the positions of all saved ranks.
        """
        ranks = {} if self.states is None else {"ranks": list(self.states)}
        return {MARK: _VERSION, "kind": self.kind, "state": self.state, **ranks}

    @property
    def compared(self) -> str:
        """A digest of the fields that must be equal on ranks of the same data-parallel place."""
        known = _KINDS[self.kind].compared(self.state)
        return hashlib.sha256(repr(known).encode()).hexdigest()[:16]

    def for_rank(self, rank: int | None = None, size: int | None = None, workers: int | None = None) -> Any:
        """Returns the position of a data-parallel rank.

        The description of the function that made the position (`of_...`) says what `for_rank` returns.

        Args:
            rank, size: the data-parallel rank and size; None for the rank and size of the load.
            workers: for a position of `of_dataloader`, how many workers the loader has. A number other than the saved
                number counts as another data-parallel size. If `workers` is None, only torchdata compares the numbers,
                and refuses another number.

        Raises:
            CheckpointMismatchError: positions of this kind cannot be divided, or these positions cannot be divided
                among `size` ranks.
            InvalidArgumentError: `rank` is not below `size`, or the positions of other ranks have not been loaded,
                because the data-parallel size is the saved one.
        """
        rank, size = self.rank if rank is None else rank, self.size if size is None else size
        if not 0 <= rank < size:
            raise InvalidArgumentError(f"rank is {rank} of {size}: use a data-parallel rank below its size")
        if self.states is None and (rank, size) != (self.rank, self.size):
            raise InvalidArgumentError(
                f"{self.name}: only the position of data-parallel rank {self.rank} of {self.size} was loaded, not that "
                f"of {rank} of {size}"
            )
        states, saved = ([self.state], size) if self.states is None else (self.states, len(self.states))
        kind, own = _KINDS[self.kind], states[rank % len(states)]
        has_same_workers = workers is None or kind.workers(own) in (None, workers)
        if size == saved and has_same_workers:
            return kind.same(own)
        try:
            return kind.divided(states, rank, size)
        except (CheckpointMismatchError, InvalidArgumentError) as error:
            asked = f"was saved on {saved} data-parallel ranks, and is wanted on {size}"
            if not has_same_workers:
                asked = f"was saved with {kind.workers(own)} workers, and is wanted for {workers}"
            raise CheckpointMismatchError(f"{self.name} ({self.kind}) {asked}: {error}") from None


def of_record(record: Mapping[str, Any], name: str, rank: int, size: int) -> ShardedPosition:
    """Returns a stored position. Raises ValueError if this package does not know the position's kind or version."""
    kind, ranks = record.get("kind"), record.get("ranks")
    if record[MARK] != _VERSION or kind not in _KINDS or "state" not in record:
        raise ValueError(f"{name} is a data position of a kind that this mcore_ckpt does not know: upgrade it")
    states = None if ranks is None else tuple(ranks)
    return ShardedPosition(str(kind), record["state"], name, rank, size, states)


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgumentError(f"{name} is {value!r}: use a whole number of 0 or more")
    return value


# -- the kinds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """The operations on the positions of one kind.

    Attributes:
        same: under the saved size, makes the result of `for_rank` from a rank's state.
        divided: under another size, makes the result of `for_rank` from three arguments: the states of all ranks, the
            new rank and the new size. Raises CheckpointMismatchError or InvalidArgumentError.
        compared: returns the part of a state that must be equal on replicas.
        workers: returns the number of workers whose states are in a rank's state; None if that number may change.
    """

    same: Callable[[Any], Any]
    divided: Callable[[Sequence[Any], int, int], Any]
    compared: Callable[[Any], Any]
    workers: Callable[[Any], int | None] = lambda state: None


def _consumed(states: Sequence[int], rank: int, size: int) -> int:
    if len(set(states)) > 1:
        raise CheckpointMismatchError(
            f"by the saved ranks, all ranks together have consumed {min(states)} to {max(states)} samples, not one "
            "number: use ShardedPosition.of_share for ranks that take different numbers of samples"
        )
    return states[0]


def _share(state: Mapping[str, Any]) -> SampleShare:
    return SampleShare(**{**state, "left": tuple(state["left"])})


def _divided_share(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> SampleShare:
    return divided_anew(list(map(_share, states)), rank, size)


def _dealt_streams(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    owner: dict[str, int] = {}
    for number, state in enumerate(states):
        for shard in state:
            if owner.setdefault(shard, number) != number:
                raise CheckpointMismatchError(f"ranks {owner[shard]} and {number} both read the shard {shard!r}")
    return {shard: states[owner[shard]][shard] for shard in sorted(owner, key=natural_order)[rank::size]}


def _next_epoch(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> None:
    within = [number for number, state in enumerate(states) if state.get("_iterator_finished") is not True]
    if within:
        raise CheckpointMismatchError(
            f"rank {within[0]} is within an epoch, and the state of the loader's own sampler cannot be divided: load "
            "the step with the saved number of ranks and workers, or save at the end of an epoch"
        )


def _workers_of_dataloader(state: Mapping[str, Any]) -> int:
    # In torchdata 0.11, only the state of a loader with workers has a `_snapshot`.
    return int(state["_snapshot"]["_main_snapshot"]["_num_workers"]) if "_snapshot" in state else 0


def _divided_energon(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    if not all(state["has_workers"] for state in states):
        raise CheckpointMismatchError("a loader without workers has one state for each rank, which cannot be divided")
    counts = {len(state["workers"]) for state in states}
    batches = {state["micro_batch_size"] for state in states}
    if len(counts) > 1 or len(batches) > 1:
        raise CheckpointMismatchError("the ranks have different numbers of workers, or different micro batch sizes")
    workers = [worker for state in states for worker in state["workers"]]
    if len(workers) % size:
        raise CheckpointMismatchError(
            f"the {len(workers)} workers of all ranks cannot be divided evenly, and nothing can divide the state of a "
            f"worker: use a number of ranks that divides {len(workers)}"
        )
    count = len(workers) // size
    return {
        "workers": workers[rank * count : (rank + 1) * count],
        "next_worker": 0,
        "micro_batch_size": batches.pop(),
        "has_workers": True,
    }


_KINDS: Mapping[str, _Kind] = {
    "consumed": _Kind(lambda state: state, _consumed, lambda state: state),
    "share": _Kind(_share, _divided_share, lambda state: sorted(state.items())),
    "streams": _Kind(dict, _dealt_streams, lambda state: sorted(state.items())),
    # Only `_iterator_finished` is compared, because loaders of replicas differ in other fields: the seeds of the
    # workers, the place of the last snapshot.
    "dataloader": _Kind(dict, _next_epoch, lambda state: state.get("_iterator_finished"), _workers_of_dataloader),
    "energon": _Kind(dict, _divided_energon, lambda state: (len(state["workers"]), state["micro_batch_size"])),
}
