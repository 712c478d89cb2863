"""Says what is known of a file system from its type and its mount options alone, without trying anything.

Sources: the kernel's documents of ext4, overlayfs and btrfs, nfs(5), and the manuals of Lustre, BeeGFS and Mountpoint
for S3. docs/doctor.md says which file systems were tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mcore_ckpt.io.file_systems import Abilities, of_name
from mcore_ckpt.io.mounts import Mount
from mcore_ckpt.steps.trainer_lock import TRAINER_LEASE_S
from mcore_ckpt.tools.examine.doctor.findings import Finding, Severity, fine

FILE_SYSTEM = "file system"
OPTIONS = "mount options"
_LOST_WITH_MEMORY = "everything is lost when the machine restarts or the container ends"


def abilities_of(mount: Mount) -> Abilities | None:
    """Returns what a file system of this type can do; None if none was tried."""
    abilities = of_name(mount.kind).abilities
    if abilities is not None and mount.kind == "ext4" and mount.options.get("data") == "journal":
        return replace(abilities, direct=False)
    return abilities


def known_of(mount: Mount | None) -> list[Finding]:
    """Returns what the type and the options of a mount say."""
    if mount is None:
        return [fine(FILE_SYSTEM, "the system does not tell which file system this is")]
    return [_of_kind(mount), *_of_options(mount)]


def _of_kind(mount: Mount) -> Finding:
    place = of_name(mount.kind).place
    if place == "memory":
        return Finding(
            FILE_SYSTEM,
            Severity.RISK,
            f"{mount}: in memory",
            _LOST_WITH_MEMORY,
            "use it only for tests, or with `remote=...`, which copies checkpoints to another place",
        )
    if place == "layer":
        return Finding(
            FILE_SYSTEM,
            Severity.RISK,
            f"{mount}: a layer of a container",
            "everything is lost when the container is removed",
            "mount a volume of the host, or a shared file system, into the container, and save there",
        )
    if mount.kind.startswith("fuse"):
        return fine(FILE_SYSTEM, f"{mount}: in user space (FUSE)")
    if place == "network":
        return fine(FILE_SYSTEM, f"{mount}: over the network")
    return fine(FILE_SYSTEM, f"{mount}")


def _of_options(mount: Mount) -> Iterator[Finding]:
    options = mount.options
    if mount.is_read_only:
        yield Finding(
            OPTIONS, Severity.BAD, "ro: mounted read-only", "no checkpoint can be saved", "mount it with `rw`"
        )
    if "nobarrier" in options or options.get("barrier") in ("0", "none"):
        name = "nobarrier" if "nobarrier" in options else f"barrier={options['barrier']}"
        yield Finding(
            OPTIONS,
            Severity.RISK,
            f"{name}: the disk is never told to empty its cache",
            "a power loss can lose checkpoints that were committed, and damage the file system",
            "mount without this option, unless the disk's cache has a battery",
        )
    # Newer kernels show `volatile` as `fsync=volatile` (seen on 6.18).
    if "volatile" in options or options.get("fsync") == "volatile":
        yield Finding(
            OPTIONS,
            Severity.RISK,
            "volatile: this overlay ignores every request to wait for the disk",
            "a crash of the machine can lose checkpoints that were committed",
            "mount the overlay without `volatile`",
        )
    if mount.kind == "ext4" and options.get("data") == "journal":
        yield Finding(
            OPTIONS,
            Severity.SLOW,
            "data=journal: all bytes go to the journal first, and O_DIRECT is off",
            "each byte is written twice",
            "mount with data=ordered: each file is synced before a checkpoint is committed",
        )
    if "sync" in options:
        yield Finding(
            OPTIONS,
            Severity.SLOW,
            "sync: every write waits for the disk",
            "small files and folders take longer",
            "mount without `sync`: each file is synced before a checkpoint is committed",
        )
    if mount.kind in ("nfs", "nfs4"):
        yield from _of_nfs(mount)
    if mount.kind == "lustre":
        yield from _of_lustre(mount)


def _of_nfs(mount: Mount) -> Iterator[Finding]:
    options = mount.options
    if "soft" in options or "softerr" in options:
        yield Finding(
            OPTIONS,
            Severity.RISK,
            "soft: a request that the server does not answer in time fails",
            "a busy server makes saves and loads fail; nfs(5) warns of silent damage, which the CRCs here find later",
            "mount with `hard`",
        )
    local = options.get("local_lock", "none")
    if "nolock" in options or local in ("all", "flock"):
        name = "nolock" if "nolock" in options else f"local_lock={local}"
        yield Finding(
            OPTIONS,
            Severity.EMULATED,
            f"{name}: `flock` reaches only processes on the same host",
            "retention can delete a step that another host is reading; that load then takes another step",
            "mount with local_lock=none and, for NFS 3, with `lock`",
        )
    if "noac" in options:
        yield Finding(
            OPTIONS,
            Severity.SLOW,
            "noac: nothing about files is cached, and every write waits for the server",
            "writing is slower",
            "mount without `noac`: nothing here needs it",
        )
    seconds = max(_seconds(options.get("acregmax", "60")), _seconds(options.get("actimeo", "0")))
    if seconds > 60:
        yield Finding(
            OPTIONS,
            Severity.RISK,
            f"attributes of files are cached for up to {seconds} s",
            "a trainer on another host may see a lock file as untouched for so long, and takes the lock after "
            f"{TRAINER_LEASE_S:g} s",
            "mount with the default, acregmax=60, or less",
        )


def _seconds(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _of_lustre(mount: Mount) -> Iterator[Finding]:
    options = mount.options
    if "localflock" in options:
        yield Finding(
            OPTIONS,
            Severity.EMULATED,
            "localflock: `flock` reaches only processes on the same host",
            "retention can delete a step that another host is reading; that load then takes another step",
            "mount with `-o flock`",
        )
    elif "flock" not in options:
        yield fine(OPTIONS, "without `flock`: whether locks work depends on the version of Lustre, and is tried below")
