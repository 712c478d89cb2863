"""File systems that a test mounts for itself. Where that is not permitted, the test is skipped."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    """Calls `mount` with these arguments and the place. Unmounts it in the end."""
    place.mkdir(exist_ok=True)
    if shutil.which("mount") is None:
        pytest.skip("no mount here")
    done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextmanager
def mounted_image(place: Path, kind: str, options: str = "loop") -> Iterator[Path]:
    """Makes a file system of 512 MiB in a file beside the place, and mounts it there."""
    program = shutil.which(f"mkfs.{kind}")
    if program is None:
        pytest.skip(f"no mkfs.{kind} here")
    image = place.with_suffix(".image")
    with open(image, "wb") as file:
        file.truncate(512 << 20)
    quiet = ["-q", "-F"] if kind == "ext4" else ["-q", "-f"]
    subprocess.run([program, *quiet, str(image)], check=True, capture_output=True)
    with mounted(place, "-t", kind, "-o", options, str(image)):
        yield place


@contextmanager
def shown_by(program: str, place: Path, folder: Path) -> Iterator[Path]:
    """Shows a folder at another place, through a FUSE file system: bindfs, or unionfs, which refuses O_DIRECT late."""
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    place.mkdir(exist_ok=True)
    shown = f"{folder}=RW" if program == "unionfs" else str(folder)
    done = subprocess.run([program, shown, str(place)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no FUSE here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
