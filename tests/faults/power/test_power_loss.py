"""Lost power, state by state: what power.py finds in a part of the states, and that it finds what is broken."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")

# Syncs that are only needed where hosts do not see each other's names at once. On one host, rank 0's own sync of the
# same folder comes later (new_manifest.py).
FOR_OTHER_HOSTS = {("save/rank_files.py:write", "optim")}


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "power.py"), *arguments, "--json", str(report)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert report.exists(), done.stdout
    found: dict[str, Any] = json.loads(report.read_text())
    assert (done.returncode, found["bad"]) == (0, []), done.stdout
    return found


def test_a_part_of_the_states_of_saves(tmp_path: Path) -> None:
    found = run(tmp_path, "saves", "--states", "10", "--samples", "1", "--syncs", "commit.py:publish")
    assert found["tried"] == 10
    # Of the step's folder, of the root, and of the role's folder if it has links to files of another program.
    assert len(found["without"]) == 3
    assert all(each["problem"] for each in found["without"])


@pytest.mark.full
def test_a_part_of_the_states_of_all_else(tmp_path: Path) -> None:
    assert run(tmp_path, "outputs", "--states", "30", "--samples", "1")["tried"] == 30


# Two groups of pytest-xdist, because each of the two runs one process for half an hour.
@pytest.mark.full
@pytest.mark.xdist_group("saves")
def test_all_states_and_every_sync_of_saves(tmp_path: Path) -> None:
    found = run(tmp_path, "saves", "--syncs", ".")
    assert found["tried"] == found["distinct"]
    unneeded = {(each["site"], each["path"].rpartition("/")[2]) for each in found["without"] if not each["problem"]}
    own = {place for place in unneeded if place[0].startswith("io/files.py")}  # what the recorded program itself syncs
    assert unneeded - own <= FOR_OTHER_HOSTS


@pytest.mark.full
@pytest.mark.xdist_group("outputs")
def test_all_states_of_all_else(tmp_path: Path) -> None:
    """Its syncs, one by one, take an hour and more: `scripts/power_loss.sh outputs --syncs .` by hand."""
    found = run(tmp_path, "outputs")
    assert found["tried"] == found["distinct"]
