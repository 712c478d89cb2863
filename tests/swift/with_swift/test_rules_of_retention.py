"""ms-swift's words for what stays on disk are the ones that count; ours for the same are refused by name."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from swift.megatron import MegatronArguments

from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.integrations.swift.options import read_config


def test_the_words_are_ms_swifts() -> None:
    names = {field.name for field in fields(MegatronArguments)}
    assert {"save_total_limit", "metric_for_best_model", "greater_is_better"} <= names


@pytest.mark.parametrize(
    ("word", "value"),
    [("max_to_keep", 3), ("keep_every", 100), ("keep_best", ["reward:1:max"]), ("keep_for", 60.0)],
)
def test_ours_are_refused_by_name(word: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"--mcore_ckpt has '{word}', which the framework decides"):
        read_config(SimpleNamespace(mcore_ckpt={word: value}))


def test_a_rule_that_ms_swift_lacks_is_taken() -> None:
    assert read_config(SimpleNamespace(mcore_ckpt={"optimizer_for_last": 2})).optimizer_for_last == 2
