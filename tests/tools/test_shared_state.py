"""What a conversion for another trainer reads of the state that all ranks share."""

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.tools.convert.for_trainers.shared_state import SharedState, read_shared_state


def shared_state(kind: str, **fields: object) -> SharedState:
    """The state of one optimizer whose param group has these fields."""
    saved = {"kind": kind, "step": 3, "grad_scaler": None, "param_groups": [{"lr": 0.1, **fields}]}
    common = {"optimizers": [saved], "lr_scheduler": None}
    manifest = SimpleNamespace(contents=("model", "optimizer"), topology=Topology(), tensors={})
    reader: Any = SimpleNamespace(place="here", manifest=manifest, plain=lambda path: common)
    return read_shared_state(reader)


@pytest.mark.parametrize(
    ("kind", "fields", "was_offloaded"),
    [
        ("Adam", {"foreach": None}, False),
        ("Adam", {"bias_correction": True}, False),
        ("Adam", {}, True),  # a HybridDeviceOptimizer's groups have neither field
        ("Lion", {}, False),
    ],
)
def test_an_adam_that_was_offloaded_is_noticed(kind: str, fields: dict[str, object], was_offloaded: bool) -> None:
    assert shared_state(kind, **fields).was_offloaded is was_offloaded
