"""Examines a folder of checkpoints: what works there, what is emulated and at what cost, and what to change.

`examine.py` tells the whole examination. `start_line.py` has what a manager logs when it starts.
"""
