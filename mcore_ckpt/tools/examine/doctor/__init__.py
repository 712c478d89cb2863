"""Examines a folder of checkpoints: finds out what works, what is emulated at what cost, and what to change.

`examine.py` runs the whole examination. `start_line.py` makes the line that a manager logs when it starts.
"""
