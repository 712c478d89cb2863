"""Reads files of another node of the job from the node's peer server (`peer_server.py`)."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.fast.peer_protocol import (
    HEADER,
    HERE,
    MISSING,
    REFUSED,
    ConnectionEndedError,
    HandshakeError,
    answer_time_s,
    introduce,
    receive,
    receive_into,
)
from mcore_ckpt.fast.peer_tls import PeerTls
from mcore_ckpt.fast.transport import PeerError
from mcore_ckpt.io.json_fields import FieldError, get_int, parse

# The longest listing, and the longest text that says why a request is refused, in bytes.
_LISTING_BYTES, _REASON_BYTES = 64 << 20, 64 << 10
# The pause before asking again for a note that is not published yet, in seconds.
_NOTE_PAUSE_S = 0.005


class _TooLongError(PeerError):
    """An answer is longer than the caller allows."""


class PeerStore:
    """The files that one node serves at `address`, "host:port". Implements `transport.Peer`.

    The class has the methods of `store.Store` that `formats.native.remote_folder.RemoteFolder` needs. Several threads
    may use one object at once, each with its own connection. A request waits for its answer for `timeout_s` seconds,
    plus the time that the bytes of a long answer take (`answer_time_s`). The node's `name` is for messages.
    """

    def __init__(self, address: str, secret: bytes, name: str, timeout_s: float, tls: PeerTls | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._secret, self._name, self._timeout_s = (host, int(port)), secret, name, timeout_s
        self._tls = tls
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def url_of(self, key: str) -> str:
        return f"{self._name}:{key}"

    def read(self, key: str, start: int, stop: int) -> bytearray:
        data = bytearray(stop - start)
        self.read_into(key, start, memoryview(data))
        return data

    def read_into(self, key: str, start: int, memory: memoryview) -> None:
        self._ask({"verb": "read", "path": key, "start": start, "stop": start + len(memory)}, memory)

    def read_all(self, key: str, most: int) -> bytes:
        try:
            return self._ask({"verb": "read", "path": key}, None, most)
        except _TooLongError as error:
            raise CheckpointCorruptError(f"{error} for such a file") from None

    def sizes(self, key: str) -> dict[str, int]:
        try:
            answer = parse(self._ask({"verb": "sizes", "path": key}, None, _LISTING_BYTES))
            return {path: get_int(answer, path) for path in answer}
        except FileNotFoundError:
            return {}
        except (ValueError, FieldError, RecursionError) as error:
            raise PeerError(f"{self._name}: sent a listing that makes no sense: {error}") from None

    def note(self, name: str, most: int, patience_s: float) -> bytes:
        deadline = time.monotonic() + patience_s
        while True:
            with suppress(FileNotFoundError):
                return self._ask({"verb": "note", "path": name}, None, most)
            if time.monotonic() >= deadline:
                raise PeerError(f"{self._name}: has not published {name} within {patience_s:g} s")
            time.sleep(_NOTE_PAUSE_S)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(self, request: dict[str, Any], memory: memoryview | None, most: int = 0) -> bytes:
        """Sends a request. The answer fills `memory`; if `memory` is None, the answer is returned."""
        line = json.dumps(request).encode() + b"\n"
        connection, is_new = self._connection()
        try:
            try:
                status, length = self._header(connection, line)
            except OSError:
                if is_new:
                    raise
                # Try a new connection, because the server closes idle connections, and a restarted network drops
                # connections.
                connection.close()
                connection = self._connect()
                status, length = self._header(connection, line)
            deadline = time.monotonic() + self._timeout_s + answer_time_s(length)
            if status == HERE and memory is not None:
                if length != len(memory):
                    raise PeerError(f"{self._name}: sent {length} bytes of {request['path']}, not {len(memory)}")
                receive_into(connection, memory, deadline)
                data = b""
            else:
                if status == HERE and length > most:
                    raise _TooLongError(
                        f"{self.url_of(request['path'])}: has {length} bytes, more than the {most} allowed"
                    )
                data = receive(connection, length, deadline)
        except BaseException as error:
            connection.close()
            if isinstance(error, PeerError) or not isinstance(error, OSError):
                raise
            raise self._silent(error) from error
        with self._lock:
            self._idle.append(connection)
        if status == MISSING:
            raise FileNotFoundError(self.url_of(request["path"]))
        if status != HERE:
            raise PeerError(f"{self._name}: refused {request['path']}: {data[:200].decode(errors='replace')}")
        return data

    def _connection(self) -> tuple[socket.socket, bool]:
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        return self._connect(), True

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + self._timeout_s
        try:
            connection = socket.create_connection(self._address, timeout=self._timeout_s)
        except OSError as error:
            raise PeerError(f"{self._name}: cannot be reached at {self._address[0]}: {error}") from error
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.client.wrap_socket(connection)
            introduce(connection, self._secret, deadline)
        except OSError as error:
            connection.close()
            raise self._silent(error) from error
        return connection

    def _header(self, connection: socket.socket, request: bytes) -> tuple[int, int]:
        deadline = time.monotonic() + self._timeout_s
        connection.settimeout(self._timeout_s)
        connection.sendall(request)
        status, length = HEADER.unpack(receive(connection, HEADER.size, deadline))
        if status not in (HERE, MISSING, REFUSED) or (status != HERE and length > _REASON_BYTES):
            raise PeerError(f"{self._name}: does not answer as a peer server does: another program may use its port")
        return status, length

    def _silent(self, error: OSError) -> PeerError:
        says_it = isinstance(error, (HandshakeError, ConnectionEndedError))
        return PeerError(f"{self._name}: {error}" if says_it else f"{self._name}: does not answer: {error}")
