"""What a load under another layout says."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.load.report import _warn_of_new_layout
from mcore_ckpt.ranks.topology import Topology

ONE = Topology(world_size=4, tp=2, dp=2)


@pytest.mark.parametrize(
    ("now", "wanted"),
    [
        (Topology(world_size=8, tp=2, dp=4), "at its place; dp rank 2 takes that of dp rank 0, and so on"),
        (Topology(world_size=6, tp=2, dp=3), "at its place; dp rank 2 takes that of dp rank 0"),
        (Topology(world_size=2, tp=2, dp=1), "at its place; no rank takes that of dp rank 1"),
        (Topology(world_size=4, tp=4), "tp rank 2 takes that of tp rank 0, and so on; no rank takes that of dp rank 1"),
        (ONE, None),
    ],
)
def test_the_warning_names_dropout_and_whose_extra_state_a_rank_gets(
    now: Topology, wanted: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    trainer: Any = SimpleNamespace(
        topology=now,
        config=SimpleNamespace(load_contents=("model", "extra")),
        agreement=SimpleNamespace(is_coordinator=True),
    )
    plan: Any = SimpleNamespace(manifest=SimpleNamespace(topology=ONE), seed=None, folder="here")
    with caplog.at_level(logging.WARNING):
        _warn_of_new_layout(trainer, plan)
    if wanted is None:
        assert caplog.text == ""
    else:
        assert "loaded on" in caplog.text
        assert ": dropout and other random choices differ" in caplog.text
        assert caplog.text.endswith(wanted + "\n")
