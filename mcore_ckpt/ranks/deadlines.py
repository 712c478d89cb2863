"""Defines how long ranks wait for each other, how often they poll, and how large their messages can be."""

from __future__ import annotations

import math
import time

# torch's key-value store accepts 8 MiB per message and drops the connection of a client that sends more
# (2.13, `TCPStoreLibUvBackend.cpp`, MAX_PAYLOAD_LEN). Messages of more than PLAIN_MESSAGE_BYTES are compressed.
# Messages that still have more than MESSAGE_BYTES are refused.
PLAIN_MESSAGE_BYTES = 1 << 20
MESSAGE_BYTES = (8 << 20) - 4096
# A decompressed message has at most UNPACKED_BYTES bytes, and at most MOST_UNPACKED_PER_BYTE bytes for each compressed
# byte. Without a limit, a few compressed bytes could fill the memory. Lists of tensor names become only 20 to 30 times
# as long when they are decompressed.
UNPACKED_BYTES = 256 << 20
MOST_UNPACKED_PER_BYTE = 100

# Pauses of a waiting rank between two requests to the key-value store, in seconds. The shortest pause grows with the
# number of ranks, so that the store has time to answer thousands of ranks.
POLL_FIRST_S = 0.0005
POLL_PER_RANK_S = 0.00002
POLL_MOST_S = 0.2
# The longest pause is this many seconds times the number of ranks. So thousands of ranks together send at most 10,000
# requests a second while one rank writes for a minute. Even this pause is only about a tenth of the time that the ranks
# have waited.
POLL_MOST_PER_RANK_S = 0.0001

# Rank 0 asks for the messages of this many ranks at a time.
RANKS_AT_ONCE = 256

# How many seconds longer than rank 0 the other ranks wait. Rank 0 finds out which rank is silent, and the other ranks
# must still be waiting when rank 0 tells them.
EXTRA_WAIT_S = 1.5

# If the machine is expected to go within this time (seconds), a wait that begins now is not shortened any more.
# Otherwise a rank that comes a moment before the machine goes would not wait for ranks that come a moment later.
SHORTEST_WAIT_S = 1.0
# If a limit has ended a wait, the next waits of the same round get this many seconds each: the answer may be under way.
LAST_WAIT_S = 0.5

# How long the processes of a command wait for each other before they log that they wait (seconds).
NOTICE_S = 3.0

# How long one call to the file system may hold up an async save, in seconds. After that the trainer goes on without the
# save.
DISK_PATIENCE_S = 2.0

# How long an exiting interpreter waits for other ranks to commit a running save, and for uploads (seconds).
EXIT_WAIT_S = 60.0

# How long a node waits for each piece of another node's answer, in seconds. A node that is silent for this time counts
# as lost.
PEER_TIMEOUT_S = 60.0


def deadline_after(seconds: float | None) -> float:
    """Returns the time (`time.monotonic()`) that is `seconds` from now; infinite for None."""
    return math.inf if seconds is None else time.monotonic() + seconds


def seconds_until(deadline: float) -> float | None:
    """Returns how many seconds are left until `deadline` (`time.monotonic()`); None if `deadline` is infinite."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())
