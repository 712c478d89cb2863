"""Logs each event in one line."""

from __future__ import annotations

import logging

from mcore_ckpt.amounts import size_text
from mcore_ckpt.events import Captured, Committed, Deleted, Event, Failed, Loaded, Skipped, Started, Uploaded, Written

_LOGGER = logging.getLogger("mcore_ckpt.events")


class LoggingListener:
    """Logs failures as errors, and all other events at a level of the caller's choice.

    Args:
        logger: where to log. None: the logger `mcore_ckpt.events`.
        level: the level of all events except failures.

    Example:
        >>> LoggingListener(level=logging.DEBUG)  # doctest: +ELLIPSIS
        <...LoggingListener object at ...>
    """

    def __init__(self, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
        self._logger = _LOGGER if logger is None else logger
        self._level = level

    def __call__(self, event: Event) -> None:
        """Logs one event."""
        level = logging.ERROR if isinstance(event, Failed) else self._level
        of = "a step" if event.step is None else f"step {event.step}"
        self._logger.log(level, "%s of %s on rank %d: %s (%s)", of, event.role, event.rank, _told(event), event.path)


def _told(event: Event) -> str:
    match event:
        case Started():
            return "the save has started"
        case Captured():
            return f"the state is captured, {size_text(event.nbytes)} in {event.seconds:.3f} s"
        case Written():
            return f"the files are written, {size_text(event.nbytes)} in {event.seconds:.3f} s"
        case Committed():
            phases = ", ".join(f"{phase.name} {phase.seconds:.3f} s" for phase in event.phases)
            waited = f"training waited {event.stall_s:.3f} s"
            return f"committed, {size_text(event.nbytes)} in {event.seconds:.3f} s, {waited}: {phases}"
        case Skipped():
            return f"the save is skipped, because {event.reason}"
        case Failed():
            during = f" in the phase {event.phases[-1].name!r}" if event.phases else ""
            return f"the {event.operation} has failed after {event.seconds:.3f} s{during}: {event.error.message}"
        case Loaded():
            skipped = f", {len(event.skipped)} newer checkpoints were skipped" if event.skipped else ""
            return f"loaded, {size_text(event.nbytes)} in {event.seconds:.3f} s{skipped}"
        case Deleted():
            where = " from the remote store" if event.place == "remote" else ""
            return f"the old step is deleted{where}, in {event.seconds:.3f} s"
        case Uploaded():
            return f"uploaded, {size_text(event.nbytes)} in {event.seconds:.3f} s"
    return type(event).__name__
