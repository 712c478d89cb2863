"""Imports verl once, for all ranks of all tests: they are forks of this process."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.verl import absent

absent.stand_in()

import transfer_queue  # noqa: E402
import verl.workers.engine  # noqa: E402, F401
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

import mcore_ckpt.integrations.verl  # noqa: E402, F401
from tests.support.tiny_models import make_hf_folder  # noqa: E402
from tests.verl import sft  # noqa: E402

# They need the real package, and the callback that verl 0.9 has.
_HAS_QUEUE = hasattr(transfer_queue, "__file__") and find_spec("verl.trainer.ppo.checkpoint_callback") is not None
collect_ignore = [] if _HAS_QUEUE else ["test_transfer_queue.py", "test_transfer_queue_of_engine.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with a tokenizer, as verl wants it at `model.path`."""
    folder = make_hf_folder(tmp_path_factory.mktemp("model"), "qwen2", vocab_size=sft.VOCABULARY, num_hidden_layers=2)
    words = {f"word{number}": number for number in range(sft.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, "word0"))
    special = {"unk_token": "word0", "pad_token": "word0", "eos_token": "word2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder
