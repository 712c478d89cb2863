"""Stops a training before its machine goes, with a last save at a step boundary.

`guard.py` has the class that a training loop uses. `last_save.py` makes the save in the time that is left, and
`choice.py` chooses the kind of this save.
`requests.py` listens for requests to stop, `end_times.py` finds out when the machine will be taken away even if no
request comes, and `pace.py` decides how often the ranks ask each other.
"""

from __future__ import annotations

from mcore_ckpt.preemption.guard import PreemptionGuard
from mcore_ckpt.preemption.last_save import Stopped

__all__ = ["PreemptionGuard", "Stopped"]
