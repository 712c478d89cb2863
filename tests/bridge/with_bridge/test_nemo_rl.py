"""NeMo-RL's worker with our checkpoints: Megatron-Bridge is real, NeMo-RL is stood in for (nemo_run.py)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bridge.nemo_run import STEPS, NemoRun
from tests.distributed.snapshot import assert_same
from tests.support.commits import branch_in
from tests.support.document_examples import run_in_shell
from tests.support.walk import block, section

OFFLOADED = {"optimizer.optimizer_cpu_offload": True, "optimizer.optimizer_offload_fraction": 0.5}


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., NemoRun]:
    """A run with these options that was never stopped, with Bridge's own functions."""
    runs: dict[str, NemoRun] = {}

    def run(**options: Any) -> NemoRun:
        if str(options) not in runs:
            folder = tmp_path_factory.mktemp("through")
            runs[str(options)] = NemoRun(2, folder / "run", folder / "root", ours=False, **options).check()
        return runs[str(options)]

    return run


def check_same(run: NemoRun, wanted: NemoRun, since: int) -> None:
    assert run.losses == {step: loss for step, loss in wanted.losses.items() if step > since}
    for found, state in zip(run.states, wanted.states, strict=True):
        names = [name for name in state if not name.startswith("generator.")]  # NeMo-RL loads none
        assert_same({name: found[name] for name in names}, {name: state[name] for name in names})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


@pytest.mark.shows("NeMo-RL", "save", "resume", "async", "retention")
def test_a_killed_run_goes_on(tmp_path: Path, through: Callable[..., NemoRun]) -> None:
    """The step that was being saved is not finalized, so the one before is resumed. Retention is the driver's."""
    run = NemoRun(2, tmp_path / "first", tmp_path / "root", async_save=True, killed_after=3, keep=2)
    assert -9 in run.start(), run.log
    assert names(run.root) == ["step_1", "step_2", "tmp_step_3"]
    again = run.again("second").check()
    check_same(again, through(), since=2)
    assert names(run.root) == ["step_4", "step_5"]
    policy = run.root / "step_5" / "policy"
    assert names(policy) == ["optimizer", "weights"]
    assert names(policy / "weights") == ["latest_checkpointed_iteration.txt", "policy"]
    assert branch_in(policy / "weights" / "policy") == ((1, 5),)


@pytest.mark.shows("NeMo-RL", "moving over", "other layout")
@pytest.mark.full
def test_a_run_moves_over_and_changes_its_layout(tmp_path: Path, through: Callable[..., NemoRun]) -> None:
    """Bridge's own `step_2` is loaded by Bridge's function, the next is ours, and loads with tensor parallelism."""
    old = NemoRun(2, tmp_path / "old", tmp_path / "root", ours=False, killed_after=3)
    assert -9 in old.start(), old.log
    moved = old.again("moved", ours=True, killed_after=4)
    assert -9 in moved.start(), moved.log
    wanted = through().losses
    assert moved.losses == {3: wanted[3], 4: wanted[4]}
    tensor_parallel = {"model.tensor_model_parallel_size": 2}
    other = moved.again("other", options=tensor_parallel).check()
    assert list(other.losses) == [4, 5]  # step 4 was not finalized


@pytest.mark.full
@pytest.mark.shows("NeMo-RL", "going back")
def test_a_run_goes_back_as_the_documents_say(tmp_path: Path, through: Callable[..., NemoRun]) -> None:
    run = NemoRun(2, tmp_path / "first", tmp_path / "CHECKPOINTS", killed_after=4)
    assert -9 in run.start(), run.log
    (tmp_path / "BACK").mkdir()
    commands = block(section("integrations.md", "NeMo-RL"), "bash", "mcore-ckpt convert").replace("step_100", "step_3")
    done = run_in_shell(f"set -e\n{commands}", tmp_path, {})
    assert done.returncode == 0, done.stderr
    back = run.again("back", root=tmp_path / "BACK", ours=False).check()
    check_same(back, through(), since=3)
    assert names(tmp_path / "BACK" / "step_5" / "policy" / "weights")[0] == "iter_0000000"


@pytest.mark.full
@pytest.mark.shows("NeMo-RL", "offload", "precision-aware")
@pytest.mark.parametrize("precision_aware", [False, True])
def test_offloaded_optimizers_go_on(precision_aware: bool, tmp_path: Path, through: Callable[..., NemoRun]) -> None:
    options = {**OFFLOADED, "optimizer.use_precision_aware_optimizer": precision_aware}
    run = NemoRun(2, tmp_path / "first", tmp_path / "root", options, killed_after=3)
    assert -9 in run.start(), run.log
    check_same(run.again("second").check(), through(options=options), since=2)


def test_without_the_optimizer_only_weights_are_saved(tmp_path: Path) -> None:
    run = NemoRun(1, tmp_path / "first", tmp_path / "root", killed_after=STEPS - 1, save_optimizer=False)
    assert -9 in run.start(), run.log
    again = run.again("second").check()
    assert list(again.losses) == [STEPS - 1, STEPS]
    weights = run.root / f"step_{STEPS}" / "policy"
    assert names(weights) == ["weights"]
    assert not (weights / "weights" / "policy" / "optim").exists()
