"""Measures what many steps and many files cost: calls to the file system, and the time where each call takes 5 ms.

    python benchmarks/many_files.py [--steps 10000] [--files 100000] [--delay-ms 5] [--only NAME...] [--json]

`--steps 100 200 --files 100 200` measures twice, so that calls for each step and file can be told from the others.

Calls are counted, and made slow, by a library that is loaded before the C library (tests/faults/disks/delays.c).
What each operation is for, and on which of its two places it works: OPERATIONS.
"""

import argparse
import contextlib
import ctypes
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, WrittenFile, encode_manifest
from mcore_ckpt.cli.main import main as command_line
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.steps import commit, leftovers, listing, retention, tracker
from mcore_ckpt.steps.choice import choose
from mcore_ckpt.tools.maintain.prune import prune

ROLE = "actor"
LIBRARY = Path(__file__).parents[1] / "tests" / "faults" / "disks" / "delays.c"
MANIFEST = Manifest(
    step=1,
    role=ROLE,
    roles=(ROLE,),
    attempt="a" * 32,
    created="2026-01-01T00:00:00+00:00",
    versions={},
    contents=("model",),
    topology=Topology(),
    ranks=(RankCoordinates(),),
    stages=(),
    tensors=(),
    files=(),
)


@dataclass(frozen=True)
class Places:
    """`steps`: a root of many steps with one role and one small file each. `files`: the only step of another root, of
    one role with many files.
    """

    steps: Path
    files: Path

    @property
    def role_dir(self) -> Path:
        return self.files / "global_steps_1" / ROLE


def make_steps(root: Path, count: int) -> None:
    for step in range(1, count + 1):
        role_dir = file_names.step_dir(root, step) / ROLE
        role_dir.mkdir(parents=True)
        (role_dir / "small.pt").write_bytes(b"x")
        record = FileRecord("small.pt", "extra", 0, 1, 0)
        (role_dir / file_names.MANIFEST_FILE).write_bytes(
            encode_manifest(replace(MANIFEST, step=step, files=(record,)))
        )
    tracker.write_tracker(root, count)


def make_files(role_dir: Path, count: int) -> list[WrittenFile]:
    """A role with many files: a tenth of them in the folder of the optimizer's shards of each of ten stages."""
    names = [f"optimizer{number % 10}/shard_{number:06d}.pt" for number in range(count)]
    for folder in {name.partition("/")[0] for name in names}:
        (role_dir / folder).mkdir(parents=True)
    for name in names:
        (role_dir / name).write_bytes(b"x")
    records = tuple(FileRecord(name, "optimizer", 0, 1, 0) for name in names)
    (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(replace(MANIFEST, files=records)))
    return [WrittenFile(name, "optimizer", 1, 0) for name in names]


def again(places: Places) -> None:
    """Takes the place of what the operation before has deleted, and is not counted."""
    copy = places.files / "copy"
    if not places.role_dir.exists():
        shutil.copytree(copy, places.role_dir, copy_function=os.link)


def replace_old_checkpoint(places: Places) -> None:
    """As a save of a step that exists: the old checkpoint of as many files is removed."""
    staging = file_names.staging_dir(places.role_dir, "b" * 32)
    commit.publish(staging, places.role_dir, "b" * 32)


def quiet(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert command_line(arguments) == 0


def written(places: Places) -> list[WrittenFile]:
    return [WrittenFile(file.path, file.kind, file.size, 0) for file in LocalFolder(places.role_dir).manifest().files]


@dataclass(frozen=True)
class Operation:
    """`prepare` is not counted; what it returns is given to `run`."""

    name: str
    run: Callable[[Places, object], object]
    prepare: Callable[[Places], object] = lambda places: None


def _stage_copy(places: Places) -> None:
    again(places)
    shutil.copytree(places.files / "copy", file_names.staging_dir(places.role_dir, "b" * 32), copy_function=os.link)


OPERATIONS = (
    # Of many steps.
    Operation("list, first time", lambda places, _: listing.list_steps(places.steps)),
    Operation("list, again", lambda places, _: listing.list_steps(places.steps)),
    Operation(
        "tracker of a save",
        lambda places, _: tracker.update_tracker(places.steps, tracker.read_tracker(places.steps)),
    ),
    Operation(
        "old steps of a save",
        lambda places, _: retention.too_old(listing.list_steps(places.steps), retention.PreservationPolicy(2), None),
    ),
    Operation("complete steps, bytes included", lambda places, _: listing.complete_steps(places.steps)),
    Operation("recover's search", lambda places, _: choose(listing.list_steps(places.steps), [ROLE])),
    Operation("start of a manager", lambda places, _: leftovers.remove_leftovers(places.steps, ROLE, alone=False)),
    Operation("first save's sweep", lambda places, _: leftovers.remove_leftovers(places.steps, ROLE, alone=True)),
    Operation(
        "spelling of a step",
        lambda places, _: listing.check_one_spelling(places.steps, file_names.step_dir(places.steps, 1) / ROLE, 1),
    ),
    Operation("mcore-ckpt list", lambda places, _: quiet("list", str(places.steps))),
    Operation(
        "mcore-ckpt prune --dry-run",
        lambda places, _: prune(places.steps, retention.PreservationPolicy(10**9), dry_run=True),
    ),
    # Of many files.
    Operation(
        "rank 0's look at all files",
        lambda places, files: commit.check_files(places.role_dir, [(0, file) for file in files]),  # type: ignore
        prepare=written,
    ),
    Operation(
        "what a step is worth",
        lambda places, status: status.is_complete,  # type: ignore
        prepare=lambda places: listing.step_status(places.role_dir.parent),
    ),
    Operation(
        "sizes before a load",
        lambda places, files: LocalFolder(places.role_dir).check(files),  # type: ignore
        prepare=lambda places: LocalFolder(places.role_dir).manifest().files,
    ),
    Operation("rename over an old checkpoint", lambda places, _: replace_old_checkpoint(places), prepare=_stage_copy),
    Operation(
        "deletion of the step",
        lambda places, status: retention.delete_step(status),  # type: ignore
        prepare=lambda places: listing.step_status(places.role_dir.parent),
    ),
)


def measure(places: Places, operation: Operation, delay_ms: float) -> dict[str, object]:
    library = ctypes.CDLL(None)
    prepared = operation.prepare(places)
    os.environ["SLOW"] = f"{round(1000 * delay_ms)} {places.steps.parent}"
    library.slow_reset()
    started = time.perf_counter()
    operation.run(places, prepared)
    seconds = time.perf_counter() - started
    text = ctypes.create_string_buffer(1000)
    library.slow_report(text, 1000)
    os.environ["SLOW"] = "none"
    again(places)
    words = text.value.decode().split()
    calls = {kind: int(count) for kind, count in zip(words[::2], words[1::2], strict=True) if count != "0"}
    return {"name": operation.name, "seconds": round(seconds, 3), "calls": calls}


def work(arguments: argparse.Namespace, steps: int, files: int, folder: Path) -> None:
    places = Places(folder / "steps", folder / "files")
    make_steps(places.steps, steps)
    make_files(places.role_dir, files)
    os.rename(places.role_dir, places.files / "copy")
    again(places)
    for operation in OPERATIONS:
        if not arguments.only or operation.name in arguments.only:
            told = measure(places, operation, arguments.delay_ms)
            print(json.dumps(told) if arguments.json else _line(told), flush=True)


def _line(told: dict[str, object]) -> str:
    calls = told["calls"]
    assert isinstance(calls, dict)
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(calls.items(), key=lambda item: -item[1]))
    return f"| {told['name']} | {sum(calls.values()):,} | {kinds} | {told['seconds']} s |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000])
    parser.add_argument("--files", type=int, nargs="+", default=[100_000])
    parser.add_argument("--delay-ms", type=float, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="names of operations")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if "SLOW" in os.environ:
        for steps, files in zip(arguments.steps, arguments.files, strict=True):
            with tempfile.TemporaryDirectory(prefix="many-") as folder:
                work(arguments, steps, files, Path(folder))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "delays.so"))
        subprocess.run(["cc", "-shared", "-fPIC", "-w", str(LIBRARY), "-o", library, "-ldl"], check=True)
        environment = os.environ | {"LD_PRELOAD": library, "SLOW": "none"}
        return subprocess.run([sys.executable, *sys.argv], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
