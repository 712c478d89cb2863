"""System calls that fail, or do half of what they are asked, at any byte of any file of a save or load.

Real ones: a library loaded before the C library (shim.c) stands between them and the process, native threads included.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names

HERE = Path(__file__).parent

OWN = file_names.optimizer_file(0, 0, 0, 1)
SHARED = file_names.model_file(0, 0)
SMALL = file_names.rng_file(0, 0, 0, 1)
MANIFEST = file_names.MANIFEST_FILE
ALWAYS = 1 << 30


@dataclass(frozen=True)
class Fault:
    """The first `times` calls `call` that touch a byte from `at` on of a file fail with `number`; 0: do half."""

    call: str
    number: int
    file: str
    at: int = 0
    times: int = ALWAYS

    def __str__(self) -> str:
        name = errno.errorcode[self.number] if self.number else "half"
        return f"{self.call}-{name}-{self.file.rpartition('/')[2]}-{self.at}"

    @property
    def env(self) -> dict[str, str]:
        return {"FAULT": f"{self.call} {self.number} {self.at} {self.times} {self.file}"}


@dataclass(frozen=True)
class Job:
    """As io_worker.Job."""

    root: str
    env: dict[str, str]
    reads: bool = False
    ranks: int = 2
    timeout_s: float = 30.0


class Worker:
    def __init__(self, library: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "io_worker.py")],
            env=os.environ | {"LD_PRELOAD": str(library)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: Job) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return told

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-w", str(HERE / "shim.c"), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    worker = Worker(library)
    yield worker
    worker.close()


def case(fault: Fault) -> Any:
    return pytest.param(fault, id=str(fault))


def repeated(fault: Fault) -> Any:
    """Of a call and a kind of file that CI has a case of, with another error, at another place or of another file."""
    return pytest.param(fault, id=str(fault), marks=pytest.mark.full)


REFUSED = [
    case(Fault("pwritev", errno.EIO, OWN)),
    repeated(Fault("pwritev", errno.EIO, OWN, 700_000)),
    repeated(Fault("pwritev", errno.ENOSPC, OWN)),
    case(Fault("pwritev", errno.ENOSPC, OWN, 700_000)),
    case(Fault("pwritev", errno.EDQUOT, OWN)),
    repeated(Fault("pwritev", errno.EDQUOT, OWN, 700_000)),
    repeated(Fault("pwritev", errno.EIO, SHARED)),
    case(Fault("pwritev", errno.EIO, SHARED, 40_000)),
    case(Fault("pwritev", errno.ENOSPC, SHARED)),
    repeated(Fault("pwritev", errno.ENOSPC, SHARED, 40_000)),
    case(Fault("fallocate", errno.ENOSPC, OWN)),
    repeated(Fault("fallocate", errno.EDQUOT, SHARED)),
    case(Fault("fdatasync", errno.EIO, OWN)),
    repeated(Fault("fdatasync", errno.EDQUOT, SHARED)),
    case(Fault("ftruncate", errno.EIO, OWN)),
    case(Fault("open", errno.EMFILE, SHARED)),
    repeated(Fault("open", errno.EACCES, OWN)),
    case(Fault("write", errno.EIO, SMALL)),
    repeated(Fault("write", errno.ENOSPC, SMALL)),
    repeated(Fault("write", errno.EIO, MANIFEST)),
    case(Fault("write", errno.ENOSPC, MANIFEST)),
    repeated(Fault("write", errno.EDQUOT, MANIFEST)),
    case(Fault("open", errno.ENOSPC, MANIFEST)),
    case(Fault("fsync", errno.EIO, MANIFEST)),
    case(Fault("rename", errno.EIO, "global_steps_2/actor")),
]


@pytest.mark.parametrize("fault", REFUSED)
def test_both_ranks_are_told_and_the_next_save_succeeds(worker: Worker, fault: Fault, tmp_path: Path) -> None:
    told = worker.run(Job(str(tmp_path), fault.env))
    assert told["hits"] > 0
    for kind, message in told["errors"]:
        assert kind == "CommitError"
        assert os.strerror(fault.number) in message
        assert fault.file in message
    assert (told["steps"], told["tracker"], told["remains"]) == ([[1, 1]], 1, [])
    assert (told["next"], told["last"]) == ([None, None], [[[1, 1], [3, 3]], 3])


HARMLESS = [
    *[Fault("pwritev", 0, file, times=times) for file in (OWN, SHARED) for times in (1, ALWAYS)],
    Fault("pwritev", errno.EINTR, OWN, times=5),
    Fault("open_direct", errno.EINVAL, OWN),
    Fault("open_direct", errno.EINVAL, SHARED),
    # Some network file systems: at open all is well.
    Fault("pwritev_direct", errno.EINVAL, OWN),
    Fault("pwritev_direct", errno.EINVAL, SHARED, at=40_000),
    Fault("fallocate", errno.EOPNOTSUPP, OWN),
    # A page in which another rank's bytes are, too, is read and written back.
    Fault("pread_sectors", 0, SHARED),
    Fault("write", 0, SMALL),
    Fault("write", 0, MANIFEST),
]


@pytest.mark.parametrize("fault", HARMLESS, ids=str)
def test_what_must_not_fail_a_save(worker: Worker, fault: Fault, tmp_path: Path) -> None:
    told = worker.run(Job(str(tmp_path), fault.env))
    if "direct" in fault.call and not told["hits"]:
        pytest.skip("no O_DIRECT on this file system")
    assert told["hits"] > 0
    assert (told["errors"], told["steps"], told["tracker"]) == ([None, None], [[1, 1], [2, 2]], 2)


@pytest.mark.parametrize(
    "fault",
    [
        case(Fault("rename", errno.EIO, file_names.TRACKER_FILE)),
        repeated(Fault("rename", errno.ENOSPC, file_names.TRACKER_FILE)),
    ],
)
def test_a_tracker_that_cannot_be_written_fails_no_save(worker: Worker, fault: Fault, tmp_path: Path) -> None:
    """The checkpoint is there, and found; the next save moves the tracker on."""
    told = worker.run(Job(str(tmp_path), fault.env))
    assert told["hits"] > 0
    assert (told["errors"], told["steps"], told["tracker"]) == ([None, None], [[1, 1], [2, 2]], 1)
    assert told["last"] == [[[1, 1], [2, 2], [3, 3]], 3]


@pytest.mark.parametrize("file", [OWN, SHARED])
@pytest.mark.parametrize("at", [0, 40_000])
def test_a_disk_that_cannot_be_read(worker: Worker, file: str, at: int, tmp_path: Path) -> None:
    told = worker.run(Job(str(tmp_path), Fault("pread", errno.EIO, file, at).env, reads=True))
    ((kind, message),) = told["errors"]
    assert kind == "CheckpointCorruptError"
    assert file in message
    assert os.strerror(errno.EIO) in message


@pytest.mark.parametrize(
    "fault",
    [
        Fault("pread", 0, SHARED, times=3),
        Fault("pread", 0, OWN, times=3),
        Fault("pread", errno.EINTR, OWN, times=3),
        # Some file systems end a direct read inside a page before the end of the file.
        Fault("pread_sectors", 0, OWN, times=3),
        Fault("open_direct", errno.EINVAL, OWN),
    ],
    ids=str,
)
def test_what_must_not_fail_a_load(worker: Worker, fault: Fault, tmp_path: Path) -> None:
    told = worker.run(Job(str(tmp_path), fault.env, reads=True))
    assert told["hits"] > 0
    assert told["errors"] == [None]


def test_a_clock_that_jumps_changes_nothing(worker: Worker, tmp_path: Path) -> None:
    told = worker.run(Job(str(tmp_path), {"CLOCK_JUMPS": "1"}))
    assert (told["errors"], told["steps"], told["tracker"]) == ([None, None], [[1, 1], [2, 2]], 2)


def test_a_clock_that_jumps_moves_no_deadline(worker: Worker, tmp_path: Path) -> None:
    """Ten years on and back at every look: a rank that never comes is known by the deadline all the same."""
    told = worker.run(Job(str(tmp_path), {"CLOCK_JUMPS": "1"}, ranks=1, timeout_s=1.0))
    ((kind, message),) = told["errors"]
    assert kind == "CommitError"
    assert "no word from rank 1" in message
    assert 1.0 <= told["seconds"] < 3.0
