"""NeMo-RL's driver decides which steps stay, so our rules are refused by name in its workers."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_ckpt import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.integrations.nemo_rl.functions import BridgeFunctions

RULES: dict[str, Any] = {
    "max_to_keep": 3,  # without which a configuration has no keep_every, keep_best and keep_for
    "optimizer_for_last": 2,
    "remote": "s3://bucket/run",
    "roles": ("policy", "value"),
    "if_failed": "warn",
}


@pytest.mark.parametrize("rule", RULES)
def test_our_rules_are_refused_by_name(rule: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{rule} is .*NeMo-RL"):
        BridgeFunctions(CheckpointConfig(**{rule: RULES[rule]}), stock_load=lambda *args, **more: (0, 0.0))
