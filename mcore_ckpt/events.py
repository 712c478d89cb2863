"""Defines the events that a CheckpointManager sends to its listeners.

A listener is anything that can be called with one event. `CheckpointConfig(listeners=[...])` takes listeners, and
`mcore_ckpt.integrations.listeners` has ready-made ones. Events hold only numbers, strings and paths, so a listener may
keep an event, pickle it or send it elsewhere.

| event | told by | when |
|---|---|---|
| Started | every rank | a save has begun: `save` was called, and its arguments are allowed |
| Captured | every rank | all of this rank's state has been read, so nothing of the training is needed any more |
| Written | every rank | this rank's files are on the disk |
| Committed | every rank | the checkpoint is in its place: the save has succeeded |
| Skipped | every rank | `save` has done nothing, because an earlier save is under way (`if_busy="skip"`) |
| Failed | every rank (an upload: rank 0) | a save, load or upload has failed |
| Loaded | every rank | a load has succeeded |
| Deleted | rank 0 | an old step is gone from the local disk or the remote store, because retention has deleted it |
| Uploaded | rank 0 | a checkpoint is complete in the remote store |

Each rank tells only its own listeners, with its own bytes and times: nothing is sent between ranks. Each Started is
followed by exactly one Committed, Failed or Skipped of the same step, unless the process dies. A call that is refused
for its arguments has no event. Calls that need no manager, such as `load_hf` and `mcore-ckpt prune`, have no listeners
and so no events. With a fast tier, Committed means committed on the nodes. Copies to other nodes and to the root, and
deletions from the nodes' folders, have no events; `SaveHandle.copies` and `SaveHandle.drain` report the copies.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from mcore_ckpt.redaction import redacted


@dataclass(frozen=True, kw_only=True)
class Event:
    """The fields of all events.

    Attributes:
        step: the step. None for a load that failed before it had chosen a checkpoint.
        role: the role of the manager.
        rank: the rank that tells the event.
        path: the folder of the checkpoint (of the step, if Deleted), or its URL in the remote store. For a load that
            failed without naming a path: the root. With a fast tier, saves and loads give the folder on this node.
        time: when the event happened, in seconds since the epoch, by this host's clock.
    """

    step: int | None
    role: str
    rank: int
    path: Path | str
    time: float


Listener: TypeAlias = Callable[[Event], object]
"""A function, or another callable object, that takes one event. The value that it returns is ignored."""


@dataclass(frozen=True)
class Phase:
    """One part of a save on one rank. `copy` and `write` can overlap; the other phases follow each other.

    Attributes:
        name: `wait` (for an earlier save, or for the deletion of a step), `plan` (with the ranks' first round), `copy`,
            `write`, `export` (only with `hf_model`) or `commit` (with the wait for slower ranks).
        start: when the phase began, in seconds since the epoch.
        seconds: how long the phase took.
    """

    name: str
    start: float
    seconds: float


@dataclass(frozen=True)
class ErrorText:
    """An error as text without secrets. The error itself would keep the failed call's variables in memory.

    Attributes:
        type: the full name of the error's class, such as mcore_ckpt.errors.CommitError.
        message: the error's message.
        stacktrace: the error's traceback, as Python prints it. Empty for uploads, because their tracebacks could
            contain a secret.
    """

    type: str
    message: str
    stacktrace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> ErrorText:
        """Describes an error with its traceback. Raises nothing, whatever the error's own `__str__` does."""
        try:
            message, trace = str(error), "".join(traceback.format_exception(error))
        except Exception:
            message, trace = "the error has no readable message", ""
        return cls(_full_name(type(error)), redacted(message), redacted(trace))

    @classmethod
    def redacted(cls, error: BaseException, message: str) -> ErrorText:
        """Describes an error by another message, because the error's own text may contain a password."""
        return cls(_full_name(type(error)), message)


def _full_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """A save has begun. `time` is when `save` was called."""


@dataclass(frozen=True, kw_only=True)
class Captured(Event):
    """All of this rank's state has been read, into host memory or directly onto the disk.

    Attributes:
        nbytes: the bytes of tensors that were read.
        seconds: how long the reading took.
    """

    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Written(Event):
    """This rank's files are on the disk, but do not yet count as a checkpoint.

    Attributes:
        nbytes: the bytes that this rank wrote. If several ranks write one file, only this rank's part counts. The
            HuggingFace model is written after this event.
        seconds: the time from the first write until all files were on the disk.
    """

    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Committed(Event):
    """A save has succeeded on all ranks.

    Attributes:
        nbytes: the bytes that this rank wrote.
        seconds: the time from the call of `save` to the commit.
        stall_s: how long `save` held up the training.
        phases: the phases of the save, in the order in which they began.
    """

    nbytes: int
    seconds: float
    stall_s: float
    phases: tuple[Phase, ...]


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """A save was skipped on all ranks, because an earlier save is under way. The earlier save goes on.

    Attributes:
        reason: a text that says that an earlier save is under way, and on which rank.
        seconds: how long `save` held up the training.
    """

    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """A save, load or upload has failed. After a save, the previous checkpoint is intact.

    An upload that failed because of the store is tried again after the next commit, so there can be several Failed
    events for one checkpoint. Their `step` is the newest step that was to be uploaded.

    Attributes:
        operation: what has failed.
        error: the error that the caller gets.
        seconds: the time from the call (of an upload: from the beginning of the try) to the failure.
        phases: for a save, the phases that had begun. The last of these phases failed.
    """

    operation: Literal["save", "load", "upload"]
    error: ErrorText
    seconds: float
    phases: tuple[Phase, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Loaded(Event):
    """A load has succeeded on all ranks.

    Attributes:
        nbytes: the bytes that this rank read from tensor files.
        seconds: the time from the call of `load` until all ranks have agreed that they are done.
        skipped: for each newer checkpoint that was not loaded, the reason; the newest first.
        rounded: how many tensors of this rank were rounded, for each pair of dtypes, as in LoadReport.
    """

    nbytes: int
    seconds: float
    skipped: tuple[str, ...] = ()
    rounded: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Deleted(Event):
    """An old step has been deleted, with all its roles.

    Attributes:
        seconds: how long the deletion took.
        place: where the step was deleted. The step may still be in the other place.
    """

    seconds: float
    place: Literal["local", "remote"] = "local"


@dataclass(frozen=True, kw_only=True)
class Uploaded(Event):
    """A checkpoint is complete in the remote store.

    Attributes:
        nbytes: the size of the checkpoint's files in bytes.
        seconds: how long the successful try took.
    """

    nbytes: int
    seconds: float
