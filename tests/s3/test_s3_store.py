"""Remote copies in an S3 store: the same promises, with the store's own requests failing, and real kills."""

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.io import retries, tuning
from mcore_ckpt.io.store import Store
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.steps.retention import PreservationPolicy
from mcore_ckpt.steps.upload_queue import UploadQueue
from tests.s3.conftest import BUCKET
from tests.s3.proxy import Proxy
from tests.support import checkpoints
from tests.support.remote_store import LONG_S, role_dir, save, upload, version_at, versions

SEED = 6


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "REMOTE_PAUSE_S", 0.001)
    # What a store fails to do, this package tries again, not s3fs, which would pause for seconds.
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)


@pytest.fixture
def proxy(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
def direct(server: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteSteps:
    """A way to the store past the proxy; and the bucket."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server[0]}:{server[1]}")
    remote = RemoteSteps(Store(f"s3://{BUCKET}/{tmp_path.name}/run"))
    if not remote.store.fs.exists(BUCKET):
        remote.store.fs.mkdir(BUCKET)
    return remote


@pytest.fixture
def remote(proxy: Proxy, direct: RemoteSteps, monkeypatch: pytest.MonkeyPatch) -> RemoteSteps:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    return RemoteSteps(Store(direct.store.url))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "local"


def uploads_of(remote: RemoteSteps, root: Path, keep: int | None = None) -> UploadQueue:
    return UploadQueue(remote, root, "actor", PreservationPolicy(keep))


def test_steps_arrive_are_replaced_and_pruned(remote: RemoteSteps, root: Path) -> None:
    uploads = uploads_of(remote, root, keep=2)
    for step, version in ((1, 1), (2, 2), (3, 3), (3, 33)):
        save(root, step, version)
        told = upload(uploads, step)
        assert told.done, told.exception
    assert versions(remote) == {2: 2, 3: 33}
    assert remote.read_tracker() == 3
    assert not [name for name in remote.store.sizes("") if name.startswith("global_steps_1/")]


def test_what_the_store_says_of_a_file_is_believed_and_nothing_is_read_back(
    proxy: Proxy, remote: RemoteSteps, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a file that goes in several parts."""
    monkeypatch.setattr(tuning, "UPLOAD_PART_BYTES", 5 << 20)
    monkeypatch.setitem(checkpoints.SHAPES, "embedding.weight", (1031, 3001))
    save(root, 1, version=1)
    proxy.start_counting()
    assert upload(uploads_of(remote, root), 1).done
    fetched = [path for method, path, _ in proxy.seen if method == "GET" and path.endswith(".pt")]
    assert fetched == []
    parts = [path for method, path, _ in proxy.seen if method == "PUT" and "partNumber" in path]
    assert len(parts) == 3
    assert versions(remote) == {1: 1}


def test_bytes_that_change_on_their_way_are_sent_again(proxy: Proxy, remote: RemoteSteps, root: Path) -> None:
    save(root, 1, version=1)
    changed: list[str] = []

    def change_one(number: int, method: str, path: str) -> str:
        if method == "PUT" and path.endswith(file_names.MODEL_FILE) and not changed:
            changed.append(path)
            return "change"
        return "pass"

    proxy.start_counting(change_one)
    assert upload(uploads_of(remote, root), 1).done
    assert changed
    assert [method for method, path, _ in proxy.seen if path in changed].count("PUT") == 2
    proxy.start_counting()
    assert versions(remote) == {1: 1}


def test_requests_that_fail_now_and_then(proxy: Proxy, remote: RemoteSteps, root: Path) -> None:
    chance = random.Random(SEED)
    proxy.start_counting(lambda *_: chance.choice(["drop", "lose", "500"]) if chance.random() < 0.08 else "pass")
    uploads = uploads_of(remote, root, keep=2)
    for step in (1, 2, 3):
        save(root, step, version=step)
        told = upload(uploads, step)
        assert told.done, told.exception
    assert versions(remote) == {2: 2, 3: 3}


def test_an_outage_is_over_when_it_is_over(
    proxy: Proxy, remote: RemoteSteps, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "REMOTE_TRIES", 2)
    uploads = uploads_of(remote, root)
    save(root, 1, version=1)
    proxy.start_counting(lambda number, *_: "drop" if number > 8 else "pass")
    told = upload(uploads, 1)
    assert not told.done
    proxy.start_counting()
    save(root, 2, version=2)
    upload(uploads, 2)
    assert told.done
    assert versions(remote) == {1: 1, 2: 2}


def test_only_what_is_wanted_is_fetched(
    proxy: Proxy, remote: RemoteSteps, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checkpoints.SHAPES, "embedding.weight", (1031, 3001))
    save(root, 1, version=1)
    upload(uploads_of(remote, root), 1)
    nbytes = read_manifest(role_dir(root, 1)).nbytes
    proxy.start_counting()
    assert version_at(remote, 1) == 1
    # Each byte of a tensor once: less than the files, which have a zip's directory and a pickle each.
    assert 0.99 * nbytes < sum(size for _, path, size in proxy.seen if path.endswith(".pt")) < nbytes
    from tests.support.remote_reading import read_rows

    proxy.start_counting()
    read_rows(remote, 1, "embedding.weight", slice(500, 510))
    fetched = sum(size for method, path, size in proxy.seen if method == "GET" and path.endswith(".pt"))
    # Ten rows of 12 KB lie in one or two blocks of 1 MiB; the index is read as well.
    assert fetched < 2.1 * (1 << 20)


def killed_uploading(remote: RemoteSteps, root: Path, step: int) -> int:
    """UploadQueue in a process of its own; its exit status, negative if it was killed."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            fresh = RemoteSteps(Store(remote.store.url))
            ok = upload(uploads_of(fresh, root, keep=1), step).done
            os._exit(0 if ok else 1)
        finally:
            os._exit(2)
    _CHILD[0] = child
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


_CHILD = [0]


@pytest.mark.parametrize(
    ("first", "second", "points"),
    [pytest.param(14, 18, 3, id="some"), pytest.param(1, 3, 20, id="all", marks=pytest.mark.full)],
)
def test_a_process_killed_at_any_request_leaves_a_newest_step_that_loads(
    proxy: Proxy, direct: RemoteSteps, remote: RemoteSteps, root: Path, first: int, second: int, points: int
) -> None:
    """SIGKILL at requests of an upload with retention, and then of the only step there is, saved again.

    In turn before the store has got the request, and after: the strides are odd. CI kills at every seventh request of
    the first upload (at its begin, among the files, behind them, in retention) and at every ninth of the second.
    `points` is the least number of kills.
    """
    save(root, 1, version=1)
    assert killed_uploading(remote, root, 1) == 0
    log: list[tuple[int, int, int, dict[int, int]]] = []
    for step, new, stride in ((2, 12, first), (2, 22, second)):
        old = versions(direct)
        save(root, step, version=new)
        for number in range(1, 1000, stride):
            kill = Kill(number)
            proxy.start_counting(kill)
            status = killed_uploading(remote, root, step)
            found = versions(direct)
            log.append((step, number, status, found))
            assert found, log
            newest = max(found)
            assert found[newest] in (old.get(newest), new), log
            if not kill.done:
                assert status == 0, log
                break
            assert status == -signal.SIGKILL, log
        assert versions(direct) == {step: new}
        assert direct.read_tracker() == step
    assert sum(status < 0 for _, _, status, _ in log) >= points, log


class Kill:
    """Ends the uploading process at a request, and answers none from then on."""

    def __init__(self, number: int) -> None:
        self.number, self.done = number, False

    def __call__(self, number: int, method: str, path: str) -> str:
        if number < self.number:
            return "pass"
        if self.done:
            return "drop"
        self.done = True
        if self.number % 2:
            os.kill(_CHILD[0], signal.SIGKILL)
            return "drop"
        threading.Timer(0.01, os.kill, (_CHILD[0], signal.SIGKILL)).start()
        return "lose"


def test_a_missing_bucket_is_told_and_training_goes_on(
    direct: RemoteSteps, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "REMOTE_TRIES", 2)
    remote = RemoteSteps(Store("s3://no-such-bucket/x"))
    save(root, 1, version=1)
    uploads = uploads_of(remote, root)
    told = uploads.committed(1)
    assert uploads.wait(LONG_S)
    assert not told.done
    assert "no-such-bucket" in str(told.exception)


def test_errors_and_addresses(direct: RemoteSteps) -> None:
    assert isinstance(direct.store.fs, s3fs.S3FileSystem)
    assert direct.steps() == []
    assert direct.read_tracker() is None
