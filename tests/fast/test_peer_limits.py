"""What strangers, impostors and slow nodes can take from a peer server and from its clients."""

import socket
import subprocess
import threading
import time
import tracemalloc
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.fast import peer_protocol, peer_server, peer_store
from mcore_ckpt.fast.peer_protocol import HEADER, HERE, HandshakeError, introduce, receive
from mcore_ckpt.fast.peer_server import PeerServer
from mcore_ckpt.fast.peer_store import PeerStore
from mcore_ckpt.fast.peer_tls import read_tls
from mcore_ckpt.fast.transport import PeerError
from tests.support.peer_talk import HOST, SECRET, answer, broken, raw, request, says_and_waits, stranger
from tests.support.waiting import LONG_S, join_threads, wait_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "some.bin").write_bytes(bytes(range(256)))
    return folder


def soon() -> float:
    return time.monotonic() + LONG_S


# -- who knows the secret ---------------------------------------------------------------------------------------


def test_a_store_of_another_job(server: PeerServer) -> None:
    with (
        closing(PeerStore(server.address, b"another", "node7", LONG_S)) as store,
        pytest.raises(PeerError, match="node7: has another secret: it belongs to another job"),
    ):
        store.read("some.bin", 0, 1)


@pytest.mark.parametrize("secret", [b"", b"0badcafF", b"0badcafe "])
def test_without_the_secret_there_is_nothing(server: PeerServer, secret: bytes) -> None:
    with stranger(server) as connection:
        with pytest.raises(HandshakeError):
            introduce(connection, secret, soon())
        with suppress(OSError):
            connection.sendall(request())
        assert answer(connection) is None


def test_refusals_are_told_once_in_a_while(server: PeerServer, caplog: pytest.LogCaptureFixture) -> None:
    """Anybody who reaches the port could fill the log."""
    for _ in range(3):
        with stranger(server) as connection:
            with pytest.raises(HandshakeError):
                introduce(connection, b"another", soon())
            assert answer(connection) is None
    assert caplog.text.count("a connection without the job's secret was refused") == 1


def introduce_in_vain(connection: socket.socket) -> None:
    with suppress(OSError):
        introduce(connection, SECRET, soon())


def test_a_proof_cannot_be_used_again(server: PeerServer) -> None:
    """Who has recorded a connection has neither the secret, nor what the next connection wants."""
    here, there = socket.socketpair()
    with here, there, stranger(server) as first, stranger(server) as second:
        there.sendall(receive(first, 40, soon()))
        thread = threading.Thread(target=introduce_in_vain, args=(here,))
        thread.start()
        recorded = receive(there, 64, soon())
        there.close()
        thread.join(LONG_S)
        assert SECRET not in recorded
        receive(second, 40, soon())
        second.sendall(recorded)
        assert receive(second, 32, soon()) == bytes(32)
        assert answer(second) is None


def test_a_server_that_does_not_know_the_secret_is_noticed() -> None:
    """It may greet as one, and claim that the client's proof is good."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"mcckpt-2" + b"c" * 32 + b"p" * 32)
        with pytest.raises(HandshakeError, match="does not know this job's secret"):
            introduce(here, SECRET, soon())


def test_a_proof_of_the_other_side_is_none(server: PeerServer) -> None:
    """A server's own proof, sent back to it, does not open the door."""
    with stranger(server) as connection:
        challenge = receive(connection, 40, soon())[8:]
        connection.sendall(challenge + peer_protocol._proof(SECRET, b"server", challenge * 2))
        assert receive(connection, 32, soon()) == bytes(32)


# -- what strangers, and slow ones, can take --------------------------------------------------------------------


def test_strangers_take_few_connections(server: PeerServer, store: PeerStore) -> None:
    """Threads, too. Meanwhile a node is served."""
    with ExitStack() as stack:
        threads = threading.active_count()
        for _ in range(300):
            stack.enter_context(stranger(server))
        assert store.read("some.bin", 0, 2) == b"\0\1"
        most = peer_server._MOST_UNKNOWN + 2
        wait_for(lambda: threading.active_count() <= threads + most and len(server._clients) <= most)


def test_strangers_are_cut_after_a_moment(server: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However steadily they send something."""
    monkeypatch.setattr(peer_server, "_INTRODUCTION_S", 0.2)
    with stranger(server) as connection:
        receive(connection, 40, soon())
        over = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                for _ in range(60):
                    connection.sendall(b"y")
                    if over.wait(0.02):
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            connection.settimeout(LONG_S)
            assert answer(connection) is None
        finally:
            over.set()
            thread.join(LONG_S)


def test_descriptors_are_left_to_the_training(
    server: PeerServer, store: PeerStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.read("some.bin", 0, 1) == b"\0"
    monkeypatch.setattr(peer_server, "_most_descriptors", lambda: peer_server._SPARE_DESCRIPTORS + 3)
    with stranger(server) as connection:
        assert answer(connection) is None
    assert "too many files are open: raise ulimit -n" in caplog.text


def test_the_longest_idle_connection_makes_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "_MOST_KNOWN", 2)
    with closing(PeerServer(folder, SECRET, HOST)) as server, ExitStack() as stack:
        connections = [stack.enter_context(raw(server)) for _ in range(2)]
        for connection in connections:
            connection.sendall(request(start=0, stop=1))
            assert answer(connection) == (HERE, b"\0")
            wait_for(lambda: all(client.is_idle for client in server._clients))
        late = stack.enter_context(raw(server))
        late.sendall(request(start=1, stop=2))
        assert answer(late) == (HERE, b"\1")
        assert answer(connections[0]) is None
        connections[1].sendall(request(start=2, stop=3))
        assert answer(connections[1]) == (HERE, b"\2")


def test_a_client_that_takes_an_answer_too_slowly_is_cut(
    server: PeerServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "_ANSWER_S", 0.2)
    monkeypatch.setattr(peer_protocol, "LEAST_BYTES_PER_S", 1 << 40)
    with (folder / "big").open("wb") as file:
        file.truncate(64 << 20)
    with raw(server) as connection:
        connection.sendall(request(path="big"))
        wait_for(lambda: any(not client.is_idle for client in server._clients))
        join_threads("mcore_ckpt peer")  # nobody takes the bytes


def test_a_server_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although each byte comes soon after the last one."""

    def drips(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(HEADER.pack(HERE, 1 << 20))
        while not over.wait(0.01):
            connection.sendall(b"x")

    monkeypatch.setattr(peer_store, "answer_time_s", lambda nbytes: 0.0)
    with broken(drips) as address, closing(PeerStore(address, SECRET, "node7", 0.3)) as store:
        for ask in (
            lambda: store.read("key", 0, 1 << 20),
            lambda: store.sizes("key"),
            lambda: store.note("key", 1 << 27, 0.1),
            lambda: store.read_all("key", 1 << 27),
        ):
            with pytest.raises(PeerError, match="node7: does not answer: timed out"):
                ask()


def test_memory_is_taken_as_bytes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "answer_time_s", lambda nbytes: 0.0)
    announced = says_and_waits(HEADER.pack(HERE, (1 << 27) - 1) + b"x" * 1000)
    tracemalloc.start()
    try:
        with (
            broken(announced) as address,
            closing(PeerStore(address, SECRET, "node7", 0.3)) as store,
            pytest.raises(PeerError, match="timed out"),
        ):
            store.note("key", 1 << 27, 0)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# -- TLS --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of certificates, `job` and `other`, each with an authority of its own."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("job", "other"):
        at = folder / name
        at.mkdir()
        openssl = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        files = ["-keyout", at / "key.pem", "-out", at / "cert.pem", "-days", "2", "-subj", f"/CN={name}"]
        subprocess.run([*openssl, *files], check=True, capture_output=True)
        (at / "ca.pem").write_bytes((at / "cert.pem").read_bytes())
        (at / "key.pem").chmod(0o600)
    return folder


def test_tls(folder: Path, certificates: Path) -> None:
    job, other = read_tls(certificates / "job"), read_tls(certificates / "other")
    with (folder / "big").open("wb") as file:
        file.truncate(20 << 20)
        file.seek(-3, 2)
        file.write(b"end")
    with closing(PeerServer(folder, SECRET, HOST, job)) as server:
        with closing(PeerStore(server.address, SECRET, "node7", LONG_S, job)) as store:
            assert store.read("some.bin", 1, 3) == b"\1\2"
            assert store.read_all("big", 20 << 20)[-3:] == b"end"
            assert set(store.sizes("")) == {"some.bin", "big"}
        for tls in (None, other):
            with closing(PeerStore(server.address, SECRET, "node7", 2, tls)) as store, pytest.raises(PeerError):
                store.read("some.bin", 0, 1)
    with (
        closing(PeerServer(folder, SECRET, HOST)) as server,
        closing(PeerStore(server.address, SECRET, "node7", 2, job)) as store,
        pytest.raises(PeerError),
    ):
        store.read("some.bin", 0, 1)


def test_certificates_that_cannot_be_used(certificates: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"key\.pem: cannot be read: No such file"):
        read_tls(tmp_path)
    for name in ("key.pem", "cert.pem", "ca.pem"):
        (tmp_path / name).write_bytes((certificates / "job" / name).read_bytes())
    (tmp_path / "key.pem").chmod(0o640)
    with pytest.raises(InvalidArgumentError, match=r"key\.pem: other users may read or change it \(mode 0640\)"):
        read_tls(tmp_path)
    (tmp_path / "key.pem").chmod(0o600)
    (tmp_path / "ca.pem").write_bytes(b"nonsense")
    with pytest.raises(
        InvalidArgumentError, match=r"cannot be used for TLS: .*the folder must have cert\.pem, key\.pem"
    ):
        read_tls(tmp_path)
