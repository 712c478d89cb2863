"""Sizes and counts that trade memory, cores and disk against each other. None of them changes what is on disk."""

from __future__ import annotations

import os

# More threads than this do not make a memory bus faster, and training wants the cores.
HOST_THREADS = min(4, os.cpu_count() or 1)

# Mostly asleep while the disk works: enough to have writes under way while other pieces are copied and checksummed.
IO_THREADS = 8

# A disk runs at its limit with pieces of this size, and those of all threads stay in the cache until they are written.
WRITE_BYTES = 4 << 20
# Longer: what is read is looked at once.
READ_BYTES = 16 << 20

# A range of a file that replicas share is at least this long: below it, agreeing costs more than writing.
SHARE_BYTES = 16 << 20

# Copies out of a GPU are reported done in groups of this size, so that writing can begin before the last one.
COPY_GROUP_BYTES = 64 << 20

# Memory that a load takes at a time for tensors that are not filled where they are: of another dtype, or not row-major.
CONVERT_BYTES = 128 << 20

# Tensors that one replica reads for the others are sent in batches of about this size.
BROADCAST_BYTES = 64 << 20

# What the one rank that sees a HuggingFace folder sends another at a time; it reads the next meanwhile.
SCATTER_BYTES = 64 << 20

# Memory that resharding and exporting take for what they write, twice: one part of a file is read while another is
# written.
STREAM_BYTES = 128 << 20

# HuggingFace weights are cut into files of at most this, as transformers does; and of no less than the second, if more
# ranks could each write one.
HF_FILE_BYTES = 5_000_000_000
HF_LEAST_FILE_BYTES = 1_000_000_000

# What is read whole is refused beyond these sizes (bytes): a file may claim any. A manifest takes some 200 bytes for
# each file and tensor, an index 500 for each tensor and 11 for each MiB; a pickle 300 for each tensor.
MANIFEST_BYTES = 128 << 20
# How many tensors all files together may say that they hold: each takes 8 bytes of who looks for them.
MANIFEST_HELD = 100_000_000
INDEX_BYTES = 256 << 20
DIRECTORY_BYTES = 256 << 20
PICKLE_BYTES = 1 << 30
# `common.pt`, random states, and what the trainer hands over: saving refuses more, too.
PLAIN_BYTES = 4 << 30
# config.json and indexes of HuggingFace weights; tokenizers and what else is copied.
HF_JSON_BYTES = 256 << 20
HF_ASSET_BYTES = 2 << 30
# The tracker, and who writes where.
SMALL_BYTES = 4096

# torch's key-value store takes 8 MiB in one message, and hangs up on who sends more (2.13, `TCPStoreLibUvBackend.cpp`,
# MAX_PAYLOAD_LEN). Messages of more than the first size (bytes) are compressed, and of more than the second refused.
PLAIN_MESSAGE_BYTES = 1 << 20
MESSAGE_BYTES = (8 << 20) - 4096

# How long a rank that waits for others pauses before it asks the key-value store again (seconds): at least this, or
# this for each rank of the job if that is more; and at most.
POLL_FIRST_S = 0.0005
POLL_PER_RANK_S = 0.00002
POLL_MOST_S = 0.2

# How much longer than rank 0 the other ranks wait, at most (seconds): a dead rank 0 is known by the deadline and this.
HEAR_OUT_S = 1.5

# How often a trainer touches the file that says that it saves below a root, and how long another one watches that
# without a change before it takes its place (seconds). Far apart: a thread may be held up, and network file systems
# cache a file's times.
TRAINER_BEAT_S = 15.0
TRAINER_LEASE_S = 120.0

# How long a resuming trainer waits before it tries again what may pass (seconds): at first, doubled each time.
RETRY_FIRST_S = 1.0

# How long an interpreter that ends waits for other ranks to commit a save under way (seconds).
EXIT_WAIT_S = 60.0

# Remote copies. Files on their way at a time, and what of each is in memory, a few times: a part of an upload in parts.
UPLOAD_FILES = 4
UPLOAD_PART_BYTES = 16 << 20
UPLOAD_PART_MULTIPLE = 256 << 10
# Stores allow 10,000 parts of a file: larger files have larger parts.
UPLOAD_PARTS_MOST = 9_000
# Requests under way at a time while a checkpoint is read from a remote store, what one asks for at most, and how many
# bytes that nobody wants it takes along rather than being two.
REMOTE_THREADS = 16
REMOTE_READ_BYTES = 8 << 20
REMOTE_GAP_BYTES = 256 << 10
# What a store fails to do is tried so often, after pauses that double (seconds).
REMOTE_TRIES = 6
REMOTE_PAUSE_S = 1.0
REMOTE_PAUSE_MOST_S = 30.0
