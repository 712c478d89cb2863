"""Finds the mounted file system that a folder is on, as the kernel describes it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mcore_ckpt.redaction import redacted

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """A mounted file system (proc(5), mountinfo).

    Attributes:
        kind: its type, such as `ext4`, `nfs4` or `fuse.sshfs`.
        source: what is mounted, such as `/dev/sda1` or `server:/export`.
        point: the folder that it is mounted on.
        options: the options of the mount and of the file system, such as `{"relatime": "", "data": "ordered"}`.
    """

    kind: str
    source: str
    point: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_read_only(self) -> bool:
        """True if nothing can be written on this file system."""
        return "ro" in self.options

    def __str__(self) -> str:
        return f"{self.kind} ({self.source} on {self.point})"


def mount_of(folder: Path) -> Mount | None:
    """Returns the mount that an existing folder is on; None if the system does not tell. Raises OSError.

    The kernel says which mount an open folder belongs to. The path alone would not tell: another file system can be
    mounted over a part of the path, and links in the path can lead elsewhere.
    """
    descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        wanted = _mount_id(Path(f"/proc/self/fdinfo/{descriptor}").read_text())
    finally:
        os.close(descriptor)
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        if line.partition(" ")[0] == wanted:
            return parse_mount(line)
    return None


def _mount_id(fdinfo: str) -> str | None:
    return next((line.split()[1] for line in fdinfo.splitlines() if line.startswith("mnt_id:")), None)


def parse_mount(line: str) -> Mount:
    """Parses a line of mountinfo.

    Example:
        >>> parse_mount("27 1 254:0 / /my\\\\040disk ro,noatime - ext4 /dev/vda rw,data=journal").options["data"]
        'journal'
    """
    mount, _, system = line.partition(" - ")
    point, of_mount = mount.split()[4:6]
    kind, source, of_system = system.split(" ")[:3]
    # The options of the mount and the options of the file system each include `rw` or `ro`. Nothing can be written if
    # either has `ro`.
    names = [*of_system.split(","), *of_mount.split(",")]
    pairs = (redacted(name).partition("=") for name in names if name != "rw")
    return Mount(kind, redacted(_plain(source)), _plain(point), {name: value for name, _, value in pairs})


def _plain(text: str) -> str:
    """Decodes a path from the kernel, in which octal numbers stand for spaces and other special characters."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
