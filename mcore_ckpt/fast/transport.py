"""Defines how nodes read each other's folders, over any network.

Each kind of network has a class with the methods of `Transport`: `tcp_transport.py` has the class for TCP.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class PeerError(OSError):
    """A node does not answer, or its answer makes no sense. Another node may have the same bytes."""


class Server(Protocol):
    """Serves this node's folder to the other nodes."""

    @property
    def address(self) -> str:
        """The address by which other nodes find this server."""

    def publish(self, name: str, data: bytes, instead_of: str | None = None) -> None:
        """Serves bytes under a name until the server is closed. Stops serving the bytes under `instead_of`."""

    def close(self) -> None:
        """Stops serving. Does nothing in a forked child."""


class Peer(Protocol):
    """Another node, from which this node reads. Every request has a deadline, and can raise PeerError."""

    def url_of(self, key: str) -> str:
        """Returns the name that messages use for a file of the other node."""

    def read(self, key: str, start: int, stop: int) -> bytearray:
        """Reads bytes `[start, stop)` of a file. Raises FileNotFoundError if there is no such file."""

    def read_into(self, key: str, start: int, memory: memoryview) -> None:
        """Fills memory with bytes of a file from byte `start` on. Raises FileNotFoundError if there is no such file."""

    def read_all(self, key: str, most: int) -> bytes:
        """Reads a whole small file. Raises CheckpointCorruptError if the file is larger than `most` bytes."""

    def sizes(self, key: str) -> dict[str, int]:
        """Returns the sizes in bytes of the files below a folder, by path relative to the folder."""

    def note(self, name: str, most: int, patience_s: float) -> bytes:
        """Returns the bytes that the node has published under a name. Waits at most `patience_s` seconds for them."""

    def close(self) -> None:
        """Closes the connections that no thread uses."""


class Transport(Protocol):
    """Connects the nodes of one job, which know each other by a secret."""

    def serve(self, folder: Path, host: str) -> Server:
        """Serves the files below a folder, and nothing else, at this node's address. Raises OSError."""

    def peer(self, address: str, name: str) -> Peer:
        """Returns the node with the server at this address. `name` is for messages."""
