"""Defines sizes and counts that trade memory, cores and disk against each other.

No value changes the format on disk.
"""

from __future__ import annotations

import os

# How many threads copy host memory. More threads would not be faster, because the memory bus is the limit, and the
# training needs the cores.
HOST_THREADS = min(4, os.cpu_count() or 1)

# Host memory is prepared before the first save, in pieces of this size (one huge page), by a thread of this niceness.
# The kernel locks the memory map of the process while it provides a piece, so larger pieces could delay allocations of
# the training.
PREPARE_BYTES = 2 << 20
PREPARE_NICENESS = 10
# The size to prepare is an estimate, so the buffer gets a spare address range: the estimate divided by
# PREPARE_SPARE_PART, but at least PREPARE_SPARE_BYTES. The spare range gets pages only if a save needs them.
PREPARE_SPARE_PART = 4
PREPARE_SPARE_BYTES = 64 << 20
# If at most 1 / WAIT_FOR_PART of the host memory is not prepared yet, a save waits for this part. The wait takes less
# time than writing straight from the training state.
WAIT_FOR_PART = 8

# I/O threads sleep most of the time. With this many threads, some pieces are being written while others are copied and
# checksummed.
IO_THREADS = 8

# How many calls to a file system run at a time if there are many small calls (looks at steps or files, deletions). The
# calls overlap, because each call waits for a server if the file system is far away.
LOOK_THREADS = 32

# A disk reaches its full speed with pieces of this size. The pieces of all threads stay in the CPU's cache until they
# are written.
WRITE_BYTES = 4 << 20
# Reads take larger pieces, which need not stay in the cache: the CPU reads each byte only once, for its CRC.
READ_BYTES = 16 << 20
# How many seconds a thread waits for a GPU, before reading from the GPU or copying to the GPU, if no `timeout_s` is
# given.
DEVICE_READ_S = 600.0
# A read of a file in memory copies pieces of this size, one block each. A piece stays in the CPU's cache for the CRC of
# the block and for the second copy.
READ_MEMORY_BYTES = 1 << 20

# The shortest range of a shared file that one replica writes. Sharing shorter ranges takes more time than it saves.
SHARE_BYTES = 16 << 20

# The writer learns of finished copies out of a GPU in groups of this size, so that writing begins before the last copy
# is done.
COPY_GROUP_BYTES = 64 << 20

# Copies out of a GPU that are smaller than this are made by kernels (GATHER_BELOW_BYTES of csrc/device_copier.cu).
GATHER_BELOW_BYTES = 64 << 10

# A save makes weights from main parameters in pieces of this size. The device of the weights holds one piece at a time.
WEIGHT_PIECE_BYTES = 256 << 20

# Memory that a load uses for tensors that it cannot fill directly: tensors of another dtype than the stored one, and
# tensors that are not in row-major order.
CONVERT_BYTES = 128 << 20

# Approximate size of a batch of tensors that one replica reads and broadcasts to the other replicas.
BROADCAST_BYTES = 64 << 20

# Size of one message of a scatter, in which rank 0 reads a HuggingFace folder for all ranks. While rank 0 sends one
# message, it reads the next.
SCATTER_BYTES = 64 << 20

# Size of each of the two buffers of a stream (`streams.py`). One buffer is filled while the other is written to a file.
STREAM_BYTES = 128 << 20

# Largest file of HuggingFace weights in an in-line export; transformers uses the same size.
HF_FILE_BYTES = 5_000_000_000
# An in-line export makes more and smaller files, so that more ranks can write a file, but makes none smaller than this.
HF_LEAST_FILE_BYTES = 1_000_000_000

# How many files are uploaded at a time, and the size of the parts of each file. This size must be a multiple of
# UPLOAD_PART_MULTIPLE.
UPLOAD_FILES = 4
UPLOAD_PART_BYTES = 16 << 20
UPLOAD_PART_MULTIPLE = 256 << 10
# The most parts of a file. Stores allow 10,000 parts, so very large files are sent in larger parts.
UPLOAD_PARTS_MOST = 9_000
# How many requests run at a time while a checkpoint is read from a remote store, and the most bytes that one request
# reads.
REMOTE_THREADS = 16
REMOTE_READ_BYTES = 8 << 20
# Two wanted ranges become one request if no more than this many unwanted bytes lie between them.
REMOTE_GAP_BYTES = 256 << 10

# How a node gets copies of another node's files: the size of a piece, and how many pieces are under way at a time.
PEER_BYTES = 4 << 20
PEER_THREADS = 4

# Some file systems free a deleted file's bytes a moment later. So a save with too little space is refused only when the
# free space has not grown for SPACE_SETTLES_S seconds. While a step is being deleted, perhaps by another process, this
# time is DELETION_SHOWS_S seconds instead. SPACE_POLL_S is the pause between two looks at the free space, in seconds.
SPACE_SETTLES_S = 0.5
DELETION_SHOWS_S = 5.0
SPACE_POLL_S = 0.05
# How long a save that is refused may look for old steps that could be deleted (seconds). All ranks wait for this look.
OLD_STEPS_LOOK_S = 2.0

# If a remote store is a folder, a temporary file in it counts as left by a dead process this long after its last change
# (seconds).
ABANDONED_S = 10.0

# While a trainer is alive, a tracker that names an older step is called a problem only TRACKER_SETTLES_S seconds after
# a commit. SETTLE_POLL_S is the pause between two checks whether the trainer has corrected the tracker, in seconds.
TRACKER_SETTLES_S = 10.0
SETTLE_POLL_S = 0.1
