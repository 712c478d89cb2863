"""What tests of remote copies share: uploads that end, stores that fail, and what a store holds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.formats.native.remote_folder import RemoteFolder
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.steps.upload_queue import UploadHandle, UploadQueue
from tests.support import checkpoints
from tests.support.checkpoints import ROLE

# Longer than any upload of the tests.
LONG_S = 60.0


def role_dir(root: Path, step: int, role: str = ROLE) -> Path:
    return file_names.step_dir(root, step) / role


def save(root: Path, step: int, version: int) -> None:
    checkpoints.make(role_dir(root, step), version)


def upload(uploads: UploadQueue, step: int) -> UploadHandle:
    told = uploads.committed(step)
    assert uploads.wait(LONG_S)
    return told


def version_at(remote: RemoteSteps, step: int, role: str = ROLE) -> int:
    """Which version a complete step holds. Fails unless every byte is that version's."""
    found = remote.step(step)
    assert found.is_complete, found.reason
    key = file_names.remote_dir(step, role, found.found[role].attempt)
    return checkpoints.read_folder(RemoteFolder(remote.store, key))


def versions(remote: RemoteSteps) -> dict[int, int]:
    """Of all complete steps, each read whole."""
    return {step.step: version_at(remote, step.step) for step in remote.steps() if step.is_complete}


def files(remote: RemoteSteps) -> list[str]:
    return sorted(remote.store.sizes(""))


class Outage(Exception):
    """What a store raises that is out of reach: any type, not only OSError."""


class FailingStore:
    """A file system that a hook is asked about before each operation, and after it.

    Args:
        fs: the real one.
        before, after: called with the operation's number and name; what they raise the operation raises.
    """

    OPERATIONS = ("cat_file", "find", "ls", "info", "makedirs", "open", "rm_file", "rm")

    def __init__(self, fs: Any, before: Callable[[int, str], None], after: Callable[[int, str], None]) -> None:
        self._fs, self._before, self._after = fs, before, after
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._fs, name)
        if name not in self.OPERATIONS:
            return real

        def operation(*args: Any, **kwargs: Any) -> Any:
            result = self.run(name, lambda: real(*args, **kwargs))
            return FailingStream(result, self) if name == "open" else result

        return operation

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        self.count += 1
        number = self.count
        self._before(number, name)
        result = work()
        self._after(number, name)
        return result


class FailingStream:
    def __init__(self, stream: Any, store: FailingStore) -> None:
        self._stream, self._store = stream, store

    def write(self, data: Any) -> None:
        self._store.run("write", lambda: self._stream.write(data))

    def close(self) -> None:
        self._store.run("close", self._stream.close)


@contextmanager
def failing(
    remote: RemoteSteps,
    before: Callable[[int, str], None] = lambda number, name: None,
    after: Callable[[int, str], None] = lambda number, name: None,
) -> Iterator[FailingStore]:
    store = remote.store
    real, store.fs = store.fs, FailingStore(store.fs, before, after)
    try:
        yield store.fs
    finally:
        store.fs = real
