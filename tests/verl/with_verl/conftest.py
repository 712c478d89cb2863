"""Imports verl once, for all ranks of all tests: they are forks of this process."""

from pathlib import Path

import pytest

from tests.verl import absent

absent.stand_in()

import verl.workers.engine  # noqa: E402, F401
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

import mcore_ckpt.integrations.verl  # noqa: E402, F401
from tests.support.tiny_models import make_hf_folder  # noqa: E402
from tests.verl import sft  # noqa: E402


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with a tokenizer, as verl wants it at `model.path`."""
    folder = make_hf_folder(tmp_path_factory.mktemp("model"), "qwen2", vocab_size=sft.VOCABULARY, num_hidden_layers=2)
    words = {f"word{number}": number for number in range(sft.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, "word0"))
    special = {"unk_token": "word0", "pad_token": "word0", "eos_token": "word2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder
