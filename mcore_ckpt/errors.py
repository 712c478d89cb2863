"""The errors that this package raises, and their form between ranks.

Every message says what happened, where (file, tensor, rank), and what to do. An error that one rank meets is raised on
all ranks with the same type, so that a trainer can catch it anywhere.

All errors of public calls derive from CheckpointError:

| error | raised by |
|---|---|
| CheckpointNotFoundError | `load`, `recover`, `resumable_steps`, `pin`, `unpin`, `load_hf` |
| CheckpointCorruptError | `load`, `recover`, `load_hf` |
| CheckpointMismatchError | `CheckpointManager(...)` with `hf_model`, `load`, `recover`, `load_hf` |
| UnsupportedError | `CheckpointManager(...)`, `save`, `load`, `load_hf` |
| CommitError | `save`, `SaveHandle.wait`; after an async save also the next `save`, `load`, `wait` or `close` |
| BusyError, LockedError | `save` |
| RemoteError | `CheckpointManager(...)`, `load`, `latest_step`, `remote_steps`, `recover` |
| AgreementError | `CheckpointManager(...)`, `load`, `agree`, `recover` |
| InvalidArgumentError | every public call; it is a ValueError, too |
| InvalidTypeError | `CheckpointManager(...)`, `save`; it is a TypeError, too |
| InvalidStateError | `CheckpointManager(...)`; it is a RuntimeError, too |

These built-in errors come out of public calls as they are:

- TimeoutError: `SaveHandle.wait(timeout)`. The save goes on, so nothing has failed.
- MemoryError: `save` and `load`, on the rank that has no memory. The other ranks raise a CommitError or AgreementError.
- OSError: `pin` and `unpin`, which work on one file of the user's; `resumable_steps`, if the root cannot be read now.
- KeyboardInterrupt and SystemExit: every call that waits.
- The errors of code that the caller hands over, such as the clock of a Schedule.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base class of all errors of this package.

    Attributes:
        names_rank: True if the message begins with the rank that met the error, because rank 0 has passed it on.
    """

    names_rank = False


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint at the place that was named."""


class CheckpointCorruptError(CheckpointError):
    """A file of a checkpoint is missing, cut, foreign, or has wrong bytes."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is intact but does not fit this model, optimizer or parallel layout."""


class UnsupportedError(CheckpointError):
    """The package refuses something by name, before anything is written or changed."""


class CommitError(CheckpointError):
    """A save has produced no checkpoint: a rank failed, died or was late. The previous checkpoint stays."""


class BusyError(CheckpointError):
    """`save` was called while another save is under way, and `if_busy` is "raise". Nothing has been done."""


class LockedError(CheckpointError):
    """Another trainer saves the same role below the same root. Nothing has been done."""


class RemoteError(CheckpointError):
    """A remote store does not answer, or answers with an error. Local checkpoints are untouched."""


class AgreementError(CheckpointError):
    """The ranks could not agree outside a save: one is missing, late, or the key-value store is gone."""


class InvalidArgumentError(CheckpointError, ValueError):
    """An argument has a value that it may not have, or two arguments contradict each other. Nothing has been done."""


class InvalidTypeError(CheckpointError, TypeError):
    """An argument is of a type that the call does not take. Nothing has been done."""


class InvalidStateError(CheckpointError, RuntimeError):
    """The call needs something that is not set up yet, such as megatron's parallel state. Nothing has been done."""


_BY_NAME: dict[str, type[CheckpointError]] = {
    cls.__name__: cls
    for cls in (
        CheckpointError,
        CheckpointNotFoundError,
        CheckpointCorruptError,
        CheckpointMismatchError,
        UnsupportedError,
        CommitError,
        BusyError,
        LockedError,
        RemoteError,
        AgreementError,
        InvalidArgumentError,
        InvalidTypeError,
        InvalidStateError,
    )
}


def to_record(error: BaseException, rank: int) -> dict[str, str]:
    """Turns an error into plain strings that can travel to other ranks. The text keeps the type of a foreign error."""
    name = type(error).__name__
    text = str(error) if name in _BY_NAME else f"{name}: {error}"
    if not getattr(error, "names_rank", False):
        text = f"rank {rank}: {text}"
    # The name of a file may hold bytes that are not text; the message must be sent nevertheless.
    return {"type": name, "message": text.encode(errors="backslashreplace").decode()}


def from_record(record: dict[str, str], default: type[CheckpointError]) -> CheckpointError:
    """Makes the error that a record describes. An error of a foreign type becomes a `default`."""
    error = _BY_NAME.get(record["type"], default)(record["message"])
    error.names_rank = True
    return error
