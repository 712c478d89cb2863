"""Decides when to save: after so many epochs, steps or seconds, whichever comes first.

Nothing here does I/O. The ranks' clocks differ, so one rank decides for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mcore_ckpt.errors import InvalidArgumentError

Record = dict[str, Any]

Agree = Callable[[str, Record, Callable[[], Record]], Record]
"""A function of (topic, a request that is the same on all ranks, a function that one rank calls). It returns what that
function returned, on every rank. `CheckpointManager.agree` is one."""


def alone(topic: str, request: Record, answer: Callable[[], Record]) -> Record:
    """An `Agree` for a single process: it answers itself."""
    return answer()


@dataclass(frozen=True)
class Frequency:
    """The frequency of saves: every `epochs` epochs, `steps` steps, `secs` seconds. None: never for that reason.

    Raises:
        InvalidArgumentError: a value is not above 0.
    """

    epochs: int | None = None
    steps: int | None = None
    secs: float | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InvalidArgumentError(f"freq_{name} is {value!r}: use 1 or more, or None")
        if self.secs is not None and not (_is_seconds(self.secs) and self.secs > 0):
            raise InvalidArgumentError(f"freq_secs is {self.secs!r}: use seconds above 0, or None")

    @property
    def is_never(self) -> bool:
        return self.epochs is None and self.steps is None and self.secs is None


class Schedule:
    """Counts epochs, steps and seconds, each since it was last the reason for a save.

    Args:
        frequency: how often to save. It is not part of the state: after a restart the new configuration applies.
        clock: returns seconds that never go back. The time between the end of a
            training and its restart is not counted.

    Example:
        >>> schedule = Schedule(Frequency(steps=2))
        >>> [schedule.due(), schedule.due(), schedule.due()]
        [False, True, False]
    """

    def __init__(self, frequency: Frequency, clock: Callable[[], float] = time.monotonic) -> None:
        self._frequency = frequency
        self._clock = clock
        self._epochs = self._steps = 0
        self._began = clock()

    def due(self, epochs: int = 0, steps: int = 1, agree: Agree = alone) -> bool:
        """True if it is time to save. Call it once after every step, on every rank.

        Args:
            epochs: how many epochs have ended since the last call.
            steps: how many steps have ended since the last call.
            agree: how the ranks agree. The rank that answers reads its clock for all.

        Raises:
            CheckpointError: what `agree` raises, for example because the ranks are not at the same step. Nothing has
                been counted then.
        """
        counted = {"epochs": self._epochs + epochs, "steps": self._steps + steps}
        fired: Record = {"epochs": False, "steps": False, "secs": False}
        if not self._frequency.is_never:
            request = {"frequency": asdict(self._frequency), "since the last save": counted}
            fired = agree("whether to save now", request, lambda: self._fired(**counted))
        # Each counter starts anew only for its own reason: a save because of the time does not move the saves at every
        # hundredth step.
        self._epochs = 0 if fired["epochs"] else counted["epochs"]
        self._steps = 0 if fired["steps"] else counted["steps"]
        if fired["secs"]:
            self._began = self._clock()
        return any(fired.values())

    def _fired(self, epochs: int, steps: int) -> Record:
        frequency = self._frequency
        return {
            "epochs": frequency.epochs is not None and epochs >= frequency.epochs,
            "steps": frequency.steps is not None and steps >= frequency.steps,
            "secs": frequency.secs is not None and self._elapsed >= frequency.secs,
        }

    @property
    def _elapsed(self) -> float:
        return max(0.0, self._clock() - self._began)

    def state_dict(self) -> Record:
        """The counts as JSON values: `epochs`, `steps`, `secs`."""
        return {"epochs": self._epochs, "steps": self._steps, "secs": self._elapsed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on counting from a saved state.

        Raises:
            InvalidArgumentError: `state` is nothing that `state_dict` returns. Nothing has changed.
        """
        epochs, steps, secs = (state.get(name) for name in ("epochs", "steps", "secs"))
        if not _is_count(epochs) or not _is_count(steps) or not _is_seconds(secs):
            raise InvalidArgumentError(
                f"{dict(state)!r} is not the state of a schedule: epochs, steps and secs, none below 0"
            )
        self._epochs, self._steps = int(epochs), int(steps)  # type: ignore[arg-type]
        self._began = self._clock() - float(secs)  # type: ignore[arg-type]


class RoleSchedules:
    """One schedule for each role. A shared schedule would count each step once per role."""

    def __init__(self, frequency: Frequency, clock: Callable[[], float] = time.monotonic) -> None:
        self._frequency = frequency
        self._clock = clock
        # The time of a role counts from here, even if its first `due` comes later.
        self._began = clock()
        self._schedules: dict[str, Schedule] = {}

    def due(self, role: str, epochs: int = 0, steps: int = 1, agree: Agree = alone) -> bool:
        """True if it is time to save this role; see `Schedule.due`."""
        return self._of(role).due(epochs, steps, agree)

    def state_dict(self) -> Record:
        """The counts of each role, by role; see `Schedule.state_dict`."""
        return {role: schedule.state_dict() for role, schedule in self._schedules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on counting from a saved state. Roles that are not in the state start anew.

        Raises:
            InvalidArgumentError: `state` is nothing that `state_dict` returns. Nothing has changed.
        """
        loaded: dict[str, Schedule] = {}
        for role, of_role in state.items():
            if not isinstance(of_role, Mapping):
                raise InvalidArgumentError(f"the schedule of {role} is {of_role!r}: use what state_dict returned")
            loaded[role] = Schedule(self._frequency, self._clock)
            loaded[role].load_state_dict(of_role)
        self._schedules = loaded

    def _of(self, role: str) -> Schedule:
        if role not in self._schedules:
            schedule = Schedule(self._frequency, self._clock)
            schedule.load_state_dict({"epochs": 0, "steps": 0, "secs": max(0.0, self._clock() - self._began)})
            self._schedules[role] = schedule
        return self._schedules[role]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
