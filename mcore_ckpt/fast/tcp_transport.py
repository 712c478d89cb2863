"""Connects nodes over TCP. In this room, only this module and `peer_*.py` know how bytes travel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.fast.peer_server import PeerServer
from mcore_ckpt.fast.peer_store import PeerStore
from mcore_ckpt.fast.peer_tls import PeerTls
from mcore_ckpt.fast.transport import Peer, Server


@dataclass(frozen=True)
class TcpTransport:
    """Connects nodes over TCP (`peer_protocol.py`). Waits for another node for at most `timeout_s` seconds."""

    secret: bytes
    timeout_s: float
    tls: PeerTls | None = None

    def serve(self, folder: Path, host: str) -> Server:
        return PeerServer(folder, self.secret, host, self.tls)

    def peer(self, address: str, name: str) -> Peer:
        return PeerStore(address, self.secret, name, self.timeout_s, self.tls)
