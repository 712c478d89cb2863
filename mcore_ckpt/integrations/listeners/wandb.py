"""Logs the figures of events to a run of Weights & Biases."""

from __future__ import annotations

from typing import Any, Protocol

from mcore_ckpt.events import Event
from mcore_ckpt.integrations.listeners.figures import scalars


class Run(Protocol):
    """The method of a W&B run that is used here."""

    def log(self, data: dict[str, Any], *, commit: bool | None = None) -> None: ...


class WandbListener:
    """Logs `mcore_ckpt/<role>/<figure>`, and the step as `mcore_ckpt/<role>/step`.

    The figures become part of the row that the trainer logs next, or of the run's last row (`commit=False`). A separate
    row would increase W&B's step, and W&B refuses figures that a trainer then logs with a lower step.

    Args:
        run: the run that `wandb.init` returned. None: the run that is active when an event comes; `wandb.init` must
            have been called by then. Pass the listener only on ranks that have a run.

    Example:
        >>> WandbListener(wandb.init(project="pretraining"))  # doctest: +SKIP
    """

    def __init__(self, run: Run | None = None) -> None:
        if run is None:
            _active_run()  # raises ImportError now if wandb is missing
        self._run = run

    def __call__(self, event: Event) -> None:
        """Logs the figures of one event."""
        found: dict[str, Any] = dict(scalars(event))
        if not found:
            return
        run = _active_run() if self._run is None else self._run
        if run is None:
            raise RuntimeError("there is no active run: call wandb.init on this rank, or leave the listener out")
        run.log(found | {f"mcore_ckpt/{event.role}/step": event.step}, commit=False)


def _active_run() -> Run | None:
    try:
        import wandb
    except ImportError as error:
        raise ImportError(f"WandbListener() needs wandb: pip install wandb, or pass a run ({error})") from error
    return wandb.run
