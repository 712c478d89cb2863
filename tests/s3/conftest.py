"""An S3 store on loopback, and a proxy before it that can fail. Run by tests/test_s3.py, which puts their packages on
the path.
"""

import logging
import os
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.slow

collect_ignore_glob = [] if "MCORE_CKPT_S3" in os.environ else ["test_*.py"]

BUCKET = "bucket"


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[str, int]]:
    """moto's, in this process: what it holds outlives every failure that a test makes."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    yield moto.get_host_and_port()
    moto.stop()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user of S3 has it: nothing of it is told to this package."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        # What a store fails to do, this package tries again, not botocore: the proxy counts each request once.
        "AWS_MAX_ATTEMPTS": "1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    # No look at the machine's own settings, and no search for a metadata service.
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
