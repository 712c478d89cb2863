"""The version before runs and commits reads what this one writes, and this one reads what it writes.

It is the package of commit b81ddbb, taken from the repository, with the native module of this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

import mcore_ckpt
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.steps.listing import complete_steps

BEFORE = "b81ddbb"
PACKAGE = Path(mcore_ckpt.__file__).parent

LIFE = """
import sys
from contextlib import closing
from types import SimpleNamespace
import torch
from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.recover import recover

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_layers=1)
        self.weight = torch.nn.Parameter(torch.zeros(4, 4))

    def sharded_state_dict(self, metadata):
        place = {"prepend_axis_num": 0, "global_offset": (0, 0), "replica_id": (0, 0, 0)}
        shapes = {"local_shape": self.weight.shape, "global_shape": self.weight.shape}
        return {"weight": SimpleNamespace(data=self.weight, key="weight", **place, **shapes)}

root, resume, *steps = sys.argv[1:]
model = Model()
config = CheckpointConfig(save_contents=("model",), load_contents=("model",), max_to_keep=3)
with closing(CheckpointManager(root, model, config=config)) as manager:
    print(recover(manager, int(resume) if resume.isdecimal() else resume).step, float(model.weight.detach()[0, 0]))
    for step in map(int, steps):
        torch.nn.init.constant_(model.weight, step)
        manager.save(step)
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the older package."""
    command = ["git", "-C", str(PACKAGE.parent), "archive", BEFORE, "mcore_ckpt"]
    found = subprocess.run(command, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"no commit {BEFORE} here")
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    # The native module of then asked whether memory is a GPU's, that of now asks which GPU's.
    ranges = folder / "mcore_ckpt" / "formats" / "native" / "ranges.py"
    before = ranges.read_text()
    assert before.count("memory.is_cuda,\n") == 1
    ranges.write_text(before.replace("memory.is_cuda,\n", "None,\n"))
    for native in PACKAGE.rglob("*.so"):
        shutil.copy(native, folder / "mcore_ckpt" / native.relative_to(PACKAGE))
    return folder


def live(package: Path, root: Path, resume: str | int, *steps: int) -> tuple[str, float]:
    """A training of one version. Returns the step that it resumed from, and what it found there."""
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", LIFE, str(root), str(resume), *map(str, steps)]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, cwd=root.parent, stdout=subprocess.PIPE, check=True, text=True)
    step, value = done.stdout.split()
    return step, float(value)


@pytest.mark.full
def test_two_versions_go_on_with_each_other_s_steps(before: Path, tmp_path: Path) -> None:
    root, now = tmp_path / "root", PACKAGE.parent
    assert live(now, root, "off", 80, 90)[0] == "None"
    assert live(before, root, "auto", 100) == ("90", 90.0)
    assert live(now, root, "auto", 110) == ("100", 100.0)
    assert live(now, root, 100, 105) == ("100", 100.0)
    assert live(now, root, "auto") == ("105", 105.0)
    assert [status.step for status in complete_steps(root)] == [90, 100, 105]  # 110 was given up
    assert live(before, root, "auto", 120) == ("105", 105.0)
    assert live(now, root, "auto", 130) == ("120", 120.0)
    assert read_manifest(root / "global_steps_120" / "actor").run is None
    commit = read_manifest(root / "global_steps_130" / "actor").commit
    assert commit is not None
    assert commit.parent == read_manifest(root / "global_steps_120" / "actor").attempt
