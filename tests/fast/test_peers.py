"""Files of another node, over real sockets: what arrives, what is refused, and what broken servers cost."""

import os
import socket
import struct
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.fast import peer_server
from mcore_ckpt.fast.peer_protocol import HEADER, HERE, MISSING, REFUSED, REQUEST_BYTES
from mcore_ckpt.fast.peer_server import PeerServer
from mcore_ckpt.fast.peer_store import PeerStore
from mcore_ckpt.fast.transport import PeerError
from tests.support.peer_talk import (
    HOST,
    SECRET,
    Talk,
    answer,
    broken,
    raw,
    request,
    says,
    says_and_waits,
    says_for_ever,
)
from tests.support.waiting import LONG_S, join_threads, wait_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "some.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "empty").touch()
    (folder / "deep" / "er" / "ü.json").write_bytes(b"{}")
    (tmp_path / "secret").write_bytes(b"nobody else's")
    return folder


# -- what a server has ----------------------------------------------------------------------------------------


def test_ranges(store: PeerStore, folder: Path) -> None:
    whole = (folder / "some.bin").read_bytes()

    @given(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole))).map(sorted))
    def check(bounds: list[int]) -> None:
        start, stop = bounds
        assert store.read("some.bin", start, stop) == whole[start:stop]
        memory = bytearray(stop - start)
        store.read_into("some.bin", start, memoryview(memory))
        assert memory == whole[start:stop]

    check()


def test_whole_files_and_empty_ones(store: PeerStore) -> None:
    assert store.read_all("deep/er/ü.json", 100) == b"{}"
    assert store.read_all("empty", 0) == b""
    assert store.read("empty", 0, 0) == b""


def test_a_file_larger_than_expected_is_not_read(store: PeerStore) -> None:
    assert len(store.read_all("some.bin", 10240)) == 10240
    with pytest.raises(CheckpointCorruptError, match=r"node7:some\.bin: has 10240 bytes, more than the 10239 allowed"):
        store.read_all("some.bin", 10239)
    assert store.read_all("empty", 5) == b""  # on another connection


def test_a_big_file_in_pieces(store: PeerStore, folder: Path) -> None:
    """Larger than what sockets hold, and with holes, so that it costs little."""
    size = 40 << 20
    with (folder / "big").open("wb") as file:
        file.truncate(size)
        file.seek(size - 3)
        file.write(b"end")
    assert store.read("big", size - 3, size) == b"end"
    memory = memoryview(bytearray(b"\xff" * size))
    store.read_into("big", 0, memory)
    assert bytes(memory[-3:]) == b"end"
    assert not any(memory[:4096])
    assert not any(memory[size // 2 : size // 2 + 4096])


def test_many_threads_share_a_store(store: PeerStore, folder: Path) -> None:
    whole = (folder / "some.bin").read_bytes()

    def read(number: int) -> bool:
        start = number * 37 % len(whole)
        return bytes(store.read("some.bin", start, min(start + 500, len(whole)))) == whole[start : start + 500]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(read, range(400)))
    assert len(store._idle) <= 16


def test_what_is_missing(store: PeerStore) -> None:
    for key in ("nothing", "nowhere/nothing", "some.bin/below"):
        with pytest.raises(FileNotFoundError, match=f"node7:{key}"):
            store.read(key, 0, 5)
        with pytest.raises(FileNotFoundError):
            store.read_all(key, 5)
        assert store.sizes(key) == {}
    assert len(store._idle) == 1  # such an answer does not cost the connection


def test_sizes_below_a_folder(store: PeerStore) -> None:
    assert store.sizes("") == {"some.bin": 10240, "empty": 0, "deep/er/ü.json": 2}
    assert store.sizes("deep") == {"er/ü.json": 2}


@pytest.mark.parametrize(("start", "stop"), [(0, 10241), (10241, 10241), (-1, 5), (7, 6), (0, 2**60)])
def test_ranges_that_a_file_has_not(server: PeerServer, start: int, stop: int) -> None:
    with raw(server) as connection:
        for bounds in ((start, stop), ("0", 5), (0, 5.0), ([], {})):
            connection.sendall(request(start=bounds[0], stop=bounds[1]))
            status, reason = answer(connection) or (None, b"")
            assert status == REFUSED
            assert b"some.bin has 10240 bytes, so" in reason


def test_a_file_that_was_cut(store: PeerStore, folder: Path) -> None:
    os.truncate(folder / "some.bin", 100)
    with pytest.raises(PeerError, match=r"node7: refused some\.bin: some\.bin has 100 bytes"):
        store.read("some.bin", 50, 150)


# -- notes ----------------------------------------------------------------------------------------------------


def test_a_note_is_served_until_another_takes_its_place(server: PeerServer, store: PeerStore) -> None:
    server.publish("first", b"1")
    assert store.note("first", 10, 0) == b"1"
    server.publish("second", b"", "first")
    assert store.note("second", 10, 0) == b""
    with pytest.raises(PeerError, match="node7: has not published first within 0 s"):
        store.note("first", 10, 0)
    server.publish("third", b"3" * 11, "never published")
    with pytest.raises(PeerError, match="node7:third: has 11 bytes"):
        store.note("third", 10, 0)


def test_a_note_is_waited_for(server: PeerServer, store: PeerStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.note, "later", 10, LONG_S)
        wait_for(lambda: bool(server._clients))  # it has begun to ask
        server.publish("later", b"here")
        assert waiting.result(LONG_S) == b"here"


# -- whom and what a server refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["read", "sizes"])
@pytest.mark.parametrize("key", ["../secret", "deep/../../secret", "{tmp}/secret", "link", "links/secret", "/", ".."])
def test_nothing_outside_the_folder_is_served(
    store: PeerStore, folder: Path, tmp_path: Path, key: str, verb: str
) -> None:
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "links").symlink_to(tmp_path)
    key = key.format(tmp=tmp_path)
    with pytest.raises(PeerError, match="leads out of"):
        store.read(key, 0, 5) if verb == "read" else store.sizes(key)
    assert "secret" not in str(store.sizes(""))


def test_a_link_within_the_folder_is_followed(store: PeerStore, folder: Path) -> None:
    (folder / "link").symlink_to("some.bin")
    assert store.read("link", 1, 3) == b"\x01\x02"
    assert store.read("deep/../some.bin", 1, 3) == b"\x01\x02"


@pytest.mark.parametrize("key", ["deep", "pipe", "a\0b", "\ud800", "x" * 300, "loop"])
def test_what_is_no_file_is_refused_with_a_reason(store: PeerStore, folder: Path, key: str) -> None:
    """A server that opened the pipe would wait for a writer."""
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    with pytest.raises(PeerError, match="node7: refused"):
        store.read(key, 0, 1)
    assert store.read("some.bin", 1, 2) == b"\x01"
    assert len(store._idle) == 1


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"garbage\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"7\n",
        b"null\n",
        b'{"path": "some.bin"}\n',
        b'{"verb": "read"}\n',
        b"[" * 16000 + b"\n",
        b'{"start": ' + b"9" * 10000 + b', "verb": "note", "path": ""}\n',
        b"GET / HTTP/1.1\r\n",
        b"x" * REQUEST_BYTES,
        b"x" * (REQUEST_BYTES * 10) + b"\n",
        request(path="x" * REQUEST_BYTES),
    ],
    ids=range(14),
)
def test_garbage_costs_the_connection_only(server: PeerServer, store: PeerStore, line: bytes) -> None:
    with raw(server) as connection:
        connection.sendall(line)
        assert answer(connection) is None
    assert store.read("some.bin", 0, 2) == b"\x00\x01"


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes(data: bytes, is_known: bool) -> None:
    """On both sides of the handshake. A thread that dies of them would be reported by pytest."""
    here, there = socket.socketpair()
    with here, there:
        server = PeerServer.__new__(PeerServer)
        server._folder, server._secret, server._notes = Path("/nowhere"), SECRET, {}
        server._lock, server._clients, server._tls, server._quiet_until = threading.Lock(), {}, None, 0.0
        with pytest.MonkeyPatch.context() as patch:
            if is_known:
                patch.setattr(peer_server, "admit", lambda *given: True)
            here.sendall(data + b"\n" + request(path=data.decode("latin-1")) + request(verb=data.decode("latin-1")))
            here.shutdown(socket.SHUT_WR)
            server._serve(peer_server._Client(there))


def test_a_verb_that_is_none(server: PeerServer) -> None:
    with raw(server) as connection:
        connection.sendall(request(verb="delete"))
        assert answer(connection) == (REFUSED, b"'delete' is not a known verb")


def test_requests_one_after_the_other(server: PeerServer) -> None:
    """Even if they are sent before the answers are read, and cut anywhere."""
    lines = request(start=0, stop=2) + request(path="nothing") + request(start=3, stop=5)
    with raw(server) as connection:
        for at in range(0, len(lines), 50):
            connection.sendall(lines[at : at + 50])
        with connection.makefile("rb") as answers:
            assert answers.read(2 * (HEADER.size + 2) + HEADER.size) == (
                HEADER.pack(HERE, 2) + b"\0\1" + HEADER.pack(MISSING, 0) + HEADER.pack(HERE, 2) + b"\3\4"
            )


def test_a_client_that_says_nothing_is_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "_REQUEST_S", 0.05)
    with closing(PeerServer(folder, SECRET, HOST)) as server, raw(server) as connection:
        connection.sendall(b'{"verb": ')
        assert answer(connection) is None
        join_threads("mcore_ckpt peer")
        assert not server._clients


def test_clients_that_go_away_leave_nothing(server: PeerServer, folder: Path) -> None:
    with (folder / "big").open("wb") as file:
        file.truncate(64 << 20)
    for _ in range(5):
        with raw(server) as connection:
            connection.sendall(request(path="big"))
            connection.recv(10)
    wait_for(lambda: not server._clients)
    join_threads("mcore_ckpt peer")


def test_a_connection_ends_even_if_a_forked_process_has_it_too(server: PeerServer) -> None:
    """Workers of a data loader, for instance, get all open files. The client must not wait for their end."""
    with raw(server) as connection:
        connection.sendall(request())
        assert answer(connection) is not None
        (there,) = (client.connection for client in server._clients)
        with socket.fromfd(there.fileno(), there.family, there.type):
            connection.sendall(b"nonsense\n")
            assert answer(connection) is None


# -- what a client makes of servers that are broken -----------------------------------------------------------

BROKEN: dict[str, tuple[Talk, str]] = {
    "nothing": (says(b""), "has closed the connection"),
    "half a header": (says(b"\0\0\0"), "has closed the connection"),
    "half an answer": (says(HEADER.pack(HERE, 4) + b"ab"), "has closed the connection"),
    "silence": (says_and_waits(b""), "does not answer: timed out"),
    "half a header, then silence": (says_and_waits(b"\0\0"), "does not answer: timed out"),
    "half an answer, then silence": (says_and_waits(HEADER.pack(HERE, 4) + b"ab"), "does not answer: timed out"),
    "too short": (says(HEADER.pack(HERE, 3) + b"abc"), "sent 3 bytes of key, not 4"),
    "too long": (says(HEADER.pack(HERE, 5) + b"abcde"), "sent 5 bytes of key, not 4"),
    "huge": (says_and_waits(HEADER.pack(HERE, 2**60)), "sent 1152921504606846976 bytes of key, not 4"),
    "endless": (says_for_ever, "sent 1152921504606846976 bytes of key, not 4"),
    "a huge reason": (says_and_waits(HEADER.pack(REFUSED, 2**63)), "does not answer as a peer server does"),
    "a huge absence": (says_and_waits(HEADER.pack(MISSING, 2**60)), "does not answer as a peer server does"),
    "no status": (says(HEADER.pack(77, 3) + b"abc"), "does not answer as a peer server does"),
    "another protocol": (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "does not answer as a peer server does"),
    "a reset": (
        lambda connection, over: connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)),
        "node7: (has closed|does not answer)",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_read_from_a_broken_server(name: str) -> None:
    talk, message = BROKEN[name]
    with broken(talk) as address, closing(PeerStore(address, SECRET, "node7", 0.3)) as store:
        with pytest.raises(PeerError, match=message) as caught:
            store.read("key", 0, 4)
        assert str(caught.value).startswith("node7:")
        assert not store._idle


@pytest.mark.parametrize("name", ["nothing", "half an answer", "silence", "huge", "a huge reason", "endless"])
def test_other_questions_to_a_broken_server(name: str) -> None:
    """They do not know the length before, and must not allocate what a server only claims."""
    talk, _ = BROKEN[name]
    tracemalloc.start()
    try:
        with broken(talk) as address, closing(PeerStore(address, SECRET, "node7", 0.3)) as store:
            with pytest.raises(PeerError, match=r"^node7"):
                store.sizes("key")
            with pytest.raises(PeerError, match=r"^node7"):
                store.note("key", 1000, 0)
            expected = CheckpointCorruptError if name in ("huge", "endless") else PeerError
            with pytest.raises(expected, match=r"^node7"):
                store.read_all("key", 1000)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "listing",
    [
        b"",
        b"nonsense",
        b"\xff",
        b"[]",
        b"7",
        b'{"a": -1}',
        b'{"a": 1.5}',
        b'{"a": NaN}',
        b'{"a": true}',
        b'{"a": null}',
        b'{"a": 1e400}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": 1',
    ],
    ids=range(14),
)
def test_a_listing_that_makes_no_sense(listing: bytes) -> None:
    with (
        broken(says(HEADER.pack(HERE, len(listing)) + listing)) as address,
        closing(PeerStore(address, SECRET, "node7", LONG_S)) as store,
        pytest.raises(PeerError, match="node7: sent a listing that makes no sense"),
    ):
        store.sizes("key")


@given(st.binary(max_size=40))
def test_any_answer(data: bytes) -> None:
    """Of a connection that ends after it."""
    here, there = socket.socketpair()
    with here, there, closing(PeerStore("127.0.0.1:1", SECRET, "node7", LONG_S)) as store:
        store._connect = lambda: here  # type: ignore[method-assign]
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        try:
            found = store.read("key", 0, 4)
        except (PeerError, FileNotFoundError):
            return
        assert data.startswith(HEADER.pack(HERE, 4) + found)


# -- servers that end ---------------------------------------------------------------------------------------


def test_a_dead_server(server: PeerServer, store: PeerStore) -> None:
    store.read("some.bin", 0, 1)
    server.close()
    for _ in range(2):  # with an idle connection, and without
        with pytest.raises(PeerError, match=r"node7: (does not answer|cannot be reached at 127)"):
            store.read("some.bin", 0, 1)
    with pytest.raises(PeerError):
        store.note("never", 10, LONG_S)
    join_threads("mcore_ckpt peer")
    join_threads("mcore_ckpt peer server")


def test_a_server_that_was_started_again(folder: Path) -> None:
    """On the same port, while a client still has connections to the old one."""
    with ExitStack() as stack:
        first = stack.enter_context(closing(PeerServer(folder, SECRET, HOST)))
        store = stack.enter_context(closing(PeerStore(first.address, SECRET, "node7", LONG_S)))
        together = threading.Barrier(4)

        def read(_: int) -> bytes:
            together.wait(LONG_S)
            return bytes(store.read("some.bin", 0, 3))

        pool = stack.enter_context(ThreadPoolExecutor(4))
        assert set(pool.map(read, range(4))) == {b"\0\1\2"}
        assert store._idle
        first.close()
        join_threads("mcore_ckpt peer")
        again = stack.enter_context(closing(_at_port(folder, int(first.address.rpartition(":")[2]))))
        assert again.address == first.address
        assert set(pool.map(read, range(4))) == {b"\0\1\2"}


def _at_port(folder: Path, port: int) -> PeerServer:
    create = socket.create_server
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_server", lambda address, **choices: create((address[0], port), **choices))
        return PeerServer(folder, SECRET, HOST)


def test_a_server_closed_while_it_sends(server: PeerServer, folder: Path) -> None:
    """The client has an error, not fewer bytes, and no thread of the server stays."""
    with (folder / "big").open("wb") as file:
        file.truncate(64 << 20)
    with raw(server) as connection:
        connection.sendall(request(path="big"))
        assert connection.recv(HEADER.size, socket.MSG_WAITALL) == HEADER.pack(HERE, 64 << 20)
        server.close()
        received = 0
        try:
            while count := len(connection.recv(1 << 20)):
                received += count
        except ConnectionResetError:
            pass
        assert received < 64 << 20
    join_threads("mcore_ckpt peer")


def test_a_file_cut_while_it_is_sent(server: PeerServer, folder: Path) -> None:
    """The connection ends. Otherwise the client would wait for bytes that do not come."""
    with (folder / "big").open("wb") as file:
        file.truncate(64 << 20)
    with raw(server) as connection:
        connection.sendall(request(path="big"))
        assert connection.recv(HEADER.size, socket.MSG_WAITALL) == HEADER.pack(HERE, 64 << 20)
        os.truncate(folder / "big", 0)  # the server cannot have sent all, because nobody has received it
        received = 0
        while count := len(connection.recv(1 << 20)):
            received += count
        assert received < 64 << 20


def test_a_server_closed_twice(server: PeerServer) -> None:
    server.close()
    server.close()


def test_a_connection_that_comes_while_the_server_closes(server: PeerServer) -> None:
    server.close()
    here, there = socket.socketpair()
    with here:
        server._begin(there)
        assert answer(here) is None
    assert not server._clients
    join_threads("mcore_ckpt peer server")


def test_an_address_that_is_not_this_node_s(folder: Path) -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        PeerServer(folder, SECRET, "192.0.2.1")  # RFC 5737: an address of documents


def test_ipv6(folder: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with (
        closing(PeerServer(folder, SECRET, "::1")) as server,
        closing(PeerStore(server.address, SECRET, "node7", LONG_S)) as store,
    ):
        assert store.read("some.bin", 1, 2) == b"\1"
