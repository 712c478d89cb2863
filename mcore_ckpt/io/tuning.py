"""Defines sizes and counts that trade memory, cores and disk against each other. None changes the format on disk."""

from __future__ import annotations

import os

# The threads that copy host memory. More would not be faster, because the memory bus is the limit, and training needs
# the cores.
HOST_THREADS = min(4, os.cpu_count() or 1)

# Host memory is prepared before the first save, in steps of this size (one huge page), by a thread of this niceness.
# The kernel locks the memory map of the process during a step, so larger steps could delay allocations of the training.
PREPARE_BYTES = 2 << 20
PREPARE_NICENESS = 10
# The size to prepare is an estimate, so the buffer gets a spare address range: the estimate divided by SPARE_PART, but
# at least SPARE_BYTES. The spare range gets pages only if a save needs them.
PREPARE_SPARE_PART = 4
PREPARE_SPARE_BYTES = 64 << 20
# If at most 1 / WAIT_FOR_PART of the host memory is not prepared yet, a save waits for the rest. That takes less
# time than writing straight from the training state.
WAIT_FOR_PART = 8

# I/O threads sleep most of the time. With this many, some pieces are being written while others are copied and
# checksummed.
IO_THREADS = 8

# How many calls to a file system run at a time where there are many small ones (looks at steps or files, deletions).
# If the file system is far away, each call waits for a server.
LOOK_THREADS = 32

# A disk reaches its full speed with pieces of this size. The pieces of all threads stay in the CPU's cache until they
# are written.
WRITE_BYTES = 4 << 20
# Reads take larger pieces, which need not stay in the cache: the CPU reads each byte only once, for its CRC.
READ_BYTES = 16 << 20
# How long a thread waits for a GPU before it reads from it, or copies to it, where no `timeout_s` is given (seconds).
DEVICE_READ_S = 600.0
# A read of a file in memory copies the bytes. Pieces of one block stay in the cache for the block's CRC and for the
# second copy.
READ_MEMORY_BYTES = 1 << 20

# The shortest range of a shared file that one replica writes. Sharing shorter ranges takes more time than it saves.
SHARE_BYTES = 16 << 20

# The writer learns of finished copies out of a GPU in groups of this size, so that writing begins before the last copy
# is done.
COPY_GROUP_BYTES = 64 << 20

# Smaller copies out of a GPU are made by kernels (GATHER_BELOW_BYTES of csrc/device_copier.cu).
GATHER_BELOW_BYTES = 64 << 10

# Size of a piece of the weights that a save makes from main parameters. On the device of the weights there is one piece
# at a time.
WEIGHT_PIECE_BYTES = 256 << 20

# Memory that a load uses for tensors that it cannot fill directly: of another dtype, or not in row-major order.
CONVERT_BYTES = 128 << 20

# Approximate size of a batch of tensors that one replica reads and broadcasts to the others.
BROADCAST_BYTES = 64 << 20

# Size of one message of a scatter, in which rank 0 reads a HuggingFace folder for all ranks. While rank 0 sends one
# message, it reads the next.
SCATTER_BYTES = 64 << 20

# Size of each of the two buffers of a stream (`streams.py`). One buffer is filled while the other is written to a file.
STREAM_BYTES = 128 << 20

# Largest file of HuggingFace weights in an in-line export; transformers uses the same size.
HF_FILE_BYTES = 5_000_000_000
# An in-line export makes files smaller, so that more ranks can write one each, but not smaller than this.
HF_LEAST_FILE_BYTES = 1_000_000_000

# How many files are uploaded at a time, the size of the parts of each file, and what that size must be a multiple of.
UPLOAD_FILES = 4
UPLOAD_PART_BYTES = 16 << 20
UPLOAD_PART_MULTIPLE = 256 << 10
# The most parts of a file. Stores allow 10,000, so large files are sent in larger parts.
UPLOAD_PARTS_MOST = 9_000
# How many requests run at a time while a checkpoint is read from a remote store, and the most bytes that one of them
# reads.
REMOTE_THREADS = 16
REMOTE_READ_BYTES = 8 << 20
# Two wanted ranges become one request if no more than this many unwanted bytes lie between them.
REMOTE_GAP_BYTES = 256 << 10

# How a node gets copies of another node's files: the size of the pieces, and how many are under way at a time.
PEER_BYTES = 4 << 20
PEER_THREADS = 4

# A save with too little space is refused this long after the free space last grew (seconds), because some file systems
# free a deleted file's bytes a moment later. The second time holds while a step is being deleted, perhaps by another
# process. The third is the pause between looks.
SPACE_SETTLES_S = 0.5
DELETION_SHOWS_S = 5.0
SPACE_POLL_S = 0.05
# How long a refusal may look for old steps that could be deleted (seconds), because all ranks wait for it.
OLD_STEPS_LOOK_S = 2.0

# This long after its last change, a temporary file in a remote store that is a folder counts as left by a dead process
# (seconds).
ABANDONED_S = 10.0

# While a trainer is alive, the tracker may name an older step for this long after a commit before that is called a
# problem (seconds). The second number says how often to look again whether the trainer has mended it.
TRACKER_SETTLES_S = 10.0
SETTLE_POLL_S = 0.1
