"""Checks what only a machine with NVIDIA GPUs can show. `scripts/gpu_check.sh` runs them.

Each check is a function without arguments in a process of its own (`child.py`), with a time limit (`runner.py`). It
returns what it has measured as a text, or raises `Failed` or `NotPossible` (`outcome.py`). `checks.py` lists them.
"""
