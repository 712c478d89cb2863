"""Parts of a training that is killed and started again, over and over: its ranks as forks, and what it leaves on disk.

What a rank does is written down in files that outlive it.
"""

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.steps import leftovers

LOCALHOST = "127.0.0.1"


def host_store() -> tuple[int, int]:
    """A process that hosts a key-value store of many lives, as torchrun's agent does; its pid and port."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
        store = tcp_store(LOCALHOST, 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        signal.pause()
    port = int(os.read(read, 100))
    os.close(read)
    os.close(write)
    return pid, port


def end_store(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def connect(port: int, life: int) -> Any:
    """A life's own part of the store."""
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return dist.PrefixStore(f"life{life}", tcp_store(LOCALHOST, port, is_master=False))


def fork_ranks(world: int, run: Callable[[int, int], NoReturn]) -> tuple[dict[int, int], int]:
    """Ranks by pid, and a pipe that each writes to when it begins to deal with checkpoints."""
    read, write = os.pipe()
    pids = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.close(read)
            run(rank, write)
        pids[pid] = rank
    os.close(write)
    return pids, read


def wait_until_ready(read: int, world: int, seconds: float) -> float:
    """Returns the time at which all ranks begin to deal with checkpoints; at once if one ends before."""
    for _ in range(world):
        if select.select([read], [], [], seconds)[0]:
            os.read(read, 1)
    return time.monotonic()


def bury(
    pids: dict[int, int], victims: Collection[int], kill_at: float | None, survivors_s: float
) -> tuple[list[int], list[int]]:
    """Waits for all ranks; their ends by rank, and who had to be helped.

    At `kill_at`, or when a rank has killed itself, all victims that are left are killed. From then on the others have
    so many seconds to end.
    """
    ends: dict[int, int] = {}
    killed_at: float | None = None
    stuck: list[int] = []
    while len(ends) < len(pids):
        # Each by its own pid: the caller may have other children.
        for pid, rank in pids.items():
            if rank not in ends:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    ends[rank] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        due = kill_at is not None and now >= kill_at
        if killed_at is None and (due or -signal.SIGKILL in ends.values()):
            killed_at = now
            kill(pids, [rank for rank in victims if rank not in ends])
        if killed_at is not None and now - killed_at > survivors_s and not stuck:
            stuck = [rank for rank in pids.values() if rank not in ends]
            kill(pids, stuck)
        time.sleep(0.002)
    return [ends[rank] for rank in range(len(pids))], stuck


def kill(pids: dict[int, int], ranks: Collection[int]) -> None:
    for pid, rank in pids.items():
        if rank in ranks:
            os.kill(pid, signal.SIGKILL)


def is_what_a_death_causes(report: dict[str, Any]) -> bool:
    """Whether a rank's error is one that it may raise when another has died."""
    # In a collective of the training, gloo tells of the lost connection.
    return report["error"][0] in ("CommitError", "AgreementError") or (report["in"] == "training" and report["is_gloo"])


@contextlib.contextmanager
def swept(root: Path, roles: Sequence[str], exchanges: bool) -> Iterator[Path]:
    """What the next start sees of a root.

    Where folders are not exchanged, a step that is saved again is nowhere between two renames: the sweep of the next
    start puts it back, here in a copy.
    """
    if exchanges or not root.exists():
        yield root
        return
    with tempfile.TemporaryDirectory(dir=root.parent) as copy:
        root = Path(shutil.copytree(root, Path(copy, "root")))
        for role in roles:
            leftovers.remove_leftovers(root, role, alone=False)
        yield root


def damage(role_dir: Path) -> list[str]:
    """What is wrong with a checkpoint's files, by the sizes and sums that its manifest says; not by our reader."""
    manifest = read_manifest(role_dir)
    found = []
    for record in manifest.files:
        try:
            data = (role_dir / record.path).read_bytes()
        except OSError as error:
            found.append(f"{role_dir / record.path}: {error}")
            continue
        if (len(data), zlib.crc32(data)) != (record.size, record.crc32):
            found.append(f"{role_dir / record.path}: wrong bytes")
    return found


def digest(state: dict[str, Any]) -> str:
    """Of every byte of a training's state."""
    total = hashlib.sha256()
    for name, value in sorted(state.items()):
        total.update(f"{name} {getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}".encode())
        if isinstance(value, torch.Tensor):
            total.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(value).encode())
    return total.hexdigest()


def note(book: Any, *what: Any) -> None:
    # In one write: the next instruction may be the last.
    book.write(json.dumps(what) + "\n")


def notes(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
