"""A trainer that is built as ROLL is (roll_trainer.py) saves, dies and comes back; ROLL's weak points it has not."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import tracker
from mcore_ckpt.tools.examine.verify import verify
from tests.support.commits import branch_in
from tests.support.document_examples import (
    ROLL_CHECKPOINTS,
    ROLL_COMPLETE,
    ROLL_NO_RESUME,
    ROLL_RESUME,
    ROLL_RESUME_COMPLETE,
    ROLL_SAVE_STEPS,
    relocated,
)

HERE = Path(__file__).parent
ROLES = {"actor_train", "critic", "pipeline"}
STATE_FILE = "worker_state_pipeline.json"
# What changes what is on disk; what only makes it durable, a SIGKILL does not see.
CHANGES = ("write", "rename", "replace", "mkdir", "unlink", "rmdir", "native_start", "native_wait", "native_finish")


class Trainers:
    """Lives of trainers, one after the other, each a child of one process that has everything imported."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", HERE / "roll_trainer.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._made = 0

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def live(self, root: Path, **job: Any) -> dict[str, Any]:
        """What a life that ended in order has seen; of one that was killed, nothing but its exit status."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._made += 1
        out = root.parent / f"life{self._made}"
        job = {"number": self._made, "root": str(root), "out": str(out), **job}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        number, status = map(int, self._server.stdout.readline().split())
        assert number == self._made
        if status != 0:
            return {"status": status, "out": out}
        return {"status": 0, "out": out, **json.loads((out / "report.json").read_text())}

    def train(self, root: Path, **job: Any) -> dict[str, Any]:
        """A life that must end in order."""
        report = self.live(root, **job)
        assert report["status"] == 0
        assert report["error"] is None, report["error"][2]
        return report


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    started = Trainers()
    yield started
    started.close()


@pytest.fixture(scope="module")
def reference(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Never interrupted."""
    return seen(trainers.train(tmp_path_factory.mktemp("reference") / "root"))


@pytest.fixture(scope="module")
def stopped(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that stopped after its first checkpoint, of step 2."""
    root = tmp_path_factory.mktemp("stopped") / "root"
    trainers.train(root, stop_after=2)
    return root


@pytest.fixture
def root(stopped: Path, tmp_path: Path) -> Path:
    """A copy of that."""
    return shutil.copytree(stopped, tmp_path / "root")


def seen(report: dict[str, Any]) -> dict[str, Any]:
    return {name: report[name] for name in ("digest", "step", "kv", "history")}


def complete(root: Path) -> list[int]:
    return [status.step for status in steps.complete_steps(root)]


@pytest.mark.shows("ROLL", "save", "resume")
def test_resumed_training_is_bit_identical(trainers: Trainers, reference: dict[str, Any], root: Path) -> None:
    """`true`, a path, and asynchronous saves; every fact of a checkpoint that the documents name."""
    report = trainers.train(root, resume=True)
    assert report["resumed"] == 2
    assert seen(report) == reference
    assert complete(root) == [2, 4]
    assert tracker.read_tracker(root) == 4
    for name in ("checkpoint-2", "checkpoint-4"):
        assert {path.name for path in (root / name).iterdir()} == ROLES
        assert (root / name / "pipeline" / STATE_FILE).exists()
        assert (root / name / "pipeline" / "rng_state_pipeline.pth").exists()
    assert verify(root, deep=True).is_sound
    branches = [branch_in(root / f"checkpoint-{step}" / "critic") for step in (2, 4)]
    assert [len(branch) for branch in branches] == [1, 1]
    assert branches[0][0][0] == branches[1][0][0]
    assert "loss/critic" in report["history"][4]

    by_path = trainers.train(root, resume=str(root / "checkpoint-2"))
    assert by_path["resumed"] == 2
    assert seen(by_path) == reference


def test_saves_are_at_every_save_steps_and_at_the_end(trainers: Trainers, tmp_path: Path) -> None:
    root = tmp_path / "root"
    report = trainers.train(root, config={"save_steps": 3, "max_steps": 6})
    assert complete(root) == [3, 5]
    assert report["step"] == 5
    # What ROLL writes locally first is not left behind.
    assert not list((report["out"] / "output").rglob("*.*"))


def test_nothing_is_resumed_unless_it_is_asked_for(trainers: Trainers, reference: dict[str, Any], root: Path) -> None:
    report = trainers.train(root, resume=False)
    assert report["resumed"] == -1
    assert seen(report) == reference


def test_true_with_an_empty_folder_is_the_beginning(trainers: Trainers, tmp_path: Path) -> None:
    report = trainers.train(tmp_path / "root", resume=True, stop_after=0)
    assert report["resumed"] == -1


def kill_points(events: list[str]) -> list[tuple[str, int]]:
    """The n-th of each kind of event that changes what is on disk."""
    points, counts = [], dict.fromkeys(CHANGES, 0)
    for event in events:
        name = event.removeprefix("save:")
        if name in counts:
            counts[name] += 1
            points.append((name, counts[name]))
    return points


def first_of_each_kind(points: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """And the last two of all, which are after the commit."""
    return [point for point in points if point[1] == 1 or point in points[-2:]]


# CI kills before the first change of each kind, and before the last two of all; the full tier at each point.
@pytest.mark.shows("ROLL", "parts")
@pytest.mark.parametrize(
    "sample", [pytest.param(list, marks=pytest.mark.full, id="all"), pytest.param(first_of_each_kind, id="each-kind")]
)
def test_killed_between_any_two_writes_it_comes_back(
    trainers: Trainers, stopped: Path, tmp_path: Path, sample: Callable[[Any], list[tuple[str, int]]]
) -> None:
    """At each point of a checkpoint's making: `true` finds one unit, bit for bit what the run was at that step."""
    life: dict[str, Any] = {"resume": True, "config": {"save_steps": 1, "max_steps": 4}}
    whole = trainers.train(tmp_path / "whole" / "root", config=life["config"])
    first = trainers.train(tmp_path / "first" / "root", config=life["config"], stop_after=2)
    wanted = {2: seen(first), 3: seen(whole)}
    dry = shutil.copytree(stopped, tmp_path / "dry" / "root")
    points = kill_points(trainers.train(dry, watched=3, **life)["events"])
    assert len(points) > 40
    after = set()
    for number, (at, count) in enumerate(sample(points)):
        root = shutil.copytree(stopped, tmp_path / f"{at}{count}" / "root")
        dead = trainers.live(root, watched=3, kill_at=at, kill_count=count, **life)
        assert dead["status"] == -signal.SIGKILL, (at, count)
        # The tracker is for other programs: it never names what is not there.
        assert tracker.read_tracker(root) in complete(root), (at, count)
        report = trainers.train(root, stop_after=-2, **life)
        assert seen(report) == wanted[report["resumed"]], (at, count)
        after.add(report["resumed"])
        if number % 8 == 0:
            assert seen(trainers.train(root, **life)) == wanted[3], (at, count)
            assert complete(root) == [2, 3], (at, count)
            left = [
                path
                for path in root.rglob(".*")
                if path.name != file_names.RUN_FILE and "trainer.json" not in path.name
            ]
            assert not left or report["resumed"] == 3, (at, count, left)
        shutil.rmtree(root.parent)
    assert after == {2, 3}


# CI kills when some files are written, and before the first role is committed.
@pytest.mark.shows("ROLL", "parts")
@pytest.mark.parametrize(
    "at",
    [
        pytest.param(("native_wait", 2), marks=pytest.mark.full),
        ("native_finish", 3),
        ("rename", 1),
        pytest.param(("write", 9), marks=pytest.mark.full),
    ],
)
def test_after_a_rollback_parts_of_two_runs_make_no_checkpoint(
    trainers: Trainers, reference: dict[str, Any], root: Path, at: tuple[str, int]
) -> None:
    """Step 4 is there, and saved again by a run that was started from step 2: killed in the middle of it."""
    trainers.train(root, resume=True)
    rollback = str(root / "checkpoint-2")
    dead = trainers.live(root, resume=rollback, watched=4, kill_at=at[0], kill_count=at[1])
    assert dead["status"] == -signal.SIGKILL
    assert complete(root) == [2]
    report = trainers.train(root, resume=True)
    assert report["resumed"] == 2
    assert seen(report) == reference


# CI kills before the first file is written, and before the second role is committed.
@pytest.mark.shows("ROLL", "async")
@pytest.mark.parametrize(
    "at",
    [
        ("native_start", 1),
        pytest.param(("write", 4), marks=pytest.mark.full),
        ("rename", 2),
        pytest.param(("native_finish", 4), marks=pytest.mark.full),
        pytest.param(("write", 14), marks=pytest.mark.full),
    ],
)
def test_killed_while_saves_go_on_beside_the_training(
    trainers: Trainers, reference: dict[str, Any], stopped: Path, tmp_path: Path, at: tuple[str, int]
) -> None:
    """With async_upload, ROLL's default: the roles commit in any order, and the step counts when all have."""
    root = shutil.copytree(stopped, tmp_path / "root")
    config = {"max_steps": 9}
    dead = trainers.live(
        root, resume=str(root / "checkpoint-2"), watched=4, kill_at=at[0], kill_count=at[1], config=config
    )
    assert dead["status"] == -signal.SIGKILL
    assert complete(root)[0] == 2
    assert tracker.read_tracker(root) in complete(root)
    report = trainers.train(root, resume=True)
    assert report["resumed"] in (2, 4)
    assert seen(report) == reference


def test_the_first_checkpoint_interrupted_is_the_beginning(trainers: Trainers, tmp_path: Path) -> None:
    root = tmp_path / "root"
    dead = trainers.live(root, resume=True, watched=2, kill_at="native_finish", kill_count=3)
    assert dead["status"] == -signal.SIGKILL
    assert (root / "checkpoint-2" / "actor_train" / "manifest.json").exists()
    report = trainers.train(root, resume=True)
    assert report["resumed"] == -1
    assert seen(report) == seen(trainers.train(tmp_path / "new", resume=True))
    assert complete(root) == [2, 4]


# -- what is not whole -------------------------------------------------------------------------------------


def error_of(report: dict[str, Any]) -> tuple[str, str]:
    assert report["status"] == 0
    assert report["error"] is not None
    return report["error"][0], report["error"][1]


def test_true_takes_the_newest_that_is_whole(trainers: Trainers, root: Path) -> None:
    trainers.train(root, resume=True)
    model = next((root / "checkpoint-4" / "critic").rglob("model_states.pt"))
    with model.open("r+b") as file:
        file.truncate(model.stat().st_size - 1)
    report = trainers.train(root, resume=True, stop_after=2)
    assert report["resumed"] == 2

    state = root / "checkpoint-2" / "pipeline" / STATE_FILE
    state.unlink()
    name, message = error_of(trainers.live(root, resume=True))
    # Never from the beginning in silence.
    assert name == "CheckpointCorruptError"
    assert "model_states.pt" in message
    assert STATE_FILE in message


def test_a_flipped_bit_is_found_before_or_when_it_is_loaded(trainers: Trainers, root: Path) -> None:
    trainers.train(root, resume=True)
    model = next((root / "checkpoint-4" / "critic").rglob("model_states.pt"))
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    model.write_bytes(data)
    name, message = error_of(trainers.live(root, resume=True))
    assert name == "CheckpointCorruptError"
    assert "model_states.pt" in message
    report = trainers.train(root, resume=True, options={"verify_on_resume": True}, stop_after=2)
    assert report["resumed"] == 2


def test_a_path_that_is_not_whole_is_refused_before_a_worker_starts(trainers: Trainers, root: Path) -> None:
    (root / "checkpoint-2" / "critic" / "manifest.json").unlink()
    report = trainers.live(root, resume=str(root / "checkpoint-2"))
    name, message = error_of(report)
    assert name == "CheckpointNotFoundError"
    assert "critic" in message
    assert not report["built"]


@pytest.mark.shows("ROLL", "moving over")
def test_a_checkpoint_of_rolls_own_is_left_to_roll(trainers: Trainers, root: Path, tmp_path: Path) -> None:
    """A run is switched over by its next start; from then on its checkpoints are ours."""
    theirs = tmp_path / "before" / "checkpoint-300"
    (theirs / "iter_0000001" / "dist_optimizer").mkdir(parents=True)
    shutil.copytree(root / "checkpoint-2" / "pipeline", theirs / "pipeline")
    (theirs / "pipeline" / "manifest.json").unlink()
    report = trainers.train(tmp_path / "new", resume=str(theirs))
    assert report["loaded_by_roll"] == [str(theirs), str(theirs / "critic")]
    assert report["resumed"] == 2
    assert complete(tmp_path / "new") == [4]


# -- errors, retention, workers ----------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_upload_that_fails_is_raised(trainers: Trainers, root: Path, asynchronous: bool) -> None:
    options = {"async_upload": asynchronous}
    resume = str(root / "checkpoint-2")
    name, message = error_of(trainers.live(root, resume=resume, disk_full_at=4, options=options))
    assert name == "CommitError"
    assert "No space left" in message
    assert complete(root) == [2]


def test_an_upload_that_rolls_own_pipeline_forgets_is_told_at_the_next_save(trainers: Trainers, root: Path) -> None:
    more = {"pipeline": "rolls", "config": {"max_steps": 7}, "options": {"async_upload": False}}
    resume = str(root / "checkpoint-2")
    report = trainers.live(root, resume=resume, disk_full_at=4, **more)
    name, message = error_of(report)
    assert name == "CommitError"
    assert "checkpoint-4" in message
    assert "No space left" in report["swallowed"][0]
    assert complete(root) == [2]
    # By our option's own word it may go on without a checkpoint.
    more["options"] = {"async_upload": False, "if_failed": "warn"}
    trainers.train(root, resume=resume, disk_full_at=4, **more)
    assert complete(root) == [2, 6]


def test_rolls_own_pipeline_resumes_too(trainers: Trainers, reference: dict[str, Any], root: Path) -> None:
    report = trainers.train(root, resume=True, pipeline="rolls")
    assert report["resumed"] == 2
    assert seen(report) == reference
    assert complete(root) == [2, 4]


@pytest.mark.shows("ROLL", "retention")
@pytest.mark.parametrize("pipeline", ["ours", "rolls"])
def test_max_ckpt_to_keep_counts_checkpoints(trainers: Trainers, root: Path, pipeline: str) -> None:
    """ROLL's clean-up looks at what its workers wrote locally, which is gone by then."""
    config = {"max_ckpt_to_keep": 2, "save_steps": 1, "max_steps": 7}
    trainers.train(root, resume=True, pipeline=pipeline, config=config)
    # A worker cannot know of the step that the driver completes after it.
    assert complete(root) == ([5, 6] if pipeline == "ours" else [4, 5, 6])
    trainers.train(root, resume=True, config={**config, "max_steps": 9}, options={"keep_every": 7})
    assert complete(root) == [7, 8]


def test_a_worker_that_loads_nothing_is_loaded(trainers: Trainers, tmp_path: Path) -> None:
    """ROLL's SFT pipeline goes on from the step, and its worker from the first weights."""
    root, roles = tmp_path / "root", ("sft_train",)
    whole = trainers.train(tmp_path / "whole", roles=roles)
    trainers.train(root, roles=roles, stop_after=2)
    report = trainers.train(root, roles=roles, resume=True)
    assert report["resumed"] == 2
    assert seen(report) == seen(whole)


@pytest.mark.parametrize("scale", [pytest.param(1, marks=pytest.mark.full), 50])
def test_the_documents_examples(trainers: Trainers, tmp_path: Path, scale: int) -> None:
    """As printed, but for the type, which says whose checkpoints they are, and for folders outside of the test.

    In CI all numbers of steps are divided by 50.
    """
    values = yaml.safe_load(relocated(ROLL_COMPLETE, tmp_path))
    # ROLL writes there before it uploads; the trainer has folders of its own for that.
    for scratch in ("output_dir", "logging_dir"):
        assert values.pop(scratch).startswith("./output")
    for small in (ROLL_SAVE_STEPS, ROLL_NO_RESUME, ROLL_CHECKPOINTS):
        assert yaml.safe_load(relocated(small, tmp_path)).items() <= values.items()
    checkpoints, resume = values.pop("checkpoint_config"), values.pop("resume_from_checkpoint")
    assert checkpoints.pop("type") == "file_system"
    # ROLL's configuration resolves it, as Hydra does.
    root = Path(checkpoints.pop("output_dir").replace("${exp_name}", values["exp_name"]))
    assert not checkpoints

    for steps_of in ("max_steps", "save_steps"):
        values[steps_of] //= scale
    last = values["max_steps"] - 1

    def train(root: Path, resume: bool | str, **more: Any) -> dict[str, Any]:
        return trainers.train(root, resume=resume, roles=["actor_train"], config=values, **more)

    def path_in(example: str) -> str:
        path: str = yaml.safe_load(relocated(example, tmp_path))["resume_from_checkpoint"]
        start, _, step = path.rpartition("-")
        return f"{start}-{int(step) // scale}"

    assert train(root, resume, stop_after=300 // scale)["resumed"] == -1
    assert complete(root) == [step // scale for step in (100, 200, 300)]
    assert train(root, path_in(ROLL_RESUME_COMPLETE))["resumed"] == 300 // scale
    assert complete(root) == [*(step // scale for step in (100, 200, 300, 400)), last]
    assert verify(root).is_sound

    # Another run, which is long enough for the other example.
    values |= {"max_steps": last + 3, "exp_name": "exp_name"}
    train(root.parent / "exp_name", str(root / f"checkpoint-{last}"), stop_after=last + 1)
    assert train(root.parent / "exp_name", path_in(ROLL_RESUME))["resumed"] == 500 // scale
