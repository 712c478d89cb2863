"""Sizes and counts that trade memory, cores and disk against each other. None of them changes what is on disk."""

from __future__ import annotations

import os

# More threads than this do not make a memory bus faster, and training wants the cores.
HOST_THREADS = min(4, os.cpu_count() or 1)

# Large enough for a disk to run at its limit, small enough that a few fit a cache-friendly pipeline.
WRITE_BYTES = 16 << 20

# What one reader holds in host memory at a time; whole CRC blocks.
READ_CHUNK_BYTES = 16 << 20

# How often a rank asks the key-value store while it waits for others: at first, and at most (seconds).
POLL_FIRST_S = 0.002
POLL_MOST_S = 0.2

# How much longer than rank 0 the other ranks wait, at most (seconds).
HEAR_OUT_S = 10.0
