"""Compares our reader of `.pt` files with torch.load(weights_only=True): what each makes of hostile files; the cost.

    python benchmarks/pickles.py [--tensors 100000] [--megabytes 1000] [--folder DIR] [--json]

The hostile files are those of tests/faults/hostile. Each is read in a child process that may take 1 GiB of memory
and 5 s of a processor.
torch.load comes in four forms: as it is, with mapped files, onto the device `meta`, and under FakeTensorMode. Before
each of them the archive passes the checks of `PtArchive`, as torch itself checks no archive. What a reader does is one
of: refused, read, no memory, no answer (no time, or its process died). `refused` is what a hostile file should get.

The sound file is a dict of many small tensors. It is read by each reader in a process of its own, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mcore_ckpt.checkpoint.pt_archive import PtArchive
from mcore_ckpt.checkpoint.pt_values import reader_of
from mcore_ckpt.formats.foreign_pickles import load_safely
from mcore_ckpt.formats.torch_save_files import read_pt

sys.path.append(str(Path(__file__).parents[1]))
from tests.faults.hostile import test_bombs, test_hostile_pickles
from tests.faults.hostile.fuzzing import archive_of

MOST_MEMORY, MOST_CPU_SECONDS = 1 << 30, 5
Read = Callable[[Path], object]


def _checked(path: Path) -> None:
    data = path.read_bytes()
    PtArchive(reader_of(data), len(data))


def _fake(path: Path) -> object:
    with FakeTensorMode():
        return torch.load(path, weights_only=True)


READERS: dict[str, Read] = {
    "ours": lambda path: load_safely(path, str(path)),
    "ours, in place": read_pt,
    "torch": lambda path: torch.load(path, weights_only=True),
    "torch, mmap": lambda path: torch.load(path, weights_only=True, mmap=True),
    "torch, meta": lambda path: torch.load(path, weights_only=True, mmap=True, map_location="meta"),
    "torch, fake": _fake,
}


def hostile_files(folder: Path) -> dict[str, Path]:
    """Writes the hostile files."""
    pickles = {**test_hostile_pickles.PICKLES}
    pickles |= {f"many {name}": b"\x80\x04" + data for name, data in test_bombs.PICKLES.items()}
    # With an end, so that a reader gets as far as it can.
    pickles |= {f"many {name}, ended": b"\x80\x04" + data + b"." for name, data in test_bombs.PICKLES.items()}
    found = {}
    for number, (name, data) in enumerate(pickles.items()):
        found[name] = folder / f"{number}.pt"
        found[name].write_bytes(archive_of(data))
    return found


def _write_sound(path: Path, tensors: int, megabytes: int) -> None:
    """In a child, so that the readers do not begin with memory that this process has freed."""
    elements = megabytes * 1_000_000 // tensors // 4
    names = (f"decoder.layers.{n // 100}.mlp.experts.local_experts.{n % 100}.weight" for n in range(tensors))
    torch.save({name: torch.ones(elements) for name in names}, path)


def in_child(read: Read, path: Path, is_limited: bool = True) -> dict[str, Any]:
    """Reads a file in a child process, and returns what came of it, its seconds, and its megabytes of memory."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if not child:
        _read_and_tell(read, path, sender, is_limited)
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return {"outcome": "no answer"}
    finally:
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL, signal.SIGXCPU, signal.SIGSEGV), status


def _read_and_tell(read: Read, path: Path, sender: Any, is_limited: bool) -> None:
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    if is_limited:
        resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + MOST_MEMORY,) * 2)
        seconds = round(time.process_time()) + MOST_CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    started = time.process_time()
    told: dict[str, Any] = {}
    try:
        value = read(path)
        told = {"outcome": "read", "kept": type(value).__name__}
    except MemoryError:
        told = {"outcome": "no memory"}
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        is_memory = "alloc" in text.lower() or "MemoryError" in text
        told = {"outcome": "no memory" if is_memory else "refused", "error": text.splitlines()[0][:150]}
    told |= {"seconds": time.process_time() - started, "megabytes": (_memory("VmHWM") - before) / 1e6}
    sender.send(told)
    sender.close()
    os._exit(0)


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000, help="tensors of the sound file")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the sound file")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where a temporary folder is made")
    parser.add_argument("--only-sound", action="store_true", help="leave the hostile files out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"hostile": {}, "sound": {}}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name, path in ({} if arguments.only_sound else hostile_files(Path(folder))).items():
            found["hostile"][name] = {reader: in_child(_after_check(reader), path) for reader in READERS}
            if not arguments.json:
                print(f"{name:40} " + " | ".join(map(_told, found["hostile"][name].values())), flush=True)
        sound = Path(folder, "sound.pt")
        in_child(lambda path: _write_sound(path, arguments.tensors, arguments.megabytes), sound, is_limited=False)
        for reader, read in READERS.items():
            found["sound"][reader] = in_child(read, sound, is_limited=False)
            if not arguments.json:
                print(f"sound file, {reader:20} {_told(found['sound'][reader])}", flush=True)
    if arguments.json:
        print(json.dumps(found))


def _after_check(reader: str) -> Read:
    if reader.startswith("ours"):
        return READERS[reader]

    def read(path: Path) -> object:
        _checked(path)
        return READERS[reader](path)

    return read


def _told(result: dict[str, Any]) -> str:
    if "seconds" not in result:
        return result["outcome"]
    return f"{result['outcome']} {result['seconds']:.1f} s {result['megabytes']:.0f} MB"


if __name__ == "__main__":
    main()
