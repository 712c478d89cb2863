"""Encrypts the connections between the nodes of a job, if the user gives certificates."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.io.secret_files import check_private

CERTIFICATE, KEY, AUTHORITY = "cert.pem", "key.pem", "ca.pem"


@dataclass(frozen=True)
class PeerTls:
    """The settings by which a node encrypts connections that it accepts (`server`) and opens (`client`).

    Both sides show a certificate, which the job's own authority must have signed. Names in certificates are not
    checked, because a job does not know the addresses of its nodes in advance.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext


def read_tls(folder: Path) -> PeerTls:
    """Reads this node's certificate, its key and the authority's certificate from the files of a folder.

    Raises InvalidArgumentError if a file is missing or makes no sense, if the mode of the key's file lets other users
    use it, or if this file belongs to another user.
    """
    check_private(folder / KEY)
    return PeerTls(_context(folder, ssl.PROTOCOL_TLS_SERVER), _context(folder, ssl.PROTOCOL_TLS_CLIENT))


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
        context.load_verify_locations(folder / AUTHORITY)
    except OSError as error:  # ssl.SSLError is an OSError
        raise InvalidArgumentError(
            f"{folder}: cannot be used for TLS: {error}: the folder must have {CERTIFICATE}, {KEY} and {AUTHORITY} "
            "(PEM)"
        ) from error
    return context
