"""A checkpoint whose model computes something else with the same tensors: told, or refused."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.load.same_model import differences_to_live, warn_of_other_model
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.state.trainer import Trainer
from tests.support.stored_tensors import lone_trainer

SAVED = {"num_attention_heads": 4, "position_embedding_type": "rope", "rotary_base": 10000}


def trainer(live: dict[str, Any], rank: int = 0, **config: Any) -> Trainer:
    made = lone_trainer(torch.nn.Module(), None, **config)
    return replace(made, model=live, agreement=Agreement(None, rank, 2, "test", 1.0))


def names(saved: dict[str, Any] | None, of: Trainer) -> list[str]:
    return [each.name for each in differences_to_live(of, saved)]


def test_the_same_model() -> None:
    assert names(SAVED, trainer(dict(SAVED), strict_model=True)) == []


@pytest.mark.parametrize(
    ("saved", "contents", "wanted"),
    [
        (SAVED, ("model",), ["num_attention_heads"]),
        (SAVED, ("optimizer",), ["num_attention_heads"]),
        (SAVED, ("model", "extra"), ["num_attention_heads"]),
        (SAVED, ("extra",), []),  # no tensor is loaded
        (None, ("model",), []),  # an older checkpoint does not say it
        ({}, ("model",), []),
    ],
)
def test_another_model(saved: dict[str, Any] | None, contents: tuple[str, ...], wanted: list[str]) -> None:
    live = SAVED | {"num_attention_heads": 2}
    assert names(saved, trainer(live, load_contents=contents)) == wanted
    if not wanted:
        assert names(saved, trainer(live, load_contents=contents, strict_model=True)) == []
        return
    words = "^the checkpoint's model computes something else with the same tensors: num_attention_heads is 4 in the "
    with pytest.raises(CheckpointMismatchError, match=words):
        names(saved, trainer(live, load_contents=contents, strict_model=True))


def test_another_head_is_shown_by_the_tensors() -> None:
    """A critic has a head of its own: nothing is hidden."""
    saved = SAVED | {"share_embeddings_and_output_weights": True}
    live = SAVED | {"share_embeddings_and_output_weights": False}
    assert names(saved, trainer(live, strict_model=True)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ()),
        ({"num_attention_heads": 2}, ("num_attention_heads is 4 in the checkpoint and 2 here. If that is not meant",)),
        (
            {"rotary_base": 500000},
            ("rotary_base is 10000 in the checkpoint and 500000 here. This is right if",),
        ),
        ({"num_attention_heads": 2, "rotary_base": 500000}, ("If that is not meant", "built for a longer context")),
    ],
)
def test_what_differs_is_logged_by_rank_0(
    change: dict[str, Any], words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    live = SAVED | change
    with caplog.at_level(logging.WARNING):
        for rank in (0, 1):
            of = trainer(live, rank)
            warn_of_other_model(of, "here/actor", differences_to_live(of, SAVED))
    assert len(caplog.records) == len(words)
    for record, text in zip(caplog.records, words, strict=True):
        assert record.getMessage().startswith("here/actor: ")
        assert text in record.getMessage()
