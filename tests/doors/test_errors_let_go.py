"""An error that was raised keeps nothing of its callers alive, such as the tensors of a training on a full GPU."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from test_runs import Training

from mcore_ckpt.errors import CheckpointError


class Held:
    """What a caller has."""


def fails(call: Callable[[], object]) -> "weakref.ref[Held]":
    held = Held()
    with pytest.raises(CheckpointError):
        call()
    return weakref.ref(held)


@pytest.mark.parametrize("name", ["load", "save", "async save"])
def test_a_manager_forgets_what_has_failed(name: str, tmp_path: Path) -> None:
    training = Training(tmp_path / "run", async_save=name == "async save").save(1)
    (tmp_path / "run" / "global_steps_2").write_text("a file where a folder has to be")
    calls = {
        "load": lambda: training.manager.load(step=9),
        "save": lambda: training.manager.save(2),
        "async save": lambda: training.manager.save(2).wait(),
    }
    held = fails(calls[name])
    gc.collect()
    assert held() is None
    training.close()
