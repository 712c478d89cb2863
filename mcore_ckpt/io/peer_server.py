"""Serves the files below a folder to the other nodes of a job, over TCP.

A request is one line of JSON, an answer a header and bytes:

    request    {"token": ..., "verb": "read", "path": ..., "start": ..., "stop": ...}  newline
    answer     one byte (0: here it is, 1: there is no such file, 2: refused), 8 bytes (length, big-endian), the bytes

`peer_store.py` is the other side. A connection carries one request after the other. The verbs are `read` (bytes of a
file), `sizes` (the files below a folder, as JSON) and `note` (bytes that this process has published under a name).

Who does not know the token gets nothing. The token is random, and the job's key-value store has it. Nothing is
encrypted, as in the job's other traffic (gloo, NCCL).
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io.files import inside, open_regular
from mcore_ckpt.io.folder_sizes import sizes_below

logger = logging.getLogger(__name__)

HEADER = struct.Struct("!BQ")
HERE, MISSING, REFUSED = range(3)
# The longest request line, in bytes. Paths are shorter than 4096 bytes.
REQUEST_BYTES = 16384
# A connection that sends nothing for so long is closed. A client then opens another one.
_IDLE_S = 300.0
# The pause after a connection could not be accepted, in seconds.
_ACCEPT_PAUSE_S = 0.1


class PeerServer:
    """Serves the files below a folder to other nodes until it is closed.

    Args:
        folder: the folder. Nothing outside it is served.
        token: what a request must contain.
        host: the address to listen on, without port.

    Raises:
        OSError: the address cannot be used.

    Example:
        >>> server = PeerServer(Path("/dev/shm/run"), token, "10.0.0.7")  # doctest: +SKIP
        >>> server.address  # doctest: +SKIP
        '10.0.0.7:40213'
    """

    def __init__(self, folder: Path, token: str, host: str) -> None:
        self._folder, self._token = folder, token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=512)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._notes: dict[str, bytes] = {}
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="mcore_ckpt peer server", daemon=True).start()

    def publish(self, name: str, data: bytes, instead_of: str | None = None) -> None:
        """Serves bytes under a name until the server is closed, or until another note takes their place."""
        with self._lock:
            if instead_of is not None:
                self._notes.pop(instead_of, None)
            self._notes[name] = data

    def close(self) -> None:
        """Stops serving. Connections that are open are cut."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        with self._lock:
            open_now = list(self._connections)
        for connection in open_now:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._is_closed():
                    return
                logger.warning("the server of %s cannot accept a connection: %s", self._folder, error)
                time.sleep(_ACCEPT_PAUSE_S)  # too many files may be open, which lasts a while
                continue
            with self._lock:
                self._connections.add(connection)
            if self._is_closed():  # `close` may have looked at the connections before this one was there
                self._drop(connection)
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="mcore_ckpt peer", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system grants no thread: the client tries another node
                self._drop(connection)

    def _is_closed(self) -> bool:
        return self._closed

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_IDLE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection.makefile("rb") as requests:
                while self._answer(connection, requests):
                    pass
        except OSError as error:
            logger.debug("a peer has gone away: %s", error)
        finally:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        with suppress(OSError):  # the client has gone
            connection.shutdown(socket.SHUT_RDWR)  # `close` alone would do nothing while a forked process has it, too
        connection.close()

    def _answer(self, connection: socket.socket, requests: BinaryIO) -> bool:
        """Answers the next request. Returns False if there is none, or if it makes no sense."""
        line = requests.readline(REQUEST_BYTES)
        if not line.endswith(b"\n"):
            return False
        try:
            request = json.loads(line)
            verb, path, token = str(request["verb"]), str(request["path"]), str(request["token"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        # JSON can spell text that UTF-8 cannot encode.
        if not hmac.compare_digest(token.encode(errors="surrogatepass"), self._token.encode()):
            logger.warning("a request without the job's token was refused: does another job use this port?")
            _send(connection, REFUSED, b"wrong token")
            return False
        try:
            self._obey(connection, verb, path, request)
        except (FileNotFoundError, NotADirectoryError):
            _send(connection, MISSING, b"")
        except (CheckpointCorruptError, ValueError, _UnreadableError) as error:
            _send(connection, REFUSED, str(error).encode(errors="replace"))
        return True

    def _obey(self, connection: socket.socket, verb: str, path: str, request: dict[str, Any]) -> None:
        if verb == "read":
            self._send_range(connection, path, request.get("start"), request.get("stop"))
        elif verb == "sizes":
            _send(connection, HERE, json.dumps(self._sizes_below(path)).encode())
        elif verb == "note":
            with self._lock:
                data = self._notes.get(path)
            _send(connection, MISSING if data is None else HERE, data or b"")
        else:
            raise ValueError(f"{verb!r} is no verb")

    def _send_range(self, connection: socket.socket, path: str, start: Any, stop: Any) -> None:
        descriptor = self._open(path)
        with open(descriptor, "rb", buffering=0) as file:
            size = os.fstat(descriptor).st_size
            start, stop = 0 if start is None else start, size if stop is None else stop
            if not (isinstance(start, int) and isinstance(stop, int) and 0 <= start <= stop <= size):
                raise ValueError(f"{path} has {size} bytes, so [{start}, {stop}) cannot be read")
            connection.sendall(HEADER.pack(HERE, stop - start))
            if stop > start:
                sent = connection.sendfile(file, start, stop - start)
                if sent != stop - start:
                    raise OSError(f"{path} was cut while it was sent")

    def _sizes_below(self, path: str) -> dict[str, int]:
        folder = inside(self._folder, path)
        if not folder.is_dir():
            raise FileNotFoundError(str(folder))
        try:
            return sizes_below(folder)
        except OSError as error:
            raise _UnreadableError(str(error)) from error

    def _open(self, path: str) -> int:
        try:
            return open_regular(inside(self._folder, path))
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise _UnreadableError(str(error)) from error


class _UnreadableError(Exception):
    """A file cannot be opened. This is an answer, whereas another OSError is of the connection, which is closed."""


def _send(connection: socket.socket, status: int, data: bytes) -> None:
    connection.sendall(HEADER.pack(status, len(data)))
    connection.sendall(data)
