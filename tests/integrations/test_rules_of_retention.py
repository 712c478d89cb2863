"""The rules of retention in frameworks: theirs count, and ours where they have none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mcore_ckpt import CheckpointConfig
from mcore_ckpt.integrations.slime.replacing import ActorCheckpoints
from mcore_ckpt.integrations.verl.options import read_options, settings_of

RULES = {"keep_every": 5, "keep_best": ["reward:1:max"], "keep_for": 60.0}


@pytest.mark.parametrize("has_positions", [True, False])
def test_slime_goes_back_one_step_with_its_optimizer(has_positions: bool) -> None:
    """If the newest step has no data position yet, the one before it is loaded."""
    ours = {"max_to_keep": 1, "optimizer_for_last": 1}
    args = SimpleNamespace(mcore_ckpt=ours, rollout_global_dataset=has_positions, save_retain_interval=None)
    checkpoints = ActorCheckpoints.__new__(ActorCheckpoints)
    checkpoints._args = args
    config = checkpoints._read_config()
    least = 2 if has_positions else 1
    assert (config.max_to_keep, config.optimizer_for_last) == (least, least)


@pytest.mark.parametrize("max_to_keep", [None, 3])
def test_verl_needs_no_rule_if_all_steps_stay(max_to_keep: int | None) -> None:
    config = settings_of(read_options({**RULES, "optimizer_for_last": 2}), max_to_keep)
    assert config.optimizer_for_last == 2
    if max_to_keep is None:
        assert (config.keep_every, config.keep_best, config.keep_for) == (None, (), None)
    else:
        assert config == CheckpointConfig(max_to_keep=3, optimizer_for_last=2, **RULES)
