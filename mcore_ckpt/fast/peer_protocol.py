"""Defines what two nodes of a job send each other: the proofs that each knows the secret, then requests and answers.

    server     8 bytes (_MAGIC), 32 random bytes (its challenge)
    client     32 random bytes (its challenge), 32 bytes: the client's proof
    server     32 bytes: the server's proof. If the client's proof is wrong: zeros, and the connection ends

A proof is the HMAC-SHA256 of the side's name ("client" or "server") and both challenges, with the secret as key. So the
secret is never sent, and a proof is of no use in another connection. Then any number of requests and answers follow on
the connection:

    request    {"verb": ..., "path": ..., "start": ..., "stop": ...}  newline
    answer     one byte (0: here it is, 1: there is no such file, 2: refused), 8 bytes (length, big-endian), the bytes

The verbs are `read` (bytes of a file), `sizes` (the files below a folder, as JSON) and `note` (bytes that the server's
process has published under a name).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

HEADER = struct.Struct("!BQ")
HERE, MISSING, REFUSED = range(3)
# The longest request line, in bytes. Paths are shorter than 4096 bytes.
REQUEST_BYTES = 16384
# A peer that moves fewer bytes a second than this, on average over an answer, counts as lost.
LEAST_BYTES_PER_S = 1 << 20

_MAGIC = b"mcckpt-2"
_CHALLENGE_BYTES = 32
_NO_PROOF = bytes(32)


class ConnectionEndedError(OSError):
    """The other side has closed the connection."""


class HandshakeError(OSError):
    """The other side does not know the secret, or is another program."""


def answer_time_s(nbytes: int) -> float:
    """Returns how many seconds an answer of `nbytes` may take after its first byte."""
    return nbytes / LEAST_BYTES_PER_S


def receive_into(connection: socket.socket, memory: memoryview, deadline: float) -> None:
    """Fills memory with the next bytes of a connection.

    Raises TimeoutError if some of the bytes have not come by the deadline (`time.monotonic()`), even if bytes are still
    coming, and ConnectionEndedError if the connection ends before the last byte.
    """
    while memory:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        count = connection.recv_into(memory)
        if not count:
            raise ConnectionEndedError("has closed the connection")
        memory = memory[count:]


def receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Returns the next `nbytes` bytes of a connection. Raises like `receive_into`.

    Allocates at most LEAST_BYTES_PER_S bytes at a time, as the bytes arrive, so that a peer cannot make this process
    allocate memory for bytes that the peer never sends.
    """
    data = bytearray()
    while len(data) < nbytes:
        piece = bytearray(min(nbytes - len(data), LEAST_BYTES_PER_S))
        receive_into(connection, memoryview(piece), deadline)
        data += piece
    return bytes(data)


def admit(connection: socket.socket, secret: bytes, deadline: float) -> bool:
    """Asks a client for its proof. Answers with the server's proof, or with zeros if the client's proof is wrong.

    Returns False if the client's proof is wrong. Raises OSError.
    """
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(_MAGIC + challenge)
    answer = receive(connection, _CHALLENGE_BYTES + len(_NO_PROOF), deadline)
    both = challenge + answer[:_CHALLENGE_BYTES]
    is_known = hmac.compare_digest(answer[_CHALLENGE_BYTES:], _proof(secret, b"client", both))
    connection.sendall(_proof(secret, b"server", both) if is_known else _NO_PROOF)
    return is_known


def introduce(connection: socket.socket, secret: bytes, deadline: float) -> None:
    """Proves to a server that this process knows the secret, and asks the server for its proof.

    Raises HandshakeError if the server has another secret or is another program, and OSError if the server does not
    answer.
    """
    greeting = receive(connection, len(_MAGIC) + _CHALLENGE_BYTES, deadline)
    if not greeting.startswith(_MAGIC):
        raise HandshakeError("does not answer as a peer server does: another program may use its port")
    own = secrets.token_bytes(_CHALLENGE_BYTES)
    both = greeting[len(_MAGIC) :] + own
    connection.sendall(own + _proof(secret, b"client", both))
    proof = receive(connection, len(_NO_PROOF), deadline)
    if proof == _NO_PROOF:
        raise HandshakeError("has another secret: it belongs to another job")
    if not hmac.compare_digest(proof, _proof(secret, b"server", both)):
        raise HandshakeError("does not know this job's secret: it only pretends to be a node of this job")


def _proof(secret: bytes, side: bytes, challenges: bytes) -> bytes:
    return hmac.digest(secret, side + challenges, "sha256")
