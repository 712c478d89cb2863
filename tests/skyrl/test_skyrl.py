"""SkyRL's trainers save whole steps: the weights and the driver's files come back together, or not at all.

Real: SkyRL 0.3's trainers, worker and Megatron strategy, torchdata's data loader, megatron-core 0.18 (SkyRL imports
modules that 0.19 has no more). `skyrl_on_cpu.py` and `lives.py` say what is stood in for.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.steps import complete_steps, list_steps
from tests.support.megatron_cases import REPOSITORY, packages

pytestmark = pytest.mark.slow

KILLED = -9


@dataclass
class Lives:
    """Runs lives in one program, because its imports take longer than a life."""

    process: "subprocess.Popen[str]"
    folder: Path
    numbers: Iterator[int]

    def run(self, root: Path, ends: int = 0, **options: Any) -> dict[str, Any]:
        """One life, and its report. `ends` is the exit status that it must have."""
        number = next(self.numbers)
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"number": number, "root": str(root), **options}) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().split() == [str(number), str(ends)]
        if ends:
            return {}
        report: dict[str, Any] = json.loads((self.folder / f"report_{number}.json").read_text())
        return report

    def good(self, root: Path, **options: Any) -> dict[str, Any]:
        report = self.run(root, **options)
        assert report["error"] is None, report["error"][-1]
        return report


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    folder = tmp_path_factory.mktemp("lives")
    skyrl = REPOSITORY / ".venv" / "skyrl"
    paths = [REPOSITORY, skyrl, skyrl / "skyrl-gym", *packages("0.18")]  # its wheel has skyrl_gym in that folder
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.skyrl", str(folder)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield Lives(process, folder, itertools.count())


@pytest.fixture(scope="module")
def uninterrupted(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return lives.good(tmp_path_factory.mktemp("uninterrupted"), stock=True)


def complete(root: Path) -> list[int]:
    return [status.step for status in complete_steps(root)]


@pytest.mark.parametrize(
    "async_save",
    [
        pytest.param(False, id="sync", marks=pytest.mark.shows("SkyRL", "save", "resume")),
        pytest.param(True, id="async", marks=pytest.mark.shows("SkyRL", "async")),
    ],
)
def test_a_killed_training_goes_on_as_if_never_interrupted(
    lives: Lives, uninterrupted: dict[str, Any], tmp_path: Path, async_save: bool
) -> None:
    lives.run(tmp_path, ends=KILLED, saves=[2, 4], killed_in="step 5", async_save=async_save)
    resumed = lives.good(tmp_path)
    assert resumed["resumed"] in ((4,) if not async_save else (2, 4))
    assert resumed["path"] == str(tmp_path / f"global_step_{resumed['resumed']}")
    assert resumed["prompts"] == uninterrupted["prompts"][2 * resumed["resumed"] :]
    assert resumed["digest"] == uninterrupted["digest"]


@pytest.mark.shows("SkyRL", "parts")
def test_weights_without_the_drivers_files_are_no_step(
    lives: Lives, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    lives.run(tmp_path, ends=KILLED, saves=[2, 4], killed_in="driver 4")
    assert complete(tmp_path) == [2]
    resumed = lives.good(tmp_path, saves=[4])
    assert (resumed["resumed"], resumed["digest"]) == (2, uninterrupted["digest"])
    assert complete(tmp_path) == [2, 4]


def test_skyrls_own_driver_leaves_half_a_step(lives: Lives, tmp_path: Path) -> None:
    """The same kill with SkyRL alone: it has the weights, but cannot resume from them."""
    lives.run(tmp_path, ends=KILLED, saves=[2], killed_in="state 2", stock=True)
    assert (tmp_path / "global_step_2" / "policy" / ".metadata").exists()
    assert not (tmp_path / "global_step_2" / "trainer_state.pt").exists()


@pytest.mark.shows("SkyRL", "parts")
def test_the_files_of_the_asynchronous_trainer_belong_to_the_step(lives: Lives, tmp_path: Path) -> None:
    saved = lives.good(tmp_path, saves=[2], last=2, asynchronous=True)
    resumed = lives.good(tmp_path, last=2, asynchronous=True)
    uids = sorted(f"uid{prompt}" for prompt in saved["prompts"])
    assert resumed["resumed"] == 2
    assert resumed["more"] == [uids, [f"uid{saved['prompts'][0]}"], 0]
    names = {path.name for path in (tmp_path / "global_step_2" / "driver").iterdir()}
    assert names == {"data.pt", "trainer_state.pt", "fully_async_state.pt", "manifest.json"}
    state = torch.load(tmp_path / "global_step_2" / "driver" / "trainer_state.pt", weights_only=False)
    assert state["config"]["trainer"]["ckpt_path"] == str(tmp_path)


@pytest.mark.shows("SkyRL", "moving over")
def test_a_run_moves_over_from_skyrls_own_checkpoints(lives: Lives, tmp_path: Path) -> None:
    """It goes on as SkyRL's own resume does, which is not bit for bit what an uninterrupted run does."""
    root, copy = tmp_path / "root", tmp_path / "copy"
    lives.good(root, saves=[2], last=2, stock=True)
    shutil.copytree(root, copy)
    theirs = lives.good(copy, stock=True)
    # Our first save is interrupted. SkyRL's checkpoint is still what to resume from.
    lives.run(root, ends=KILLED, saves=[3], killed_in="driver 3")
    moved = lives.good(root, saves=[4])
    assert (moved["resumed"], moved["digest"]) == (2, theirs["digest"])
    resumed = lives.good(root)
    assert (resumed["resumed"], resumed["digest"]) == (4, theirs["digest"])
    assert (root / "global_step_2" / "policy" / ".metadata").exists(), "SkyRL's own checkpoint is not ours to delete"
    # SkyRL alone does not go on from its older checkpoint without a word.
    error = lives.run(root, stock=True)["error"]
    assert error[0] == "FileNotFoundError"
    assert "global_step_4" in error[1]


@pytest.mark.shows("SkyRL", "parts")
def test_a_step_is_saved_again_after_a_rollback(lives: Lives, uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    lives.good(tmp_path, saves=[2, 4], last=4)
    again = lives.good(tmp_path, resume=str(tmp_path / "global_step_2"), saves=[4])
    assert (again["resumed"], again["digest"]) == (2, uninterrupted["digest"])
    lives.run(tmp_path, ends=KILLED, resume=str(tmp_path / "global_step_2"), saves=[4], killed_in="driver 4")
    assert complete(tmp_path) == [2], "the earlier driver's files do not complete the new weights"
    refused = lives.run(tmp_path, resume=str(tmp_path / "global_step_4"))["error"]
    assert refused[0] == "CheckpointNotFoundError"
    assert "use trainer.resume_mode=latest" in refused[1]


@pytest.mark.shows("SkyRL", "retention")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_old_steps_are_deleted_and_the_best_one_stays(lives: Lives, tmp_path: Path, asynchronous: bool) -> None:
    rules = {"max_to_keep": 3, "keep_best": ["reward/avg_raw_reward:1:min"]}
    lives.good(tmp_path, saves=[1, 2, 3, 4], keep=1, options=rules, asynchronous=asynchronous)
    found = {status.step: status.metrics["reward/avg_raw_reward"] for status in list_steps(tmp_path)}
    assert 4 in found
    assert len(found) <= 2
    assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "4"


def test_a_rollback_to_skyrls_own_checkpoint_pairs_nothing(lives: Lives, tmp_path: Path) -> None:
    """Our weights of step 4 must never come with the data position that SkyRL saved at its own step 4."""
    root = tmp_path / "root"
    lives.good(root, saves=[2, 4], last=4, stock=True)
    back = {"resume": str(root / "global_step_2"), "saves": [4]}
    lives.run(root, ends=KILLED, killed_in="driver 4", **back)
    error = lives.run(root)["error"]
    assert error[0] == "FileNotFoundError", "SkyRL's tracker names its step 4, which has another name now"
    assert (root / "skyrl_global_step_4" / "trainer_state.pt").exists()
    lives.good(root, **back)
    assert lives.good(root)["resumed"] == 4
    assert lives.run(root, stock=True)["error"][0] == "FileNotFoundError"


def test_a_first_save_that_was_interrupted_begins_anew(lives: Lives, tmp_path: Path) -> None:
    lives.good(tmp_path, saves=[2], last=2)
    # As after a kill in an asynchronous save: only the driver has committed, and no step was ever complete.
    shutil.rmtree(tmp_path / "global_step_2" / "policy")
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "latest_ckpt_global_step.txt").unlink()
    assert lives.good(tmp_path, saves=[2])["resumed"] == 0
    assert complete(tmp_path) == [2]


def test_the_driver_does_not_complete_a_save_that_the_workers_refused(lives: Lives, tmp_path: Path) -> None:
    lives.good(tmp_path, saves=[2, 4], last=4)
    data = tmp_path / "global_step_4" / "driver" / "data.pt"
    before = data.read_bytes()
    back = {"resume": str(tmp_path / "global_step_2"), "saves": [4], "refused": True}
    lives.good(tmp_path, options={"if_failed": "warn"}, asynchronous=False, **back)
    assert data.read_bytes() == before
    error = lives.run(tmp_path, **back)["error"]
    assert error[0] == "UnsupportedError"
    assert data.read_bytes() == before


def test_a_data_loader_whose_state_cannot_be_saved_is_an_error(lives: Lives, tmp_path: Path) -> None:
    error = lives.run(tmp_path, saves=[2], broken_loader=True)["error"]
    assert error[0] == "CommitError"
    assert "could not save the state of the data loader" in error[1]
    assert complete(tmp_path) == []


@pytest.mark.shows("SkyRL", "parts")
def test_a_data_loader_that_forgets_its_position_is_an_error(lives: Lives, tmp_path: Path) -> None:
    """SkyRL only logs it, and the data begins anew."""
    lives.good(tmp_path, saves=[2], last=2)
    error = lives.run(tmp_path, deaf_loader=True)["error"]
    assert error[0] == "CheckpointError"
    assert "did not take its position back" in error[1]
    assert "another data set" in error[1]


def test_what_cannot_be_honoured_is_refused(lives: Lives, tmp_path: Path) -> None:
    error = lives.run(tmp_path, saves=[1], stock="worker")["error"]
    assert error[0] == "UnsupportedError"
    assert "the driver does not see" in error[1]
    assert complete(tmp_path) == []
    for options, said in (
        ({"remote": "s3://bucket/copies"}, "remote"),
        ({"async_save": True}, "async_dist_ckpt_save"),
        ({"if_busy": "skip"}, "if_busy"),
    ):
        error = lives.run(tmp_path, options=options)["error"]
        assert error[0] in ("InvalidArgumentError", "UnsupportedError")
        assert said in error[1]
    error = lives.run(tmp_path, bucket=True)["error"]
    assert error[0] == "UnsupportedError"
    assert "all nodes share" in error[1]


@pytest.mark.shows("SkyRL", "parts")
def test_a_damaged_file_of_the_driver_is_not_used(lives: Lives, tmp_path: Path) -> None:
    lives.good(tmp_path, saves=[2, 4], last=4)
    data = tmp_path / "global_step_4" / "driver" / "data.pt"
    data.write_bytes(data.read_bytes()[:-1])
    assert lives.good(tmp_path)["resumed"] == 2
    shutil.rmtree(tmp_path / "global_step_2")
    assert lives.run(tmp_path)["error"][0] == "CheckpointCorruptError"


def test_without_skyrl_it_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mcore_ckpt.integrations.skyrl", "trainer.strategy=megatron"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert "ImportError: mcore_ckpt.integrations.skyrl needs SkyRL: No module named 'ray'" in done.stderr
