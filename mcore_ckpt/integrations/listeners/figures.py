"""The figures of an event as scalars, for TensorBoard and Weights & Biases."""

from __future__ import annotations

from mcore_ckpt.events import Committed, Deleted, Event, Failed, Loaded, Skipped, Uploaded


def scalars(event: Event) -> dict[str, float]:
    """Returns the event's figures by name. Events that only report the progress of a save have no figures.

    Example:
        >>> scalars(Deleted(step=5, role="actor", rank=0, path="steps/5", time=0.0, seconds=0.5))
        {'mcore_ckpt/actor/delete_seconds': 0.5}
    """
    return {f"mcore_ckpt/{event.role}/{name}": value for name, value in _figures(event).items()}


def _figures(event: Event) -> dict[str, float]:
    match event:
        case Committed():
            phases = {f"save_{phase.name}_seconds": phase.seconds for phase in event.phases}
            return {**_done("save", event), "save_stall_seconds": event.stall_s, **phases}
        case Loaded():
            return _done("load", event)
        case Uploaded():
            return _done("upload", event)
        case Deleted():
            return {"delete_seconds" if event.place == "local" else "remote_delete_seconds": event.seconds}
        case Skipped():
            return {"save_skipped": 1.0}
        case Failed():
            return {f"{event.operation}_failed": 1.0}
    return {}


def _done(operation: str, event: Committed | Loaded | Uploaded) -> dict[str, float]:
    return {
        f"{operation}_failed": 0.0,
        f"{operation}_seconds": event.seconds,
        f"{operation}_gigabytes": event.nbytes / 1e9,
    }
