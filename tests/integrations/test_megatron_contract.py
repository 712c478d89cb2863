"""What Megatron-LM's sources say, as it was recorded (facts/megatron.json), is what ours goes by."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from source_facts import FACTS, signature_in, signature_of

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.integrations import megatron as drop_in
from mcore_ckpt.integrations.kit import arguments, loop

REPOSITORY = Path(__file__).parents[2]

WITHOUT_MEGATRON = """
import sys
sys.modules["megatron"] = None
import mcore_ckpt.integrations.megatron
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return json.loads((FACTS / "megatron.json").read_text())


@pytest.mark.parametrize("name", ["save_checkpoint", "load_checkpoint", "maybe_finalize_async_save"])
def test_signatures_are_megatrons(facts: dict[str, Any], name: str) -> None:
    (recorded,) = [text for path, text in facts["signatures"].items() if path.endswith(f":{name}")]
    assert signature_of(getattr(drop_in, name)) == recorded


def test_arguments_are_called_as_megatron_calls_them(facts: dict[str, Any]) -> None:
    assert sorted(arguments._DEFAULTS) == sorted(facts["arguments"])
    assert facts["checkpoint_version"] == loop.CHECKPOINT_VERSION


def test_files_are_called_as_megatron_calls_them(facts: dict[str, Any]) -> None:
    assert file_names.megatron_dir(Path("root"), 42).name == facts["folder"].format(42)
    assert facts["tracker"] == file_names.TRACKER_FILE


@pytest.mark.skipif("MEGATRON_SOURCE" not in os.environ, reason="a checkout of Megatron-LM, for a person who has one")
def test_the_record_is_what_the_sources_say(facts: dict[str, Any]) -> None:
    for name, recorded in facts["signatures"].items():
        path, function = name.split(":")
        assert signature_in(Path(os.environ["MEGATRON_SOURCE"], path).read_text(), function) == recorded


def test_without_megatron_core_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEGATRON], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode != 0
    assert "needs megatron-core: pip install megatron-core" in done.stderr
