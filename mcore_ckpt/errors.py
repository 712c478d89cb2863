"""Defines the errors that this package raises, and the records in which ranks send errors to each other.

Every message says what happened, where (file, tensor, rank), and what to do. If an error happens on one rank, all ranks
raise an error of the same type, so that a trainer can catch the error on any rank.

All errors of public calls derive from CheckpointError:

| error | raised by |
|---|---|
| CheckpointNotFoundError | `load`, `recover`, `resumable_steps`, `pin`, `unpin`, `set_metrics`, `load_hf` |
| CheckpointCorruptError | `load`, `recover`, `load_hf` |
| CheckpointMismatchError | `CheckpointManager(...)` with `hf_model`, `load`, `recover`, `load_hf` |
| UnsupportedError | `CheckpointManager(...)`, `save`, `load`, `load_hf` |
| NoRoomError | `save`, and the tools that write a checkpoint or a model; it is also a CommitError |
| CommitError | `save`, `SaveHandle.wait`; after an async save also the next `save`, `load`, `wait` or `close` |
| HungDiskError | every call that uses the disk; it is also a CommitError |
| BusyError | `save` |
| LockedError | `save`, and the tools that write a step: `reshard`, `collect`, `branch` and `convert` |
| RemoteError | `CheckpointManager(...)`, `load`, `latest_step`, `remote_steps`, `recover`, `load_hf` |
| AgreementError | `CheckpointManager(...)`, `load`, `agree`, `recover` |
| InvalidArgumentError | every public call; it is also a ValueError |
| InvalidTypeError | every public call; it is also a TypeError |
| InvalidStateError | `CheckpointManager(...)`, its calls in a forked child, `PreemptionGuard`; also a RuntimeError |

Public calls also raise these built-in errors:

- TimeoutError: `SaveHandle.wait(timeout)`. The save continues, so nothing has failed.
- MemoryError: `save` and `load`, on the rank that has too little memory. The other ranks raise a CommitError or
  AgreementError.
- OSError: `pin`, `unpin` and `set_metrics`, if they cannot write; `resumable_steps`, if the root cannot be read.
- KeyboardInterrupt, SystemExit and other exceptions of signal handlers: every call, on the rank that got the signal.
  The other ranks raise a CommitError or AgreementError at once.
- Errors of functions that the caller passes in, such as the clock of a Schedule.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, TypeVar

from mcore_ckpt.interrupts import chain_of, is_interrupt
from mcore_ckpt.redaction import redacted


class CheckpointError(Exception):
    """Base class of all errors of this package. A message may quote URLs and options, so secrets are removed from it.

    Attributes:
        names_rank: True if the message already begins with the rank on which the error happened.
        may_pass: True if the same call may succeed later: for example, a rank was late, or a file could not be opened.
    """

    names_rank = False
    may_pass = False

    def __init__(self, *values: object) -> None:
        super().__init__(*(redacted(value) if isinstance(value, str) else value for value in values))


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint at the given place."""


class CheckpointCorruptError(CheckpointError):
    """A file of a checkpoint is missing, or its bytes differ from the saved ones."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is intact but does not fit this model, optimizer or parallel layout."""


class UnsupportedError(CheckpointError):
    """The package does not support something, which the message names. Nothing has been saved or changed."""


class CommitError(CheckpointError):
    """A save has produced no checkpoint because a rank failed, died or was late. The previous checkpoint is intact."""


class NoRoomError(CommitError):
    """The files would not fit on the disk, or into a quota. Nothing has been written, and older checkpoints stay."""


class HungDiskError(CommitError):
    """The file system hangs: a call has not returned for `timeout_s`. Nothing has been committed, or loaded."""

    may_pass = True


class BusyError(CheckpointError):
    """`save` was called while another save is under way, and `if_busy` is "raise". Nothing has been done."""


class LockedError(CheckpointError):
    """Another trainer, or a tool, writes the same role below the same root. Nothing has been done."""


class RemoteError(CheckpointError):
    """A remote store or a model hub does not answer, or answers with an error. Local checkpoints are untouched."""


class AgreementError(CheckpointError):
    """Outside a save, the ranks could not agree: a rank is missing or late, or the key-value store is gone."""

    may_pass = True


class InvalidArgumentError(CheckpointError, ValueError):
    """An argument has a value that is not allowed, or two arguments contradict each other. Nothing has been done."""


class InvalidTypeError(CheckpointError, TypeError):
    """An argument has a type that the call does not accept. Nothing has been done."""


class InvalidStateError(CheckpointError, RuntimeError):
    """The call needs something that is not set up yet, such as megatron's parallel state. Nothing has been done."""


_BY_NAME: dict[str, type[CheckpointError]] = {
    name: each for name, each in globals().items() if isinstance(each, type) and issubclass(each, CheckpointError)
}

# An OSError with one of these numbers is raised again at each try, until somebody changes the folder.
_STAYS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def may_pass(error: BaseException) -> bool:
    """True if the call that has raised this error may succeed later."""
    if any(map(is_interrupt, chain_of(error, None))):
        return False  # the rank that a signal has interrupted does not come back
    if isinstance(error, CheckpointError):
        return error.may_pass
    return isinstance(error, OSError) and error.errno not in _STAYS


Error = TypeVar("Error", bound=CheckpointError)


def reworded(error: Error, message: str) -> Error:
    """Returns an error like `error` with another message."""
    other = type(error)(message)
    other.names_rank, other.may_pass = error.names_rank, error.may_pass
    return other


def to_record(error: BaseException, rank: int) -> dict[str, Any]:
    """Turns an error into strings that can be sent to other ranks.

    If the error's type is not of this module, the message contains the name of the type, and no secrets.
    """
    name = type(error).__name__
    text = str(error) if name in _BY_NAME else redacted(f"{name}: {error}")
    if not getattr(error, "names_rank", False):
        text = f"rank {rank}: {text}"
    # A message can contain a file name with bytes that are not valid text. Escape these bytes, so that the message can
    # be sent.
    message = text.encode(errors="backslashreplace").decode()
    return {"type": name, "message": message, "may_pass": may_pass(error)}


def from_record(record: Mapping[str, Any], default: type[CheckpointError]) -> CheckpointError:
    """Makes the error that a record describes.

    If the described error's type is not of this module, makes an error of the type `default`.
    """
    error = _BY_NAME.get(record["type"], default)(record["message"])
    error.names_rank = True
    error.may_pass = record.get("may_pass", error.may_pass)
    return error
