"""Judges a file system by its type and its mount options alone, without trying anything.

Sources: the kernel's documents of ext4, overlayfs and btrfs, nfs(5), and the manuals of Lustre, BeeGFS and Mountpoint
for S3. docs/doctor.md lists the file systems that were tried.
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
_DELETED_UNDER_A_LOAD = (
    "retention can delete a step that another host is reading; the load on that host then takes another step"
)


def abilities_of(mount: Mount) -> Abilities | None:
    """Returns the abilities of file systems of this type; None if no file system of this type was tried."""
    abilities = of_name(mount.kind).abilities
    if abilities is not None and mount.kind == "ext4" and mount.options.get("data") == "journal":
        return replace(abilities, direct=False)
    return abilities


def known_of(mount: Mount | None) -> list[Finding]:
    """Returns the findings that follow from the type and the options of a mount."""
    if mount is None:
        return [fine(FILE_SYSTEM, "the type of this file system is unknown")]
    return [_of_kind(mount), *_of_options(mount)]


def _of_kind(mount: Mount) -> Finding:
    place = of_name(mount.kind).place
    if place == "memory":
        cost = "everything is lost when the machine restarts or the container ends"
        advice = "use this folder only for tests, or with `remote=...`, which copies checkpoints to another place"
        return Finding(FILE_SYSTEM, Severity.RISK, f"{mount}: in memory", cost, advice)
    if place == "layer":
        cost = "everything is lost when the container is removed"
        advice = "mount a volume of the host, or a shared file system, into the container, and save there"
        return Finding(FILE_SYSTEM, Severity.RISK, f"{mount}: a layer of a container", cost, advice)
    if mount.kind.startswith("fuse"):
        return fine(FILE_SYSTEM, f"{mount}: in user space (FUSE)")
    if place == "network":
        return fine(FILE_SYSTEM, f"{mount}: over the network")
    return fine(FILE_SYSTEM, f"{mount}")


def _option(severity: Severity, fact: str, cost: str, advice: str) -> Finding:
    return Finding(OPTIONS, severity, fact, cost, advice)


def _of_options(mount: Mount) -> Iterator[Finding]:
    options = mount.options
    if mount.is_read_only:
        yield _option(
            Severity.BAD, "ro: mounted read-only", "no checkpoint can be saved", "mount the file system with `rw`"
        )
    if "nobarrier" in options or options.get("barrier") in ("0", "none"):
        name = "nobarrier" if "nobarrier" in options else f"barrier={options['barrier']}"
        cost = "a power loss can lose checkpoints that were committed, and damage the file system"
        advice = "mount without this option, unless the disk's cache has a battery"
        yield _option(Severity.RISK, f"{name}: the disk is never told to empty its cache", cost, advice)
    # Newer kernels show `volatile` as `fsync=volatile` (seen on 6.18).
    if "volatile" in options or options.get("fsync") == "volatile":
        cost = "a crash of the machine can lose checkpoints that were committed"
        advice = "mount the overlay without `volatile`"
        yield _option(Severity.RISK, "volatile: this overlay ignores every request to wait for the disk", cost, advice)
    if mount.kind == "ext4" and options.get("data") == "journal":
        fact = "data=journal: all bytes go to the journal first, and O_DIRECT is off"
        advice = "mount with data=ordered, which is safe: each file is synced before a checkpoint is committed"
        yield _option(Severity.SLOW, fact, "each byte is written twice", advice)
    if "sync" in options:
        cost = "small files and folders take longer"
        advice = "mount without `sync`, which is safe: each file is synced before a checkpoint is committed"
        yield _option(Severity.SLOW, "sync: every write waits for the disk", cost, advice)
    if mount.kind in ("nfs", "nfs4"):
        yield from _of_nfs(mount)
    if mount.kind == "lustre":
        yield from _of_lustre(mount)


def _of_nfs(mount: Mount) -> Iterator[Finding]:
    options = mount.options
    if "soft" in options or "softerr" in options:
        cost = (
            "a busy server makes saves and loads fail; nfs(5) warns of silent damage, which the CRCs of this package "
            "find later"
        )
        advice = "mount with `hard`"
        yield _option(Severity.RISK, "soft: a request that the server does not answer in time fails", cost, advice)
    local = options.get("local_lock", "none")
    if "nolock" in options or local in ("all", "flock"):
        name = "nolock" if "nolock" in options else f"local_lock={local}"
        yield _option(
            Severity.EMULATED,
            f"{name}: `flock` reaches only processes on the same host",
            _DELETED_UNDER_A_LOAD,
            "mount with local_lock=none and, for NFS 3, with `lock`",
        )
    if "noac" in options:
        fact = "noac: attributes of files are not cached, and every write waits for the server"
        yield _option(Severity.SLOW, fact, "writing is slower", "mount without `noac`: this package does not need it")
    seconds = max(_seconds(options.get("acregmax", "60")), _seconds(options.get("actimeo", "0")))
    if seconds > 60:
        yield _option(
            Severity.RISK,
            f"attributes of files are cached for up to {seconds} s",
            "a trainer on another host may see an old time of a lock file for so long, and takes the lock when that "
            f"time is {TRAINER_LEASE_S:g} s old",
            "mount with acregmax=60, the default, or less",
        )


def _seconds(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _of_lustre(mount: Mount) -> Iterator[Finding]:
    options = mount.options
    if "localflock" in options:
        fact = "localflock: `flock` reaches only processes on the same host"
        yield _option(Severity.EMULATED, fact, _DELETED_UNDER_A_LOAD, "mount with `-o flock`")
    elif "flock" not in options:
        yield fine(
            OPTIONS, "without `flock`: the version of Lustre determines whether locks work, which is tried below"
        )
