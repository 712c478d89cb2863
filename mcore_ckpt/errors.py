"""The errors this package raises, and their form between ranks.

Every message says which file, tensor and rank, and what to do. An error one rank meets is raised on all
ranks with the same type, so that a trainer can catch it anywhere.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of all errors of this package.

    `names_rank` is set on errors that came from a rank by way of rank 0: the message begins with it.
    """

    names_rank = False


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint where one was asked for."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint has a file that is missing, cut, foreign or has wrong bytes."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is sound but does not fit this model, optimizer or parallel layout."""


class UnsupportedError(CheckpointError):
    """Something this package refuses by name, before anything is written or changed."""


class CommitError(CheckpointError):
    """A save did not become a checkpoint: a rank failed, died or was late. The previous checkpoint stays."""


class BusyError(CheckpointError):
    """A save was asked for while another one is under way, and `if_busy` is "raise". Nothing has been done."""


class LockedError(CheckpointError):
    """Another trainer saves the same role below the same root. Nothing has been done."""


class RemoteError(CheckpointError):
    """A remote store does not answer, or not what it was asked. Local checkpoints are untouched."""


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
    """An error as plain strings that travel to other ranks. Foreign errors (an OSError) keep their type in the text."""
    name = type(error).__name__
    text = str(error) if name in _BY_NAME else f"{name}: {error}"
    if not getattr(error, "names_rank", False):
        text = f"rank {rank}: {text}"
    # A file's name may be no text, and it must come through all the same.
    return {"type": name, "message": text.encode(errors="backslashreplace").decode()}


def from_record(record: dict[str, str], default: type[CheckpointError]) -> CheckpointError:
    """The error a record stands for; one that is not of this family becomes a `default`."""
    error = _BY_NAME.get(record["type"], default)(record["message"])
    error.names_rank = True
    return error
