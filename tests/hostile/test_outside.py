"""Reading hostile checkpoints opens, makes, removes and runs nothing outside of them: as Python sees it, and the kernel."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fuzzing import CONFIG, Sample, archive_of, make_torch_dist, pt_of
from read_everything import BEGIN, END
from safetensors.torch import save_file
from test_files import sealed
from test_pickles import PICKLES

from mcore_ckpt import layout
from mcore_ckpt.hf.architecture import read_model
from mcore_ckpt.hf.mapping import hf_tensors
from mcore_ckpt.storage.manifest import FileRecord

WORKER = Path(__file__).with_name("read_everything.py")
CHANGES = re.compile(r"os\.(?!listdir|scandir|walk|fspath)|subprocess\.|socket\.|shutil\.|ctypes\.dlopen|import")
STRACE = shutil.which("strace")


def sound(folder: Path) -> Path:
    import torch

    Sample.make(folder / "root")
    make_torch_dist(folder / "dist")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(CONFIG))
    tensors = {t.name: torch.zeros(t.shape) for t in hf_tensors(read_model(CONFIG))}
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
        record = json.loads((other / layout.MANIFEST_FILE).read_bytes()) | {"step": number}
        change(record, other, secret)
        (other / layout.MANIFEST_FILE).write_bytes(sealed(record))
    for record in _records(role_dir):
        _link(role_dir / record.path, secret)
    (folder / "root" / layout.TRACKER_FILE).write_text("../../..")
    metadata = (folder / "dist" / ".metadata").read_bytes()
    name = b"../" + os.fsencode(secret.name)
    assert len(name) == len(b"__0_0.distcp"), "the lengths in the pickle stay as they are"
    (folder / "dist" / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", name))
    _link(folder / "hf" / "config.json", secret)
    index = {"weight_map": {"a": f"../{outside}", "b": str(secret)}}
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    for number, pickled in enumerate(PICKLES.values()):
        (folder / f"hostile_{number}.pt").write_bytes(archive_of(pickled))
    return folder


def _records(role_dir: Path) -> list[FileRecord]:
    from mcore_ckpt.storage.reader import read_manifest

    return list(read_manifest(role_dir, layout.MANIFEST_FILE).files)


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


def run(*folders: Path, before: tuple[str, ...] = ()) -> dict[str, Any]:
    command = [*before, sys.executable, "-W", "ignore", str(WORKER), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


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


def test_python_opens_and_changes_nothing_outside(folders: tuple[Path, Path, Path]) -> None:
    first, good, bad = folders
    before = listing(bad.parent, bad)
    assert not run(first, good)["refused"]
    found = run(first, bad)
    assert len(found["refused"]) > 3 * len(PICKLES)
    for event, argument in found["events"]:
        assert not CHANGES.match(event), (event, argument)
        assert event != "open" or not argument or Path(argument).is_relative_to(bad), (event, argument)
    assert listing(bad.parent, bad) == before


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
def test_the_kernel_sees_no_more_of_a_hostile_folder_than_of_a_sound_one(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    first, good, bad = folders
    seen = [_traced(first, folder, tmp_path / folder.name) for folder in (good, bad)]
    assert any(str(good) in line for line in seen[0])
    outside = [{_call(line) for line in lines} for lines in seen]
    assert outside[1] - outside[0] == set()
    assert not any(re.search(r"O_CREAT|O_WRONLY|O_RDWR|unlink|rename|mkdir|execve|symlink", line) for line in seen[1])


def _traced(first: Path, folder: Path, log: Path) -> list[str]:
    assert STRACE is not None
    calls = "open,openat,openat2,creat,execve,execveat,unlink,unlinkat,rename,renameat2,mkdir,mkdirat,symlink,connect"
    run(first, folder, before=(STRACE, "-f", "-qq", "-o", str(log), "-e", f"trace={calls},%stat"))
    text = log.read_text(errors="replace")
    between = text[text.index(BEGIN) : text.index(END)].splitlines()[1:-1]
    # A look at where a link leads is not yet opening it.
    return [
        line for line in between if re.search(r"(?:open\w*|creat|exec\w*|unlink\w*|rename\w*|mkdir\w*|connect)\(", line)
    ]


def _call(line: str) -> str:
    """The path of a call, the folder's own all one."""
    paths = re.findall(r'"([^"]*)"', line)
    return " ".join("own" if re.search(r"/outside\d*/(?:sound|hostile)/", path) else path for path in paths)


def test_the_worker_would_tell(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Else the test above tests nothing: opened by its own name, the file is seen."""
    first, good, _ = folders
    watched = tmp_path / "watched"
    shutil.copytree(good, watched)
    (watched / "hf" / "model.safetensors").unlink()
    (watched / "hf" / "model.safetensors").symlink_to(good / "hf" / "model.safetensors")
    found = run(first, watched)
    assert any(event == "open" for event, _ in found["events"])
