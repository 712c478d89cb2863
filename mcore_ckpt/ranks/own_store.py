"""A key-value store in the memory of a process that is the only rank of its group."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock


class OwnStore:
    """Has the methods of `torch.distributed.HashStore` (2.13) that an `Agreement` calls, without torch.

    Commands that read no tensor must not wait for the import of torch. Nobody else sets keys, so `get` never waits.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        # A save has rounds on another thread, with the same store. The lock is reentrant, because a signal handler of
        # the trainer may close a manager while this thread holds the lock, and closing uses the store, too.
        self._lock = RLock()

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        return self._values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._values[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key if it has the expected value, or if it is missing and `expected` is "".

        Returns the value of the key afterwards. If the key is missing and a value was expected, returns the expected
        value.
        """
        with self._lock:
            found = self._values.get(key)
            if found is None and expected:
                return expected.encode()
            if found is not None and found != expected.encode():
                return found
            self._values[key] = desired.encode()
        return desired.encode()

    def num_keys(self) -> int:
        return len(self._values)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def clone(self) -> OwnStore:
        """Returns this store itself. No call waits, so several threads can use one store."""
        return self


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
