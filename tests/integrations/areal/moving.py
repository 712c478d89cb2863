"""A run that AReaL itself has saved goes on here. Run by tests/integrations/test_areal.py."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from areal.utils.recover import RecoverHandler as StockHandler

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.integrations.areal.recover_info import Place
from mcore_ckpt.integrations.areal.stock_files import read_stock
from mcore_ckpt.steps import listing as steps
from tests.distributed.snapshot import assert_same
from tests.integrations.areal.children import in_child
from tests.integrations.areal.recovering import error_of, trainer_of, units_of
from tests.integrations.areal.simulated import STEPS_PER_EPOCH


def write_stock_info(folder: Path) -> None:
    """With AReaL's own code, for step 2."""
    from areal.api import StepInfo
    from areal.utils.recover import RecoverInfo
    from areal.utils.timeutil import EpochStepTimeFreqCtl

    control = EpochStepTimeFreqCtl(None, 2, None)
    for _ in range(3):
        control.check(0, 1)
    info = RecoverInfo(
        last_step_info=StepInfo(0, 2, 2, STEPS_PER_EPOCH),
        saver_info=control.state_dict(),
        evaluator_info=control.state_dict(),
        stats_logger_info={"last_commit_step": 1},
        dataloader_info={"position": 3, "shuffle": [2, 0, 1], "epoch": {"done": 0.75}},
        checkpoint_info=control.state_dict(),
    )
    info.dump(str(folder))


class PlainData:
    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"position": 9}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.shows("AReaL", "moving over")
def test_a_run_of_stock_areal_goes_on(tmp_path: Path) -> None:
    def work() -> None:
        old = trainer_of(tmp_path / "old", roles=("default",), mode="off")
        old.train(3)
        wanted = old.state()
        root = Path(StockHandler.recover_info_path("exp", "trial", str(tmp_path / "run")))
        write_stock_info(root)
        # What AReaL's own checkpointer writes is loaded in several_ranks.py: it takes processes with gloo.
        path = root.parent / "default" / "recover_checkpoint"
        old.actor.checkpointer.save_checkpoint(path)
        old.actor.checkpointer.close()
        new = trainer_of(tmp_path / "run", seed=7, roles=("default",), mode="off", freq_steps=2)
        new.recover_handler.config.mode = "on"
        data = PlainData()
        parts = (new.actor, new.saver, new.evaluator, new.stats_logger, data)
        info = new.recover_handler.load(*parts)
        assert info.last_step_info.global_step == 2
        assert data.state == {"position": 3, "shuffle": [2, 0, 1], "epoch": {"done": 0.75}}
        found = new.state()
        assert_same(
            *({name: state[name] for name in wanted if not name.startswith("data.")} for state in (found, wanted))
        )
        # One step had been counted of two.
        new.recover_handler.dump(new.engines, info.last_step_info.next(), *parts[1:])
        assert [status.step for status in steps.complete_steps(root)] == [3]
        assert not (root / "dataloader_info.pkl").exists()
        assert (root / "of_areal" / "dataloader_info.pkl").exists()
        assert json.loads((root / "step_info.json").read_bytes())["global_step"] == 3

    in_child(work)


def test_the_positions_of_stock_areal_are_for_the_ranks_that_saved(tmp_path: Path) -> None:
    """AReaL itself refuses another number of ranks."""
    write_stock_info(tmp_path)
    states = [{"position": rank} for rank in range(2)]
    (tmp_path / "dataloader_info.pkl").write_bytes(pickle.dumps(states))
    assert read_stock(tmp_path, Place(1, 2, 1, 2)).dataloader == states[1]
    for place in (Place(0, 1, 0, 1), Place(2, 4, 2, 4)):
        with pytest.raises(CheckpointMismatchError, match=r"info\.pkl: .*saved by other data-parallel ranks"):
            read_stock(tmp_path, place)
        assert read_stock(tmp_path, place, begins_anew=True).dataloader is None


def test_a_hostile_pickle_is_not_run(tmp_path: Path) -> None:
    target = tmp_path / "was_run"

    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(target),))

    root = tmp_path / "run"
    in_child(lambda: write_stock_info(_stock_root(root)))
    (units_of(root) / "dataloader_info.pkl").write_bytes(pickle.dumps({"position": 3, "more": Touch()}))
    message = str(error_of(root, roles=("default",)))
    assert "dataloader_info.pkl" in message
    assert "No code in the file was executed" in message
    assert not target.exists()


@pytest.mark.parametrize("name", ["step_info.json", "evaluator_info.json", "dataloader_info.pkl"])
def test_a_bad_recover_info_of_stock_areal_is_an_error(tmp_path: Path, name: str) -> None:
    """Half of one, too, which AReaL leaves when it is killed while it writes."""

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:10])

    for damage in (cut, Path.unlink):
        root = tmp_path / damage.__name__
        in_child(lambda root=root: write_stock_info(_stock_root(root)))
        damage(units_of(root) / name)
        assert name in str(error_of(root, roles=("default",)))


def _stock_root(root: Path) -> Path:
    return Path(StockHandler.recover_info_path("exp", "trial", str(root)))
