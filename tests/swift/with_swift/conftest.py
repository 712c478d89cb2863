"""Imports ms-swift once, for all ranks of all tests: they are forks of this process."""

from pathlib import Path
from typing import Any

import pytest

from tests.swift import swift_on_cpu

swift_on_cpu.stand_in()

# First: it compiles functions with torch.jit, which cannot read those that stand in for torch's (megatron_on_cpu.py).
import swift.megatron  # noqa: E402, F401
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

import mcore_ckpt.integrations.swift.pipelines  # noqa: E402, F401
from tests.support.tiny_models import make_hf_folder  # noqa: E402
from tests.swift.swift_run import SwiftRun  # noqa: E402


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with a tokenizer, as ms-swift wants it at `--model`."""
    size = swift_on_cpu.VOCABULARY
    folder = make_hf_folder(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=size, num_hidden_layers=4)
    tokenizer = Tokenizer(models.WordLevel({f"word{number}": number for number in range(size)}, "word0"))
    special = {"unk_token": "word0", "pad_token": "word0", "eos_token": "word2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs of ms-swift's own pipeline that save only at their end, each made once."""
    runs: dict[tuple[Any, ...], SwiftRun] = {}

    def run(world: int = 1, **options: Any) -> SwiftRun:
        key = (world, *sorted(options.items()))
        if key not in runs:
            folder = tmp_path_factory.mktemp("uninterrupted")
            runs[key] = SwiftRun(world, model, folder / "run", folder / "root", tuple(options.items()))
            assert runs[key].start() == [0] * world, runs[key].log
        return runs[key]

    return run
