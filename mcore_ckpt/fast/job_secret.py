"""Gives all ranks of a job one secret, by which the nodes of the job recognize each other.

The job's key-value store cannot keep a secret, because anybody who reaches the port of the key-value store can read
everything in it. So the user gives the secret, or rank 0 puts a secret into a file, and removes the file when all ranks
have read it. If neither is possible, the secret goes through the key-value store, with a warning.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointNotFoundError, InvalidArgumentError
from mcore_ckpt.io.access import naming_owner
from mcore_ckpt.io.files import make_folder
from mcore_ckpt.io.secret_files import read_private, write_private
from mcore_ckpt.ranks.rounds import Record, same_everywhere

logger = logging.getLogger(__name__)

VARIABLE, FILE_VARIABLE = "MCORE_CKPT_SECRET", "MCORE_CKPT_SECRET_FILE"
# Shorter secrets could be guessed: anybody who connects to a node can test guesses.
_LEAST_BYTES = 16
_RANDOM_BYTES = 32


def given_secret() -> bytes | None:
    """Returns the user's secret, from a file or the environment; None if there is none.

    Raises InvalidArgumentError if the secret is too short, or if other users can read the file.
    """
    path = os.environ.get(FILE_VARIABLE)
    text = read_private(Path(path)) if path else os.environ.get(VARIABLE, "").encode(errors="surrogateescape")
    secret = text.strip()
    if (path or secret) and len(secret) < _LEAST_BYTES:
        raise InvalidArgumentError(
            f"{FILE_VARIABLE if path else VARIABLE}: has {len(secret)} bytes: use at least {_LEAST_BYTES} random bytes"
        )
    return secret or None


@dataclass(frozen=True)
class SecretOffer:
    """Tells the ranks where they find the secret. Rank 0 makes the offer, and sends it through the key-value store.

    Attributes:
        nonce: makes the secrets different if one job has several trainers.
        check: a value by which a rank checks that its secret is right.
        path: the file that has the secret; None without a file.
        text: the secret itself, in hexadecimal digits; None if the secret comes from a file or from the user.
    """

    nonce: str
    check: str
    path: str | None = None
    text: str | None = None

    @staticmethod
    def make(given: bytes | None, folder: Path | None, role: str, mode: int | None = None) -> SecretOffer:
        """Makes the offer of a role's secret. Only rank 0 calls this method, and calls `remove` later.

        If the user has `given` a secret, the offered secret is derived from this secret. Otherwise this method makes a
        secret. The secret goes into a file in `folder`, which all ranks see, or into the offer itself if `folder` is
        None. A new folder gets `mode`, before the umask is applied. Raises OSError.
        """
        nonce = secrets.token_hex(16)
        if given is not None:
            return SecretOffer(nonce, _check(_derive(given, nonce)))
        own = secrets.token_bytes(_RANDOM_BYTES)
        check = _check(_derive(own, nonce))
        if folder is None:
            logger.warning(
                "the nodes' secret goes through the job's key-value store, which anybody who reaches its port "
                "(MASTER_PORT) can read: set %s or %s on all ranks",
                FILE_VARIABLE,
                VARIABLE,
            )
            return SecretOffer(nonce, check, text=own.hex())
        make_folder(folder, mode)
        for left in folder.glob(file_names.secret_file(folder, role, "*").name):  # left by a start that was killed
            with suppress(OSError):  # a file of another user does not matter here
                left.unlink()
        path = file_names.secret_file(folder, role, nonce)
        with naming_owner(folder):
            write_private(path, own)
        return SecretOffer(nonce, check, path=str(path))

    def take(self, given: bytes | None) -> bytes:
        """Returns the secret. Raises InvalidArgumentError or CheckpointNotFoundError if this rank cannot get it."""
        if self.text is not None:
            own = bytes.fromhex(self.text)
        elif self.path is None:
            assert given is not None, "same_secrets has found that all ranks have one"
            own = given
        else:
            own = self._read(Path(self.path))
        secret = _derive(own, self.nonce)
        if not hmac.compare_digest(_check(secret), self.check):
            where = f"{VARIABLE} or {FILE_VARIABLE}" if self.path is None else self.path
            raise InvalidArgumentError(f"{where}: has another secret here than on rank 0")
        return secret

    def remove(self) -> None:
        """Removes the file. Call this method when all ranks have read the secret."""
        if self.path is not None:
            with suppress(OSError):
                os.unlink(self.path)

    def _read(self, path: Path) -> bytes:
        if not path.exists():
            raise CheckpointNotFoundError(
                f"{path}: is not there, although rank 0 has just made it: all ranks must see the same folder. If the "
                f"ranks cannot, set {FILE_VARIABLE} or {VARIABLE} on all of them"
            )
        return read_private(path)


def same_secrets(records: Sequence[Record]) -> None:
    """Raises InvalidArgumentError if the user has given some ranks a secret and other ranks none."""
    found = [record["secret"] for record in records]
    same_everywhere(found, f"{VARIABLE} or {FILE_VARIABLE}", InvalidArgumentError)


def _derive(secret: bytes, nonce: str) -> bytes:
    return hmac.digest(secret, b"mcore_ckpt nodes " + nonce.encode(), "sha256")


def _check(secret: bytes) -> str:
    return hmac.digest(secret, b"check", "sha256").hex()
