"""The alpha of an adapter in PEFT's form."""

from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.errors import CheckpointCorruptError, UnsupportedError
from mcore_ckpt.formats.huggingface.adapter_reader import effective_alpha

FOLDER = Path("adapter")


@pytest.mark.parametrize(
    ("more", "alpha"),
    [
        ({}, 32),
        ({"use_rslora": False, "rank_pattern": {"down_proj": 8}}, 32),
        ({"use_rslora": True}, 128),  # PEFT scales by alpha / sqrt(r) instead of alpha / r
        ({"use_rslora": True, "rank_pattern": {}}, 128),
    ],
)
def test_only_rslora_changes_the_alpha(more: dict[str, Any], alpha: float) -> None:
    assert effective_alpha({"lora_alpha": 32, "r": 16, **more}, FOLDER) == alpha


def test_rslora_with_several_ranks_is_refused() -> None:
    adapter = {"lora_alpha": 32, "r": 16, "use_rslora": True, "rank_pattern": {"down_proj": 8}}
    with pytest.raises(UnsupportedError, match=r"adapter_config\.json: has use_rslora and a rank_pattern"):
        effective_alpha(adapter, FOLDER)


@pytest.mark.parametrize("lacking", ["lora_alpha", "r"])
def test_a_config_without_alpha_or_rank_is_damaged(lacking: str) -> None:
    adapter = {name: value for name, value in {"lora_alpha": 32, "r": 16}.items() if name != lacking}
    with pytest.raises(CheckpointCorruptError, match=f"'{lacking}'"):
        effective_alpha(adapter, FOLDER)
