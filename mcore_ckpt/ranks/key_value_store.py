"""Sends messages through torch's key-value store, polls the store for keys, and reports the loss of the store."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from mcore_ckpt import json_bounds
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.own_store import OwnStore

# A message consists of plain JSON values.
Message = dict[str, Any]

# The first byte of a compressed message. An uncompressed message begins with a brace.
_COMPRESSED = b"z"
# How many bytes one compressed byte can become: zlib encodes 258 bytes as two codes of at least one bit each.
_MOST_OF_ZLIB = 1032
# How many compressed bytes are decompressed at a time to count the decompressed bytes.
_UNZIP_AT_ONCE = 128
# Even the shortest compressed message may become this long, in bytes.
_ANY_UNPACKED = 2 << 20

# No key has this value.
_NO_VALUE = "-"


@dataclass
class WaitLimit:
    """The times at which waits end, even if a wait's own deadline is later. All times are by `time.monotonic()`.

    Attributes:
        at: every wait ends at this time.
        expected_at: the machine is expected to be taken away at this time, so a wait ends then. Waits that begin later,
            or less than SHORTEST_WAIT_S seconds earlier, are not limited, because the expected time may be wrong.
    """

    at: float = math.inf
    expected_at: float = math.inf

    def end_of(self, began: float) -> float:
        """Returns when a wait that began at `began` must end."""
        counts = began < self.expected_at - deadlines.SHORTEST_WAIT_S
        return min(self.at, self.expected_at) if counts else self.at


def encode(message: Message) -> bytes:
    """Encodes a message as JSON. Raises ValueError for NaN, which other ranks could not parse."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def pack(message: Message) -> bytes:
    """Encodes a message for the store.

    Raises ValueError if the message cannot be encoded, or the result is larger than the store accepts.
    """
    data = encode(message)
    if len(data) <= deadlines.PLAIN_MESSAGE_BYTES:
        return data
    json_bounds.check(data, json_bounds.MESSAGES)
    packed = _COMPRESSED + zlib.compress(data, 1)
    if len(data) > _most_unpacked(len(packed) - len(_COMPRESSED)):
        packed = data
    if len(packed) > deadlines.MESSAGE_BYTES:
        raise ValueError(
            f"a message of {len(data)} bytes ({len(packed)} compressed) is larger than the {deadlines.MESSAGE_BYTES} "
            "bytes that the key-value store accepts"
        )
    return packed


def unpack(data: bytes) -> Message:
    """Decodes what `pack` has encoded. Raises ValueError for data that `pack` cannot have made."""
    text = unzip(data[len(_COMPRESSED) :]) if data.startswith(_COMPRESSED) else data
    message: Message
    if len(text) > json_bounds.SMALL_BYTES:
        message = json_bounds.loads(text, json_bounds.MESSAGES)
        return message
    try:
        message = msgspec.json.decode(text)  # the quicker parser, because rank 0 has thousands of messages
    except RecursionError:
        raise ValueError("a message nests its values more deeply than Python can follow") from None
    except msgspec.MsgspecError as error:  # not a ValueError before msgspec 0.21
        raise ValueError(str(error)) from None
    return message


def unzip(data: bytes) -> bytes:
    """Decompresses data that another rank has compressed with zlib.

    Raises ValueError, before memory is allocated for the result, if the result would be larger than a rank's data can
    be.
    """
    most, nbytes = _most_unpacked(len(data)), 0
    try:
        if len(data) * _MOST_OF_ZLIB <= most:
            return zlib.decompress(data)  # these bytes cannot become more than `most`
        counted = zlib.decompressobj()
        for start in range(0, len(data), _UNZIP_AT_ONCE):
            nbytes += len(counted.decompress(data[start : start + _UNZIP_AT_ONCE]))
            if nbytes > most:
                raise ValueError(f"{len(data)} bytes of a message become more than {most} when they are decompressed")
        return zlib.decompress(data, bufsize=max(1, nbytes))
    except zlib.error as error:
        raise ValueError(f"a message cannot be decompressed: {error}") from None


def _most_unpacked(nbytes: int) -> int:
    return min(deadlines.UNPACKED_BYTES, max(_ANY_UNPACKED, nbytes * deadlines.MOST_UNPACKED_PER_BYTE))


def missing(store: Any, keys: Sequence[str]) -> list[str]:
    """Returns the keys that the store lacks.

    Asks for all keys at once and, if a key is missing, for each half of the keys. Asking for thousands of keys one by
    one would block the store.
    """
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return list(keys)
    half = len(keys) // 2
    return [*missing(store, keys[:half]), *missing(store, keys[half:])]


def all_there(store: Any, keys: Sequence[str], found: Callable[[Sequence[str]], object] = len) -> Callable[[], bool]:
    """Returns a function for `poll`. The function returns True once the store has all keys.

    The function asks for RANKS_AT_ONCE keys at a time, and never again for keys that the store had. Otherwise each poll
    would ask for thousands of keys, which holds up this process's other threads. The function calls `found` with each
    batch of keys once, in order, when the store has all keys of the batch.
    """
    parts = [keys[start : start + deadlines.RANKS_AT_ONCE] for start in range(0, len(keys), deadlines.RANKS_AT_ONCE)]
    parts.reverse()

    def ready() -> bool:
        while parts and store.check(list(parts[-1])):
            found(parts.pop())
        return not parts

    return ready


def value_of(store: Any, key: str) -> bytes | None:
    """Returns the value of a key, or None. Never waits for a key that was deleted a moment ago, as `get` would."""
    value: bytes = store.compare_set(key, _NO_VALUE, _NO_VALUE)
    return None if value == _NO_VALUE.encode() else value


def is_shared(store: Any) -> bool:
    """False for a store in the memory of this process: a forked child has its own copy of such a store."""
    if isinstance(store, OwnStore):
        return False
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return not isinstance(store, dist.HashStore)  # type: ignore[attr-defined]


def has_any(store: Any, *keys: str) -> bool:
    """Returns True if the store has at least one of the keys."""
    return any(store.check([key]) for key in keys)


def poll(ready: Callable[[], bool], pollers: int, deadline: float, limit: WaitLimit) -> bool:
    """Calls `ready` until it returns True. Returns False if the deadline or the limit passes first.

    `pollers` is the number of ranks that may poll the store at the same time, and slow each other down.

    Does not call `store.wait()`, which blocks the store's client, and prints to stderr after a timeout.
    """
    started = time.monotonic()
    # Each pause is about a tenth of the time waited so far. So both the delay and the number of requests stay small.
    shortest = max(deadlines.POLL_FIRST_S, pollers * deadlines.POLL_PER_RANK_S)
    longest = max(deadlines.POLL_MOST_S, pollers * deadlines.POLL_MOST_PER_RANK_S)
    while not ready():
        now = time.monotonic()
        left = min(deadline, limit.end_of(started)) - now
        if left <= 0:
            return False
        time.sleep(min(max(shortest, (now - started) / 10), longest, left))
    return True


@contextmanager
def store_failures(topic: str, error: type[CheckpointError]) -> Iterator[None]:
    """Raises `error` if the store is lost because the process that hosts it has died."""
    try:
        yield
    except CheckpointError:  # this clause must come before RuntimeError, because InvalidStateError is both
        raise
    except RuntimeError as failure:
        # For a lost connection, torch.distributed raises RuntimeError or a subclass (DistStoreError, DistNetworkError).
        raise error(
            f"{topic}: the key-value store is gone ({failure}). The process that hosts it, usually rank 0, has died. "
            "Look at the log of that process"
        ) from failure


def timeout_of(rank: int, timeout_s: float) -> float:
    """Returns how long a rank waits, in seconds.

    Other ranks wait longer than rank 0, so that rank 0 can tell them who is silent.
    """
    return timeout_s if rank == 0 else timeout_s + min(timeout_s / 2, deadlines.EXTRA_WAIT_S)


def silence_of(topic: str, ranks: Sequence[int], waited_s: float, is_short: bool = False) -> str:
    """Returns an error message for ranks that are silent.

    `is_short`: whether a rank gave up before the timeout, because its process or its machine ends soon.
    """
    silent = f"{topic}: no word from rank {', '.join(map(str, ranks))} within {waited_s:g} s"
    advice = "A silent rank is dead or stuck: look at its log"
    if is_short:
        return f"{silent}, and a rank that waits has no time left. {advice}"
    return f"{silent}. {advice}. If the rank was only slow, raise timeout_s"


def silence_of_rank_0(topic: str, rank: int, waited_s: float, is_short: bool = False) -> str:
    """Returns an error message for `rank`, which has waited for rank 0 in vain. For `is_short` see `silence_of`."""
    waited = f"{topic}: rank {rank} waited {waited_s:g} s for rank 0"
    if is_short:
        return f"{waited}, and has no time left. Look at rank 0's log: it may be dead, stuck, at work, or waiting, too"
    return f"{waited}, which is dead or stuck, or is itself waiting. Look at rank 0's log"
