"""Reading hostile checkpoints opens, makes, removes and runs nothing outside: as Python sees it, and the kernel."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.models.mapping import hf_tensors
from mcore_ckpt.models.registry import model_from_config
from tests.faults.hostile.fuzzing import CONFIG, Sample, archive_of, pt_of
from tests.faults.hostile.read_everything import BEGIN, END
from tests.faults.hostile.test_files import sealed
from tests.faults.hostile.test_hostile_pickles import PICKLES
from tests.support.torch_dist_folder import make_torch_dist

WORKER = Path(__file__).with_name("read_everything.py")
CHANGES = re.compile(r"os\.(?!listdir|scandir|walk|fspath)|subprocess\.|socket\.|shutil\.|ctypes\.dlopen|import")
STRACE = shutil.which("strace")
# Not those that take a while.
HOSTILE = [pickled for pickled in PICKLES.values() if len(pickled) < 10_000]


def sound(folder: Path) -> Path:
    import torch

    Sample.make(folder / "root")
    make_torch_dist(folder / "dist")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(CONFIG))
    tensors = {t.name: torch.zeros(t.shape) for t in hf_tensors(model_from_config(CONFIG))}
    save_file(tensors, folder / "hf" / "model.safetensors")
    (folder / "file.pt").write_bytes(pt_of({"a": torch.arange(3)}))
    return folder


def hostile(folder: Path, secret: Path) -> Path:
    """Everything in it leads to a file that is another's, or wants to run something."""
    sound(folder)
    outside = os.path.relpath(secret, folder)
    role_dir = next((folder / "root").glob("*/actor"))
    for number, change in enumerate((_path_up, _path_absolute, _path_below_a_link)):
        other = role_dir.parent.with_name(f"global_steps_{number}") / role_dir.name
        shutil.copytree(role_dir, other)
        record = json.loads((other / file_names.MANIFEST_FILE).read_bytes()) | {"step": number}
        change(record, other, secret)
        (other / file_names.MANIFEST_FILE).write_bytes(sealed(record))
    for record in _records(role_dir):
        _link(role_dir / record.path, secret)
    (folder / "root" / file_names.TRACKER_FILE).write_text("../../..")
    metadata = (folder / "dist" / ".metadata").read_bytes()
    name = b"../" + os.fsencode(secret.name)
    assert len(name) == len(b"__0_0.distcp"), "the lengths in the pickle stay as they are"
    (folder / "dist" / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", name))
    _link(folder / "hf" / "config.json", secret)
    index = {"weight_map": {"a": f"../{outside}", "b": str(secret)}}
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    for number, pickled in enumerate(HOSTILE):
        (folder / f"hostile_{number}.pt").write_bytes(archive_of(pickled))
    return folder


def _records(role_dir: Path) -> list[FileRecord]:
    from mcore_ckpt.checkpoint.reading import read_manifest

    return list(read_manifest(role_dir).files)


def _link(path: Path, secret: Path) -> None:
    path.unlink()
    path.symlink_to(secret)


def _path_up(record: dict[str, Any], role_dir: Path, secret: Path) -> None:
    record["files"][0]["path"] = os.path.relpath(secret, role_dir)


def _path_absolute(record: dict[str, Any], role_dir: Path, secret: Path) -> None:
    record["files"][0]["path"] = str(secret)


def _path_below_a_link(record: dict[str, Any], role_dir: Path, secret: Path) -> None:
    (role_dir / "linked").symlink_to(secret.parent)
    for file in record["files"]:
        file["path"] = f"linked/{secret.name}"
        break


@dataclass(frozen=True)
class Run:
    """What a process did between the two looks: as Python's audit hook told, and as strace did, if it is there."""

    folder: Path
    events: list[tuple[str, str]]
    refused: list[str]
    calls: list[str] | None


def run(first: Path, folders: list[Path], log: Path) -> list[Run]:
    """One process for all: under strace, to import torch takes longer than to read them."""
    tracing = [] if STRACE is None else [STRACE, "-f", "-qq", "-o", str(log), "-e", "trace=%file,%network,execve"]
    command = [*tracing, sys.executable, "-W", "ignore", str(WORKER), str(first), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    calls = [None] * len(folders) if STRACE is None else _calls(log)
    return [
        Run(folder, each["events"], each["refused"], of) for folder, each, of in zip(folders, told, calls, strict=True)
    ]


def _calls(log: Path) -> list[list[str]]:
    """Of each folder's turn."""
    found = []
    for turn in log.read_text(errors="replace").split(BEGIN)[1:]:
        between = turn[: turn.index(END)].splitlines()[1:-1]
        # To look where a link leads is not to open it.
        found.append([line for line in between if not re.search(r"(?:stat\w*|readlink\w*|access\w*|getcwd)\(", line)])
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """One to read first, a sound and a hostile one; and beside them the file that is none of their business."""
    base = tmp_path_factory.mktemp("outside")
    secret = base / "secret_ab"[: len("__0_0.distcp") - 3]
    secret.write_bytes(b"not yours")
    return sound(base / "first"), sound(base / "sound"), hostile(base / "hostile", secret)


def listing(base: Path, but: Path) -> dict[str, bytes | None]:
    return {
        str(path): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(base.rglob("*"))
        if but not in path.parents
    }


@pytest.fixture(scope="module")
def runs(folders: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    first, good, bad = folders
    log, before = tmp_path_factory.mktemp("logs") / "log", listing(bad.parent, bad)
    of_good, of_bad = run(first, [good, bad], log)
    assert listing(bad.parent, bad) == before
    return of_good, of_bad


def test_python_opens_and_changes_nothing_outside(runs: tuple[Run, Run]) -> None:
    good, bad = runs
    assert not good.refused
    assert ["open", str(good.folder / "file.pt")] in good.events, "the hook sees nothing"
    assert len(bad.refused) > 3 * len(HOSTILE)
    for event, argument in bad.events:
        assert not CHANGES.match(event), (event, argument)
        assert event != "open" or not argument or Path(argument).is_relative_to(bad.folder), (event, argument)


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
def test_the_kernel_sees_no_more_of_a_hostile_folder_than_of_a_sound_one(runs: tuple[Run, Run]) -> None:
    good, bad = runs
    assert good.calls is not None
    assert bad.calls is not None
    assert any(str(good.folder / "file.pt") in line for line in good.calls), "strace sees nothing"
    assert {_paths(line) for line in bad.calls} <= {_paths(line) for line in good.calls}
    changes = re.compile(r"O_CREAT|O_WRONLY|O_RDWR|unlink|rename|mkdir|exec|link\w*\(|connect|chmod|mknod")
    assert not [line for line in bad.calls if changes.search(line)]


def _paths(line: str) -> str:
    """Of a call, those of the folder all one."""
    paths = re.findall(r'"([^"]*)"', line)
    return " ".join("own" if re.search(r"/outside\d*/(?:sound|hostile)(?:/|$)", path) else path for path in paths)
