"""Sends messages through torch's key-value store, polls it for keys, and reports a store that is lost."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.ranks import deadlines

# Plain JSON values.
Message = dict[str, Any]

# The first byte of a compressed message. An uncompressed message begins with a brace.
_COMPRESSED = b"z"


@dataclass
class WaitLimit:
    """A point of time (of `time.monotonic()`) at which every wait ends, even if its own deadline is later."""

    at: float = math.inf


def encode(message: Message) -> bytes:
    """Encodes a message as JSON. Raises ValueError for NaN, which other ranks could not parse."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def pack(message: Message) -> bytes:
    """Encodes a message for the store, and compresses a long one.

    Raises ValueError if the message cannot be JSON, or is larger than the store accepts.
    """
    data = encode(message)
    if len(data) <= deadlines.PLAIN_MESSAGE_BYTES:
        return data
    packed = _COMPRESSED + zlib.compress(data, 1)
    if len(packed) > deadlines.MESSAGE_BYTES:
        raise ValueError(
            f"a message of {len(data)} bytes ({len(packed)} compressed) is larger than the {deadlines.MESSAGE_BYTES} "
            "bytes that the key-value store accepts"
        )
    return packed


def unpack(data: bytes) -> Message:
    """Decodes what `pack` has encoded."""
    return json.loads(zlib.decompress(data[len(_COMPRESSED) :]) if data.startswith(_COMPRESSED) else data)


def missing(store: Any, keys: Sequence[str]) -> list[str]:
    """Returns the keys that the store does not have.

    Asks for halves of the keys, not for each key: thousands of requests from each rank would hold up the store.
    """
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return list(keys)
    half = len(keys) // 2
    return [*missing(store, keys[:half]), *missing(store, keys[half:])]


def has_any(store: Any, *keys: str) -> bool:
    """Returns True if the store has at least one of the keys."""
    return any(store.check([key]) for key in keys)


def poll(ready: Callable[[], bool], world_size: int, deadline: float, limit: WaitLimit) -> bool:
    """Calls `ready` until it returns True. Returns False if the deadline or the limit passes first.

    Does not call `store.wait()`: a wait that times out prints to stderr, and blocks its client.
    """
    started = time.monotonic()
    # Pauses grow with the time waited: the answer comes at most a tenth late, and the store is not asked too often.
    shortest = max(deadlines.POLL_FIRST_S, world_size * deadlines.POLL_PER_RANK_S)
    while not ready():
        now = time.monotonic()
        left = min(deadline, limit.at) - now
        if left <= 0:
            return False
        time.sleep(min(max(shortest, (now - started) / 10), deadlines.POLL_MOST_S, left))
    return True


@contextmanager
def store_failures(topic: str, error: type[CheckpointError]) -> Iterator[None]:
    """Raises `error` if the store is lost because the process that hosts it has died."""
    try:
        yield
    except RuntimeError as failure:
        # torch.distributed raises it and its subclasses (DistStoreError, DistNetworkError) for a lost connection.
        raise error(
            f"{topic}: the key-value store is gone ({failure}). The process that hosts it, usually rank 0, has died: "
            "look at its log"
        ) from failure


def timeout_of(rank: int, timeout_s: float) -> float:
    """Returns how long a rank waits, in seconds.

    Rank 0 waits `timeout_s`. The other ranks wait a little longer, so that rank 0 can tell them which rank is silent.
    """
    return timeout_s if rank == 0 else timeout_s + min(timeout_s / 2, deadlines.EXTRA_WAIT_S)


def silence_of(topic: str, ranks: Sequence[int], timeout_s: float) -> str:
    """Describes, for an error message, ranks that are silent."""
    return (
        f"{topic}: no word from rank {', '.join(map(str, ranks))} within {timeout_s:g} s: dead or stuck. "
        "Look at its log; raise timeout_s if it was only slow"
    )


def silence_of_rank_0(topic: str, rank: int, timeout_s: float) -> str:
    """Describes, for an error message, that `rank` has waited for rank 0 in vain."""
    return (
        f"{topic}: rank {rank} waited {timeout_s:g} s for rank 0, which is dead or stuck, or waits for another rank. "
        "Look at rank 0's log"
    )
