"""What Megatron-LM's sources say, as it was recorded (facts/megatron.json), is what ours goes by."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.integrations import megatron as drop_in
from mcore_ckpt.integrations.kit import arguments, loop
from tests.integrations import rollout_bank
from tests.integrations.source_facts import Facts, signature_in, signature_of

REPOSITORY = Path(__file__).parents[2]

WITHOUT_MEGATRON = """
import sys
sys.modules["megatron"] = None
import mcore_ckpt.integrations.megatron
"""


@pytest.fixture(scope="module")
def facts() -> Facts:
    return Facts.of("megatron")


@pytest.mark.parametrize("name", ["save_checkpoint", "load_checkpoint", "maybe_finalize_async_save"])
def test_signatures_are_megatrons(facts: Facts, name: str) -> None:
    (recorded,) = [path for path in facts.functions if path.endswith(f":{name}")]
    assert signature_of(getattr(drop_in, name)) == facts.signature(recorded)


def test_words_and_files_are_megatrons(facts: Facts) -> None:
    texts = [text for each in facts.texts.values() for text in each]
    assert [name for name in arguments._DEFAULTS if not re.search(rf"args(\.|, '){name}\b", "\n".join(texts))] == []
    assert f"'{file_names.megatron_dir(Path(), 42).name.replace('0000042', '{:07d}')}'" in texts
    assert f"'{file_names.TRACKER_FILE}'" in texts
    assert f"state_dict['checkpoint_version'] = {loop.CHECKPOINT_VERSION}" in texts


def test_without_megatron_core_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEGATRON], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode != 0
    assert "needs megatron-core: pip install megatron-core" in done.stderr


def test_the_stand_in_of_the_rollout_bank_is_called_as_the_bank_is(facts: Facts) -> None:
    names = [name for name in facts.functions if "RolloutBank." in name]
    assert names
    for name in names:
        method = name.rpartition(".")[2]
        assert signature_in(inspect.getsource(rollout_bank), f"StandIn.{method}") == facts.signature(name), name
