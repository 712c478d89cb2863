"""SIGKILL of one rank of a real training in the middle of a save; the next start goes on as if it had not been."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import tracker
from tests.support.forks import Start, forked, separate

WORKER = Path(__file__).parent / "train_and_save.py"
WORLD = 2
FIRST, SECOND = 2, 4

IMPORTS = ("megatron.core.optimizer", "megatron.core.models.gpt.gpt_model", "mcore_ckpt.manager")


def told(results: Path, name: str) -> dict[int, Any]:
    """What each rank has written under a name."""
    paths = {rank: results / f"{name}.{rank}.json" for rank in range(WORLD)}
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


def names_below(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*")}


# Of rank 0 all files and the manifest are there, and only the rename is not; rank 1 has not written all of its part of
# the model's file, and rank 0 waits for it. torchrun itself, which tells a survivor to end, is in the full tier.
# In CI, test_kill_save.py kills saves, and tests/faults/kills and the demo kill trainings.
@pytest.mark.full
@pytest.mark.parametrize("start", [forked, pytest.param(separate, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("victim", "event", "count", "how"),
    [
        pytest.param(0, "rename", 1, "sync", id="rank0"),
        pytest.param(1, "native_wait", 1, "async", id="rank1-async"),
    ],
)
def test_a_rank_is_killed_while_saving(
    tmp_path: Path, victim: int, event: str, count: int, how: str, start: Start
) -> None:
    root, results = tmp_path / "root", tmp_path / "results"
    results.mkdir()
    killed = start([WORKER, "first", root, results, victim, event, count, how], WORLD, imports=IMPORTS)
    output = killed.stdout + killed.stderr
    assert killed.returncode == -signal.SIGKILL if start is forked else "Signal 9 (SIGKILL)" in output, output
    survivor = told(results, "survivor")
    assert survivor.keys() == {1 - victim}, output
    assert survivor[1 - victim][0] == "CommitError"
    assert [step.step for step in steps.complete_steps(root)] == [FIRST]
    assert tracker.read_tracker(root) == FIRST

    resumed = start([WORKER, "resume", root, results], WORLD, imports=IMPORTS)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert told(results, "loaded") == {rank: {"step": FIRST, "extra_state": {"rank": rank}} for rank in range(WORLD)}
    reference = told(results, "reference")
    assert len(reference) == WORLD
    # Step for step: losses, gradient norm, learning rate.
    assert told(results, "resumed") == reference
    assert [step.step for step in steps.complete_steps(root)] == [FIRST, SECOND]
    assert tracker.read_tracker(root) == SECOND
    assert not [name for name in names_below(root) if file_names.parse_work_dir(name) or name == file_names.OWNER_FILE]
