"""Talks to peer servers, and to their clients, byte by byte."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mcore_ckpt.fast.peer_protocol import HEADER, HERE, admit, introduce
from mcore_ckpt.fast.peer_server import PeerServer
from tests.support.waiting import LONG_S

SECRET, HOST = b"0badcafe", "127.0.0.1"


def stranger(server: PeerServer) -> socket.socket:
    """A connection of somebody who has proved nothing."""
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LONG_S)


def raw(server: PeerServer) -> socket.socket:
    """A connection of somebody who knows the secret."""
    connection = stranger(server)
    introduce(connection, SECRET, time.monotonic() + LONG_S)
    connection.settimeout(LONG_S)
    return connection


def request(**fields: object) -> bytes:
    return json.dumps({"verb": "read", "path": "some.bin", **fields}).encode() + b"\n"


def answer(connection: socket.socket) -> tuple[int, bytes] | None:
    """The next answer of a server; None if it has closed the connection."""
    with connection.makefile("rb") as file:
        try:
            header = file.read(HEADER.size)
        except ConnectionResetError:  # the server has not read all that was sent
            return None
        if not header:
            return None
        status, length = HEADER.unpack(header)
        return status, file.read(length)


Talk = Callable[[socket.socket, threading.Event], None]


@contextmanager
def broken(talk: Talk) -> Iterator[str]:
    """The address of a server that reads one request of each connection, and then talks."""
    over = threading.Event()
    server = socket.create_server((HOST, 0))
    connections = []

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as requests, suppress(OSError):  # the client has gone away
            if admit(connection, SECRET, time.monotonic() + LONG_S) and requests.readline():
                talk(connection, over)

    def accept() -> None:
        while not over.is_set():
            connection, _ = server.accept()
            connections.append(threading.Thread(target=serve, args=(connection,)))
            connections[-1].start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"{HOST}:{server.getsockname()[1]}"
    finally:
        over.set()
        socket.create_connection(server.getsockname()).close()  # wakes the thread that accepts
        thread.join(LONG_S)
        server.close()
        for each in connections:
            each.join(LONG_S)
            assert not each.is_alive()


def says(data: bytes) -> Talk:
    return lambda connection, over: connection.sendall(data)


def says_and_waits(data: bytes) -> Talk:
    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(data)
        over.wait(LONG_S)

    return talk


def says_for_ever(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(HEADER.pack(HERE, 2**60))
    while not over.is_set():
        connection.sendall(b"x" * 65536)
