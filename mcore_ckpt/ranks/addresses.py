"""Finds the address under which the other nodes of the job reach this node."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from mcore_ckpt.errors import InvalidStateError

# ioctl_list(2): the IPv4 address of an interface, in bytes 20 to 24 of a struct ifreq.
_SIOCGIFADDR = 0x8915


def own_address() -> str:
    """Returns this node's address.

    Raises InvalidStateError if the interface has no address, or if there is no way to MASTER_ADDR.

    The variable GLOO_SOCKET_IFNAME names the interface, as for torch's gloo. Without this variable, this function takes
    the interface that reaches MASTER_ADDR. All nodes reach each other through the network on which they reach rank 0.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].lstrip("=^")
    if name:
        return _address_of(name)
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, _, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing, but makes the system choose the interface
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidStateError(
            f"this node's address cannot be found, because there is no way to MASTER_ADDR={master} ({error}): name the "
            "interface to use, such as GLOO_SOCKET_IFNAME=eth0"
        ) from error


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise InvalidStateError(
                f"GLOO_SOCKET_IFNAME={interface}: this interface has no IPv4 address ({error.strerror}): use one of "
                f"{there}"
            ) from error
    return socket.inet_ntoa(found[20:24])
