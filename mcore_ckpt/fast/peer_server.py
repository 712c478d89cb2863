"""Serves the files below a folder to the other nodes of a job, over TCP (`peer_protocol.py`).

A client that does not know the secret gets no file and can do little harm: few connections of such clients are open at
a time, each only for a moment. Nothing waits for the other side without a deadline.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakSet

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.fast.peer_protocol import HEADER, HERE, MISSING, REFUSED, REQUEST_BYTES, admit, answer_time_s
from mcore_ckpt.fast.peer_tls import PeerTls
from mcore_ckpt.io.files import inside, open_regular
from mcore_ckpt.io.folder_sizes import sizes_below
from mcore_ckpt.processes import Home

logger = logging.getLogger(__name__)

# How long a client may take to prove that it knows the secret, and to send a request that it has begun (seconds).
_INTRODUCTION_S, _REQUEST_S = 5.0, 10.0
# How long an answer may take in addition to the time for its bytes, `answer_time_s` (seconds).
_ANSWER_S = 30.0
# A connection is closed after this many seconds without a request. The client then opens another connection.
_IDLE_S = 300.0
# The time between two checks of the deadlines (seconds).
_LOOK_S = 0.5
# How many connections are open at most: of known clients, and of clients that are not known yet. The second limit is
# small, because anybody can open such connections, and each connection has a thread.
_MOST_KNOWN, _MOST_UNKNOWN = 1024, 64
# How many descriptors stay free for the training and its saves.
_SPARE_DESCRIPTORS = 64
# The least time between two messages about unknown clients (seconds). Anybody can cause such messages.
_QUIET_S = 60.0


class _Client:
    """A connection to this server. The server cuts the connection at the `deadline` (`time.monotonic()`).

    A client `is_known` once it has proved that it knows the secret, and `is_idle` while it has no request under way.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline = time.monotonic() + _INTRODUCTION_S
        self.is_known = self.is_idle = False

    def cut(self) -> None:
        """Ends the connection, and wakes the thread that waits for data."""
        with suppress(OSError):  # the client has gone
            # `close` alone would do nothing while a forked process has the connection, too. `SSLSocket.shutdown` would
            # first drop the state for decryption, which the reading thread still uses.
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)

    def may_take(self, seconds: float) -> None:
        """Moves the deadline to `seconds` seconds from now."""
        self.deadline = time.monotonic() + seconds


class PeerServer:
    """Serves the files below a folder, and no other files, to nodes that know the secret.

    The class implements `transport.Server`. `host` is the address to listen on, without port. Raises OSError if this
    address cannot be used.
    """

    def __init__(self, folder: Path, secret: bytes, host: str, tls: PeerTls | None = None) -> None:
        self._folder, self._secret, self._tls = folder, secret, tls
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=512)
        self._socket.settimeout(_LOOK_S)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._notes: dict[str, bytes] = {}
        self._clients: dict[_Client, None] = {}  # in the order in which the clients came
        # The lock is reentrant, because the garbage collector may close the server of a dropped manager on any thread,
        # even on a thread that holds the lock.
        self._lock = threading.RLock()
        self._closed, self._home = False, Home()
        self._quiet_until = 0.0
        _servers.add(self)
        threading.Thread(target=self._accept, name="mcore_ckpt peer server", daemon=True).start()

    def publish(self, name: str, data: bytes, instead_of: str | None = None) -> None:
        with self._lock:
            if instead_of is not None:
                self._notes.pop(instead_of, None)
            self._notes[name] = data

    def close(self) -> None:
        if not self._home.is_here:
            return
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        for client in self._all_clients():
            client.cut()

    def leave_to_parent(self) -> None:
        """Closes the descriptors that a forked child has inherited, so that the port is free when the parent ends."""
        self._closed = True
        for each in (self._socket, *(client.connection for client in self._clients)):
            with suppress(OSError):
                os.close(each.detach())

    def _accept(self) -> None:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        while not self._is_closed():
            self._cut_overdue()
            if not waiting.poll(_LOOK_S * 1000):
                continue
            if not self._has_slot():
                time.sleep(_LOOK_S)  # further clients wait in the socket's queue
                continue
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:  # the client has gone
                continue
            except OSError as error:
                if not self._is_closed():
                    self._tell("the server of %s cannot accept a connection: %s", self._folder, error)
                    time.sleep(_LOOK_S)  # perhaps too many files are open: try again later
                continue
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        """Serves a new connection on a new thread."""
        # A new descriptor has the smallest free number, so a high number means that many descriptors are in use.
        if connection.fileno() >= _most_descriptors() - _SPARE_DESCRIPTORS:
            self._tell(
                "the server of %s refuses connections, because too many files are open: raise ulimit -n", self._folder
            )
            connection.close()
            return
        if self._tls is not None:
            connection = self._tls.server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        client = _Client(connection)
        with self._lock:
            self._clients[client] = None
        if self._is_closed():  # `close` may have looked at the connections before this connection was there
            self._drop(client)
            return
        try:
            threading.Thread(target=self._serve, args=(client,), name="mcore_ckpt peer", daemon=True).start()
        except RuntimeError:  # the system grants no thread: the client tries another node
            self._drop(client)

    def _is_closed(self) -> bool:
        return self._closed

    def _all_clients(self) -> list[_Client]:
        with self._lock:
            return list(self._clients)

    def _cut_overdue(self) -> None:
        """Cuts connections that are too slow. If too many clients are unknown, cuts the oldest unknown clients, too."""
        now, clients = time.monotonic(), self._all_clients()
        for client in clients:
            if client.deadline < now:
                client.cut()
        strangers = [client for client in clients if not client.is_known]
        for client in strangers[: max(0, len(strangers) + 1 - min(_MOST_UNKNOWN, _most_descriptors() // 8))]:
            self._forget(client)

    def _has_slot(self) -> bool:
        """Returns True if one more client may come. If the server is full, cuts the client that was idle longest."""
        known = [client for client in self._all_clients() if client.is_known]
        if len(known) < min(_MOST_KNOWN, _most_descriptors() // 4):
            return True
        idle = min((client for client in known if client.is_idle), key=lambda each: each.deadline, default=None)
        if idle is None:
            return False
        self._forget(idle)
        return True

    def _tell(self, message: str, *values: object) -> None:
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + _QUIET_S
            logger.warning(message, *values)

    def _serve(self, client: _Client) -> None:
        connection = client.connection
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection.do_handshake()  # type: ignore[attr-defined]
            if not admit(connection, self._secret, client.deadline):
                self._tell("a connection without the job's secret was refused: does another job use this port?")
                return
            client.is_known = True
            connection.settimeout(None)  # the deadline cuts the connection
            with connection.makefile("rb") as requests:
                while self._answer(client, requests):
                    pass
        except (OSError, ValueError) as error:  # ValueError: another thread has closed the SSLSocket
            logger.debug("a peer has gone away: %s", error)
        finally:
            self._drop(client)

    def _forget(self, client: _Client) -> None:
        """Cuts a connection, but does not close it.

        Only the connection's own thread closes the connection. Otherwise another file could get the descriptor while
        that thread still uses it.
        """
        with self._lock:
            self._clients.pop(client, None)
        client.cut()

    def _drop(self, client: _Client) -> None:
        self._forget(client)
        client.connection.close()

    def _answer(self, client: _Client, requests: BinaryIO) -> bool:
        """Answers the next request. Returns False if there is no request, or if the request makes no sense."""
        client.may_take(_IDLE_S)
        client.is_idle = True
        begun = requests.peek(1)  # type: ignore[attr-defined]
        client.is_idle = False
        client.may_take(_REQUEST_S)
        line = requests.readline(REQUEST_BYTES) if begun else b""
        if not line.endswith(b"\n"):
            return False
        try:
            request = json.loads(line)
            verb, path = str(request["verb"]), str(request["path"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        client.may_take(_ANSWER_S)
        try:
            self._obey(client, verb, path, request)
        except (FileNotFoundError, NotADirectoryError):
            _send(client, MISSING, b"")
        except (CheckpointCorruptError, ValueError, _UnreadableError) as error:
            _send(client, REFUSED, str(error).encode(errors="replace"))
        return True

    def _obey(self, client: _Client, verb: str, path: str, request: dict[str, Any]) -> None:
        if verb == "read":
            self._send_range(client, path, request.get("start"), request.get("stop"))
        elif verb == "sizes":
            _send(client, HERE, json.dumps(self._sizes_below(path)).encode())
        elif verb == "note":
            with self._lock:
                data = self._notes.get(path)
            _send(client, MISSING if data is None else HERE, data or b"")
        else:
            raise ValueError(f"{verb!r} is not a known verb")

    def _send_range(self, client: _Client, path: str, start: Any, stop: Any) -> None:
        descriptor = self._open(path)
        with open(descriptor, "rb", buffering=0) as file:
            size = os.fstat(descriptor).st_size
            start, stop = 0 if start is None else start, size if stop is None else stop
            if not (isinstance(start, int) and isinstance(stop, int) and 0 <= start <= stop <= size):
                raise ValueError(f"{path} has {size} bytes, so [{start}, {stop}) cannot be read")
            client.may_take(_ANSWER_S + answer_time_s(stop - start))
            connection = client.connection
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
    """A file cannot be opened. The server sends this error; after any other OSError, it closes the connection."""


def _send(client: _Client, status: int, data: bytes) -> None:
    client.may_take(_ANSWER_S + answer_time_s(len(data)))
    client.connection.sendall(HEADER.pack(status, len(data)))
    client.connection.sendall(data)


def _most_descriptors() -> int:
    """Returns how many descriptors this process may have now. A training may change this limit at any time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


_servers: WeakSet[PeerServer] = WeakSet()


def _leave_to_parent() -> None:
    for server in list(_servers):
        server.leave_to_parent()
    _servers.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
