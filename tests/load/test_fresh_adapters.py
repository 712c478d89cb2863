"""A base model loaded into a model with adapters: the adapters keep their values, and nothing of the base is lost."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_ckpt.checkpoint.manifest import AdapterSettings
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.load.fresh_adapters import choice_of
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.state.trainer import Trainer
from tests.support.stored_tensors import lone_trainer

BASE = "decoder.layers.0.mlp.linear_fc1.weight"
BRIDGES = "decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight"
PEFTS = "decoder.layers.0.mlp.linear_fc1.lora_A.default.weight"


def trainer(rank: int = 0, has_adapters: bool = False, **config: Any) -> Trainer:
    made = lone_trainer(torch.nn.Module(), None, **config)
    adapters = AdapterSettings(16.0) if has_adapters else None
    return replace(made, adapters=adapters, agreement=Agreement(None, rank, 2, "test", 1.0))


def taken(of: Trainer, live: list[str], stored: list[str]) -> dict[tuple[str, bool], bool]:
    """Whether each tensor is loaded, by name and whether it is frozen."""
    choice = choice_of(of, "here", live, stored)
    return {(name, frozen): choice(name, frozen) for name in (BASE, BRIDGES, PEFTS) for frozen in (False, True)}


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("live", "stored"),
    [([BASE], [BASE]), ([BASE, BRIDGES], [BASE, BRIDGES]), ([BASE, PEFTS], [BASE, BRIDGES]), ([BASE], [BASE, PEFTS])],
)
def test_frozen_tensors_are_left_out_as_asked_for(
    live: list[str], stored: list[str], skip: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """If there are no adapters, or the checkpoint has them, too."""
    found = taken(trainer(skip_frozen=skip), live, stored)
    assert found == {(name, frozen): not (skip and frozen) for name, frozen in found}
    assert not caplog.records


@pytest.mark.parametrize(("live", "has_adapters"), [([BASE, BRIDGES], False), ([BASE, PEFTS], False), ([BASE], True)])
@pytest.mark.parametrize("rank", [0, 1])
def test_adapters_that_the_checkpoint_lacks_keep_their_values(
    live: list[str], has_adapters: bool, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The base is loaded even if frozen tensors are skipped. A rank without adapters decides as the others do."""
    of = trainer(rank, has_adapters, load_contents=("model",), skip_frozen=True)
    with caplog.at_level(logging.WARNING):
        found = taken(of, live, [BASE])
    assert found == {(name, frozen): name == BASE for name, frozen in found}
    texts = [record.getMessage() for record in caplog.records]
    wanted = "here: has no adapters: the base model is loaded, and the model's adapters keep their values"
    assert texts == ([wanted] if rank == 0 else [])


def test_the_optimizers_state_would_be_that_of_the_base() -> None:
    words = "^here: has no adapters, and no optimizer state for the model's adapters: leave 'optimizer' out of "
    with pytest.raises(CheckpointMismatchError, match=words):
        taken(trainer(), [BASE, BRIDGES], [BASE])


@pytest.mark.parametrize("contents", [("optimizer",), ("extra",)])
def test_a_load_without_the_model_asks_nothing(contents: tuple[str, ...]) -> None:
    found = taken(trainer(load_contents=contents), [BASE, BRIDGES], [BASE])
    assert all(found.values())
