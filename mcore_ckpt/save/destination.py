"""Defines the protocol `Destination`: where the saves of a manager go.

A manager has one destination. `root.Root` saves to the shared root, `nodes.Nodes` to the nodes' own disks. A new place,
such as an object store, needs only a new class: `save.save_step` does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mcore_ckpt.checkpoint.manifest import Manifest, WrittenFile
from mcore_ckpt.checkpoint.placement import Placement
from mcore_ckpt.fast.copies import CopyHandle
from mcore_ckpt.fast.drains import DrainHandle
from mcore_ckpt.io.disk_space import Need
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.save.rank_reports import FileReport
from mcore_ckpt.save.save_times import SaveTimes
from mcore_ckpt.steps.space_watch import Saving
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.transaction import Attempt
from mcore_ckpt.steps.upload_queue import UploadHandle

# The rank that has written a file, and the rank's report on the file.
Written = tuple[int, FileReport]


@dataclass(frozen=True, eq=False)
class Following:
    """The work that a commit starts on this rank: an upload, copies, deletions.

    Attributes:
        upload: the upload to the remote store; None without a store, and on all ranks except rank 0.
        copies: the copies on other nodes; None without a fast tier.
        drain: the copy to the root; None if the step is not durable, and without a fast tier.
        delete: deletes the steps that the commit has made too old. The deletion may take long.
        deletes: the steps in the root that `delete` removes, or that lose their optimizer.
    """

    upload: UploadHandle | None = None
    copies: CopyHandle | None = None
    drain: DrainHandle | None = None
    delete: Callable[[], None] = lambda: None
    deletes: frozenset[int] = frozenset()


class Place(Protocol):
    """The folders of one save at its destination, on this rank.

    `attempt` has the save's id, staging folder and final folder.
    """

    @property
    def attempt(self) -> Attempt: ...

    def capturing(self) -> AbstractContextManager[None]:
        """Returns a context to enter while the state is copied. An error of the context is raised on all ranks."""

    def prepare(self) -> None:
        """Makes this rank's staging folder, if `open` has not made it. Raises OSError and CheckpointError."""

    def await_opening(self, topic: str) -> None:
        """Waits for work that `open` has not waited for. Every rank calls this method. Raises what `open` raises."""

    def check(self, files: Sequence[Written], structures: Sequence[Mapping[str, str]]) -> None:
        """Checks, on rank 0, that the reported files are there, and that their parts fit together. Raises CommitError.

        `structures` says what each rank has planned, see `commit.check_structures`.
        """

    def placed(self, files: Sequence[Written]) -> tuple[Sequence[Written], Placement | None]:
        """Returns each file once, and the placement of the files. The placement is None if all ranks see all files."""

    def commit(
        self,
        topic: str,
        write: Callable[[Path], Record],
        describe: Callable[[Sequence[Record]], Manifest],
        times: SaveTimes,
    ) -> list[WrittenFile]:
        """Lets every rank write its files below the staging folder, and commits the files.

        Every rank calls this method. Returns the files that this rank has exported: its part of a HuggingFace model. If
        the save failed, all ranks raise the same type of CheckpointError, and the previous checkpoint stays.

        Args:
            topic: what is being saved, for messages.
            write: writes this rank's files durably, and returns its report (`rank_reports.rank_report`).
            describe: builds, on rank 0, the manifest from the reports of all ranks.
            times: notes when an export has ended.
        """

    def follow(self) -> Following:
        """Begins the work that follows a commit. Every rank calls this method, and waits for no other rank."""


class Destination(Protocol):
    """The destination of one manager's saves. Only rank 0 takes `lock`, which protects the role at the destination.

    `contents` says what a checkpoint at the destination contains, in the words of `save_contents`.
    """

    @property
    def lock(self) -> TrainerLock: ...

    @property
    def contents(self) -> tuple[str, ...]: ...

    def writers_of(self, replicas: Sequence[int]) -> Sequence[tuple[int, ...]]:
        """Groups the replicas of a file. Each group writes one copy of the file together."""

    def folder_of(self, saving: Saving) -> Path:
        """Returns the folder that a checkpoint will be in.

        Raises InvalidArgumentError if this destination cannot have the checkpoint.
        """

    def open(
        self, topic: str, saving: Saving, busy: bool, failure: Record | None, need: Need, parts: Sequence[str]
    ) -> Place:
        """Waits for all ranks, and checks that a save fits. Every rank calls this method.

        For the arguments, see `transaction.open_together`. Raises what `open_together` raises, NoRoomError if the save
        does not fit, and LockedError if the lock belongs to another trainer.
        """

    def rounds_of(self, number: str, opened: Record) -> list[str]:
        """Returns the names of the rounds in which the ranks finish a save, in order.

        A rank that cannot finish the save makes all these rounds fail, so that no other rank waits for that rank.
        `number` is the save's id, `opened` the outcome of the round that opened the save.
        """

    def interrupted(self, attempt: Attempt) -> None:
        """Notes a save that a signal handler has ended on this rank. Other ranks may still be writing."""

    def remove_interrupted(self) -> None:
        """Removes what interrupted saves have left."""

    def loaded(self, manifest: Manifest) -> None:
        """Notes that the training goes on from a checkpoint."""

    def wait(self) -> None:
        """Waits until all work that follows commits has ended."""

    # -- the last save before the machine goes --------------------------------------------------------------

    @property
    def has_nodes(self) -> bool:
        """True if a save can also be committed on the nodes alone."""

    @property
    def has_root(self) -> bool:
        """True if a save can be durable."""

    @property
    def drain_s(self) -> float | None:
        """The longest recent time from a commit until the step was in the root, in seconds; None if unknown."""

    def choose_next(self, durable: bool) -> None:
        """Sets whether the next save is durable. Without this call, the number of saves decides.

        Every rank calls this method. A durable save waits for an earlier step that is being copied to the root
        (`await_drain`).
        """

    def await_drain(self, patience_s: float | None) -> bool:
        """Waits until no step is being copied to the root.

        Returns False if a step is still being copied after `patience_s` seconds. If `patience_s` is None, the wait has
        no limit.
        """

    def await_copies_of(self, step: int, patience_s: float | None) -> bool:
        """Waits until no copy of `step` is under way. Otherwise a new save of `step` would wait for these copies.

        For `patience_s` and the result, see `await_drain`.
        """

    def limit_waits(self, seconds: float, even_later: bool = True) -> None:
        """Limits the waits for other ranks after a commit: each wait ends within `seconds` from now.

        See `Agreement.limit_waits`.
        """
