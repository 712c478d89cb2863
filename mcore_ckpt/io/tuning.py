"""Sizes and counts that trade memory, cores and disk against each other. None of them changes the format on disk."""

from __future__ import annotations

import os

# More threads do not make a memory bus faster, and training needs the cores.
HOST_THREADS = min(4, os.cpu_count() or 1)

# How host memory is prepared before the first save: in pieces of this size (one huge page), by a thread of this
# niceness. A piece holds a lock of the process's memory map, so longer pieces could hold up the training's allocations.
PREPARE_BYTES = 2 << 20
PREPARE_NICENESS = 10
# The size is an estimate. The address range is larger by this part of it, and at least by these bytes; their pages are
# fetched only if a save needs them.
PREPARE_SPARE_PART = 4
PREPARE_SPARE_BYTES = 64 << 20
# A save waits for the rest of the host memory if at most this part is missing. Writing in place would take longer.
WAIT_FOR_PART = 8

# I/O threads sleep most of the time. This many keep writes under way while other pieces are copied and checksummed.
IO_THREADS = 8

# A disk reaches its full speed with pieces of this size. The pieces of all threads stay in the cache until written.
WRITE_BYTES = 4 << 20
# Read pieces are longer, because each byte is looked at only once.
READ_BYTES = 16 << 20

# The shortest range of a shared file that one replica writes. For shorter ranges, agreeing costs more than writing.
SHARE_BYTES = 16 << 20

# Copies out of a GPU are reported in groups of this size, so that writing begins before the last copy is done.
COPY_GROUP_BYTES = 64 << 20

# Memory that a load uses for tensors that it cannot fill in place: those of another dtype, or not row-major.
CONVERT_BYTES = 128 << 20

# Approximate size of a batch of tensors that one replica reads and broadcasts to the others.
BROADCAST_BYTES = 64 << 20

# Size of one message when a single rank reads a HuggingFace folder for all. It reads the next message meanwhile.
SCATTER_BYTES = 64 << 20

# Size of each of the two buffers of a stream (`streams.py`): one is read into while the other is written.
STREAM_BYTES = 128 << 20

# Largest file of HuggingFace weights in an in-line export; transformers uses the same size.
HF_FILE_BYTES = 5_000_000_000
# Files are not made smaller than this to give more ranks a file each.
HF_LEAST_FILE_BYTES = 1_000_000_000

# How many files are uploaded at a time, and the size of the parts that each is sent in.
UPLOAD_FILES = 4
UPLOAD_PART_BYTES = 16 << 20
UPLOAD_PART_MULTIPLE = 256 << 10
# Stores allow 10,000 parts per file, so larger files are sent in larger parts.
UPLOAD_PARTS_MOST = 9_000
# How many requests run at a time while a checkpoint is read from a remote store, and the most that one asks for.
REMOTE_THREADS = 16
REMOTE_READ_BYTES = 8 << 20
# Two wanted ranges become one request if no more than this many unwanted bytes lie between them.
REMOTE_GAP_BYTES = 256 << 10
