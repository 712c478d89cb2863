"""Decides when to save: every given number of epochs, of steps, of seconds, or as soon as the previous save is done.

This module does no I/O. The ranks' clocks differ, so one rank decides for all ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.field_checks import check_fields, check_value, checked, limited
from mcore_ckpt.ranks.process_groups import world_size

Record = dict[str, Any]

Agree = Callable[[str, Record, Callable[[], Record]], Record]
"""The type of `CheckpointManager.agree`. All ranks pass a topic, a request that is the same on all ranks, and a
function. One rank calls its function, and all ranks get that result."""


def alone(topic: str, request: Record, answer: Callable[[], Record]) -> Record:
    """Takes the place of `CheckpointManager.agree` where only one process asks: returns that process's own answer."""
    return answer()


class Copied(Protocol):
    """The attribute of a step's copies on other nodes that a Schedule reads. `CopyHandle` has this attribute."""

    @property
    def done(self) -> bool: ...


class Saved(Protocol):
    """The attributes of a save's handle that a Schedule reads. `SaveHandle` has these attributes."""

    @property
    def has_begun(self) -> bool: ...
    @property
    def done(self) -> bool: ...
    @property
    def copies(self) -> Copied | None: ...


@checked
@dataclass(frozen=True)
class Frequency:
    """How often to save: every `epochs` epochs, every `steps` steps, and every `secs` seconds or `minutes` minutes.

    Attributes:
        epochs: the number of epochs between two saves. None: epochs cause no save.
        steps: the number of steps between two saves. None: steps cause no save.
        secs: the seconds between two saves. None: time causes no save.
        minutes: the minutes between two saves. Give `secs` or `minutes`, not both.
        continuous: whether to save again as soon as the previous save is done: committed, and, with a fast tier, copied
            to the other nodes. A schedule learns of each save from `Schedule.saved`.

    Raises:
        InvalidArgumentError: a value is not above 0, or `secs` and `minutes` are both given.
    """

    epochs: int | None = limited(None, least=1)
    steps: int | None = limited(None, least=1)
    secs: float | None = limited(None, above=0, of="seconds")
    minutes: float | None = limited(None, above=0, of="minutes")
    continuous: bool = False

    def __post_init__(self) -> None:
        check_fields(self, before="freq_")
        if self.secs is not None and self.minutes is not None:
            raise InvalidArgumentError(f"freq_secs is {self.secs} and freq_minutes is {self.minutes}: give only one")

    @property
    def seconds(self) -> float | None:
        """The seconds between two saves, from `secs` or `minutes`."""
        return self.secs if self.minutes is None else 60 * self.minutes

    @property
    def is_never(self) -> bool:
        """True if nothing causes a save."""
        return self.epochs is None and self.steps is None and self.seconds is None and not self.continuous


class Schedule:
    """Counts epochs, steps and seconds. Each of the three counts begins again when it has caused a save.

    Call `saved` after each save. Then a save that was skipped or refused, or that raised an error, is due again at the
    next step. A continuous schedule learns from `saved` which save must be done before the next save is due.

    Args:
        frequency: how often to save. `state_dict` does not contain the frequency, so a restart uses the new
            configuration.
        clock: returns seconds, which never decrease. The time between the end of a training and its restart is not
            counted.

    Example:
        >>> schedule = Schedule(Frequency(steps=2))
        >>> [schedule.due(), schedule.due(), schedule.due()]
        [False, True, False]
        >>> if schedule.due(agree=manager.agree):  # doctest: +SKIP
        ...     schedule.saved(manager.save(step))
    """

    def __init__(self, frequency: Frequency, clock: Callable[[], float] = time.monotonic) -> None:
        self._frequency = frequency
        self._clock = clock
        self._epochs = self._steps = 0
        self._began = clock()
        # The counts as they would be if the last `due` had been false.
        self._before = (0, 0, self._began)
        self._last: Saved | None = None

    def due(self, epochs: int = 0, steps: int = 1, agree: Agree | None = None) -> bool:
        """Returns True if it is time to save. Call `due` once after every step, on every rank.

        A continuous schedule that knows of no save is always due.

        Args:
            epochs: how many epochs have ended since the last call.
            steps: how many steps have ended since the last call.
            agree: the function by which the ranks agree. One rank decides for all ranks, by its own clock. None: each
                process decides alone, which several ranks may do only if epochs and steps alone cause saves.

        Raises:
            InvalidArgumentError: this process is one of several ranks, and `agree` is None, but `secs`, `minutes` or
                `continuous` may cause a save. Clocks and the end of a save differ from rank to rank. If only one rank
                asks, and tells the other ranks, pass `alone`.
            CheckpointError: `agree` raised this error, for example because the ranks are not at the same step. The
                counts have not changed.
        """
        for name, value in (("epochs", epochs), ("steps", steps)):
            check_value(name, value, int, {"least": 0})
        if agree is None:
            self._refuse_own_clocks()
            agree = alone
        counted = {"epochs": self._epochs + epochs, "steps": self._steps + steps}
        fired: Record = {"epochs": False, "steps": False, "secs": False, "continuous": False}
        if not self._frequency.is_never:
            request = {"frequency": asdict(self._frequency), "since the last save": counted}
            fired = agree("whether to save now", request, lambda: self._fired(**counted))
        self._before = (counted["epochs"], counted["steps"], self._began)
        # A count begins again only if it has caused the save itself. So a save that is due by time does not move the
        # saves at every hundredth step.
        self._epochs = 0 if fired["epochs"] else counted["epochs"]
        self._steps = 0 if fired["steps"] else counted["steps"]
        if fired["secs"]:
            self._began = self._clock()
        return any(fired.values())

    def saved(self, handle: Saved | None) -> None:
        """Notes the save that the last `due` has caused. Every rank calls `saved`.

        If nothing was saved, the counts go on as if that `due` had been false, so the next `due` is true.

        Args:
            handle: what `CheckpointManager.save` returned. None: the call raised an error.
        """
        if handle is not None and handle.has_begun:
            self._last = handle
        else:
            self._epochs, self._steps, self._began = self._before

    def _refuse_own_clocks(self) -> None:
        frequency = self._frequency
        ranks = world_size() if frequency.seconds is not None or frequency.continuous else 1
        if ranks > 1:
            raise InvalidArgumentError(
                f"{frequency}: each of the {ranks} ranks would decide by its own clock or its own view of the last "
                "save, and some would save while others train: call due(agree=manager.agree), or due(agree=alone) if "
                "only one rank asks and tells the others"
            )

    def _fired(self, epochs: int, steps: int) -> Record:
        frequency = self._frequency
        return {
            "epochs": frequency.epochs is not None and epochs >= frequency.epochs,
            "steps": frequency.steps is not None and steps >= frequency.steps,
            "secs": frequency.seconds is not None and self._elapsed >= frequency.seconds,
            "continuous": frequency.continuous and self._last_is_done,
        }

    @property
    def _last_is_done(self) -> bool:
        last = self._last
        return last is None or (last.done and (last.copies is None or last.copies.done))

    @property
    def _elapsed(self) -> float:
        return max(0.0, self._clock() - self._began)

    def state_dict(self) -> Record:
        """Returns the counts as JSON values: `epochs`, `steps`, `secs`."""
        return {"epochs": self._epochs, "steps": self._steps, "secs": self._elapsed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues to count from a saved state.

        Raises:
            InvalidArgumentError: `state` is not a result of `state_dict`. Nothing has changed.
        """
        epochs, steps, secs = (state.get(name) for name in ("epochs", "steps", "secs"))
        if not _is_count(epochs) or not _is_count(steps) or not _is_seconds(secs):
            raise InvalidArgumentError(
                f"{dict(state)!r} is not the state of a schedule: epochs, steps and secs are needed, none below 0"
            )
        self._epochs, self._steps = int(epochs), int(steps)  # type: ignore[arg-type]
        self._began = self._clock() - float(secs)  # type: ignore[arg-type]
        self._before = (self._epochs, self._steps, self._began)


class RoleSchedules:
    """Keeps one schedule for each role, because a shared schedule would count each step once per role.

    Args:
        frequency: how often to save each role.
        clock: returns seconds, as in Schedule.

    Example:
        >>> schedules = RoleSchedules(Frequency(steps=2))
        >>> [schedules.due("actor"), schedules.due("critic"), schedules.due("actor")]
        [False, False, True]
    """

    def __init__(self, frequency: Frequency, clock: Callable[[], float] = time.monotonic) -> None:
        self._frequency = frequency
        self._clock = clock
        # The seconds of every role are counted from now on, even if its first `due` is called later.
        self._began = clock()
        self._schedules: dict[str, Schedule] = {}

    def due(self, role: str, epochs: int = 0, steps: int = 1, agree: Agree | None = None) -> bool:
        """Returns True if it is time to save this role. See `Schedule.due`."""
        return self._of(role).due(epochs, steps, agree)

    def saved(self, role: str, handle: Saved | None) -> None:
        """Notes the save of this role. See `Schedule.saved`."""
        self._of(role).saved(handle)

    def state_dict(self) -> Record:
        """Returns the counts of each role, by role. See `Schedule.state_dict`."""
        return {role: schedule.state_dict() for role, schedule in self._schedules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues to count from a saved state. Roles that are not in the state are counted as in a new object.

        Raises:
            InvalidArgumentError: `state` is not a result of `state_dict`. Nothing has changed.
        """
        loaded: dict[str, Schedule] = {}
        for role, of_role in state.items():
            if not isinstance(of_role, Mapping):
                raise InvalidArgumentError(f"the schedule of {role} is {of_role!r}: use a result of state_dict")
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
