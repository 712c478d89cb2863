"""Limits of the agreement: waits for other ranks, polling intervals, and sizes of messages in the key-value store."""

from __future__ import annotations

# torch's key-value store accepts 8 MiB per message and drops the connection of a client that sends more
# (2.13, `TCPStoreLibUvBackend.cpp`, MAX_PAYLOAD_LEN). Messages above the first size (bytes) are compressed, messages
# above the second are refused.
PLAIN_MESSAGE_BYTES = 1 << 20
MESSAGE_BYTES = (8 << 20) - 4096

# Pauses of a waiting rank between two questions to the key-value store, in seconds. The shortest pause grows with the
# number of ranks, so that thousands of ranks leave the store time to answer.
POLL_FIRST_S = 0.0005
POLL_PER_RANK_S = 0.00002
POLL_MOST_S = 0.2

# How much longer than rank 0 the other ranks wait (seconds). Rank 0 knows which rank is silent. The other ranks must
# still be waiting when rank 0 tells them.
EXTRA_WAIT_S = 1.5

# How long an exiting interpreter waits for other ranks to commit a running save, and for uploads (seconds).
EXIT_WAIT_S = 60.0
