"""How nodes read each other's folders: the protocol, and its form over TCP.

Nothing else in this room knows how bytes travel. Another network is another class with these methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mcore_ckpt.fast.peer_server import PeerServer
from mcore_ckpt.fast.peer_store import PeerStore
from mcore_ckpt.fast.peer_tls import PeerTls


class Server(Protocol):
    """Serves this node's folder to the others."""

    @property
    def address(self) -> str:
        """By what other nodes find this server."""

    def publish(self, name: str, data: bytes, instead_of: str | None = None) -> None:
        """Serves bytes under a name until the server is closed, or until another note takes their place."""

    def close(self) -> None:
        """Stops serving. In a forked child it does nothing."""


class Peer(Protocol):
    """Another node, as this one reads from it. No call waits without a deadline. All raise `peer_store.PeerError`."""

    def url_of(self, key: str) -> str:
        """Returns how messages call a file of this node."""

    def read(self, key: str, start: int, stop: int) -> bytearray:
        """Reads bytes `[start, stop)` of a file. Raises FileNotFoundError if there is none."""

    def read_into(self, key: str, start: int, memory: memoryview) -> None:
        """Fills memory with bytes of a file from byte `start` on. Raises FileNotFoundError if there is none."""

    def read_all(self, key: str, most: int) -> bytes:
        """Reads a whole small file. Raises CheckpointCorruptError if it is larger than `most` bytes."""

    def sizes(self, key: str) -> dict[str, int]:
        """Returns the sizes in bytes of the files below a folder, by their paths below it."""

    def note(self, name: str, most: int, patience_s: float) -> bytes:
        """Returns the bytes that the node has published under a name. Waits until there are some."""

    def close(self) -> None:
        """Gives back what no thread uses."""


class Transport(Protocol):
    """Connects the nodes of one job, which know each other by a secret."""

    def serve(self, folder: Path, host: str) -> Server:
        """Serves the files below a folder, and nothing else, at this node's address. Raises OSError."""

    def peer(self, address: str, name: str) -> Peer:
        """Returns the node whose server has this address. `name` is for messages."""


@dataclass(frozen=True)
class TcpTransport:
    """Connects nodes over TCP (`peer_protocol.py`).

    Attributes:
        secret: by what the nodes know each other.
        timeout_s: how long to wait for another node, in seconds.
        tls: how connections are encrypted; None if they are not.
    """

    secret: bytes
    timeout_s: float
    tls: PeerTls | None = None

    def serve(self, folder: Path, host: str) -> Server:
        return PeerServer(folder, self.secret, host, self.tls)

    def peer(self, address: str, name: str) -> Peer:
        return PeerStore(address, self.secret, name, self.timeout_s, self.tls)
