"""URLs of remote stores: what is refused, and no message shows a secret."""

import os
import time
from pathlib import Path

import fsspec
import pytest

from mcore_ckpt.errors import CheckpointError, RemoteError, UnsupportedError
from mcore_ckpt.io import retries, tuning
from mcore_ckpt.io import store as store_module
from mcore_ckpt.io.store import Store
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.urls import public_url
from tests.support.remote_store import Outage, failing


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("s3://bucket/prefix/", "s3://bucket/prefix"),
        ("hdfs://user:pa55@host:8020/x?token=abc", "hdfs://host:8020/x"),
        ("memory://x", "memory://x"),
        ("file:///a/b", "file:///a/b"),
    ],
)
def test_a_url_in_messages_has_no_credentials(url: str, public: str) -> None:
    assert public_url(url) == public


def test_an_error_of_the_store_is_told_without_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteSteps(Store("memory://user:pa55word@x/y"))
    with failing(remote, before=lambda *_: (_ for _ in ()).throw(Outage("no route for user:pa55word"))):
        monkeypatch.setattr(retries, "REMOTE_TRIES", 1)
        with pytest.raises(RemoteError, match="no route for") as caught:
            remote.steps()
    assert "pa55word" not in str(caught.value)


@pytest.mark.parametrize("url", ["/a/path", "bucket/prefix", "nosuch://x", "simplecache::s3://x"])
def test_what_is_no_url_of_a_store_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="remote is"):
        RemoteSteps(Store(url))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UnsupportedError, match=r"pip install 'mcore_ckpt\[s3\]'"):
        RemoteSteps(Store("s3://key:secret@bucket/x"))


def test_an_error_that_stays_is_not_tried_again(tmp_path: Path) -> None:
    tries = []

    def work() -> None:
        tries.append(1)
        raise PermissionError(13, "Permission denied")

    with pytest.raises(RemoteError, match=r"listing has failed once, for a lasting reason: .*Permission denied"):
        Store(f"file://{tmp_path}").persist("listing", work)
    assert tries == [1]


def test_what_a_process_left_that_died_while_it_replaced_a_file_is_removed(tmp_path: Path) -> None:
    """But nothing of another file, and nothing that may still be written."""
    old, fresh = "0123456789abcdef" * 2, "fedcba9876543210" * 2
    others = {f".tracker.txt.{old}", ".tracker.txt", ".tracker.bak", f".other.{old}", f"tracker.{old}"}
    long_ago = time.time() - tuning.ABANDONED_S - 1
    for name in {f".tracker.{old}"} | others:
        (tmp_path / name).write_bytes(b"7")
        os.utime(tmp_path / name, (long_ago, long_ago))
    (tmp_path / f".tracker.{fresh}").write_bytes(b"8")
    Store(tmp_path.as_uri()).replace("tracker", b"9")
    assert (tmp_path / "tracker").read_bytes() == b"9"
    assert {path.name for path in tmp_path.iterdir()} == {"tracker", f".tracker.{fresh}"} | others


def test_a_new_name_in_a_folder_as_store_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power loss could leave a manifest without a file that it names."""
    synced: list[Path] = []
    monkeypatch.setattr(store_module, "sync_dir", synced.append)
    with Store(tmp_path.as_uri()).writing("step/some.bin", 1 << 20) as stream:
        stream.write(b"data")
        synced.clear()
    assert synced == [tmp_path / "step"]


def test_errors_are_of_the_family() -> None:
    assert issubclass(RemoteError, CheckpointError)
