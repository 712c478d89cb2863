"""Writes the figures of events as TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from mcore_ckpt.events import Event
from mcore_ckpt.integrations.listeners.figures import scalars


class Writer(Protocol):
    """The methods of a SummaryWriter (torch's or tensorboardX's) that are used here."""

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, walltime: float | None = None
    ) -> object: ...

    def flush(self) -> object: ...


class TensorBoardListener:
    """Writes scalars named `mcore_ckpt/<role>/<figure>`, with the event's step and time.

    Pass the listener on only one rank (`listeners=[...] if rank == 0 else []`), because the scalars have no rank in
    their names. A trainer also has its writer on only one rank.

    Args:
        writer: the trainer's SummaryWriter (torch's, tensorboardX's, or Megatron-LM's `get_tensorboard_writer()`), or
            a folder, for which a new writer is made. A new writer needs the package tensorboard.

    Example:
        >>> TensorBoardListener("runs/checkpoints")  # doctest: +SKIP
    """

    def __init__(self, writer: Writer | str | Path) -> None:
        self._writer = _open(writer) if isinstance(writer, (str, Path)) else writer

    def __call__(self, event: Event) -> None:
        """Writes the figures of one event, and flushes them, because the next event can be an hour away."""
        found = scalars(event)
        for tag, value in found.items():
            self._writer.add_scalar(tag, value, event.step, walltime=event.time)
        if found:
            self._writer.flush()


def _open(folder: str | Path) -> Writer:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"TensorBoardListener({str(folder)!r}) makes a SummaryWriter, which needs tensorboard: pip install "
            f"tensorboard, or pass a writer ({error})"
        ) from error
    return SummaryWriter(str(folder))
