"""Fixtures for the tests of the fast tier."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mcore_ckpt.fast.peer_server import PeerServer
from mcore_ckpt.fast.peer_store import PeerStore
from tests.support.checkpoint_fixtures import dead_pid, role_dir, small_knobs
from tests.support.peer_talk import HOST, SECRET
from tests.support.waiting import LONG_S

__all__ = ["dead_pid", "role_dir", "server", "small_knobs", "store"]


@pytest.fixture
def server(folder: Path) -> Iterator[PeerServer]:
    """Serves the folder of the test, which has a fixture of that name."""
    with closing(PeerServer(folder, SECRET, HOST)) as server:
        yield server


@pytest.fixture
def store(server: PeerServer) -> Iterator[PeerStore]:
    """Another node's client of that server."""
    with closing(PeerStore(server.address, SECRET, "node7", LONG_S)) as store:
        yield store
