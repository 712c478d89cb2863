"""Stops a training before its machine goes, with a last save at a step boundary.

`guard.py` has the class that a training loop uses, `requests.py` what can ask for a stop, `end_times.py` when the
machine goes anyway, `pace.py` how often the ranks ask each other, and `last_save.py` what is saved in the time left.
"""

from __future__ import annotations

from mcore_ckpt.preemption.guard import PreemptionGuard
from mcore_ckpt.preemption.last_save import Stopped

__all__ = ["PreemptionGuard", "Stopped"]
