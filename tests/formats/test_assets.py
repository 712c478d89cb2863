"""The files beside the weights. Tested without transformers: all that is used of it is save_pretrained."""

import json
from pathlib import Path

from mcore_ckpt.formats.huggingface.assets import save_assets


class Saved:
    """As a transformers config or tokenizer: writes files of its own into a folder."""

    def __init__(self, name: str, **values: object) -> None:
        self.name = name
        self.values = values

    def save_pretrained(self, folder: Path) -> None:
        (folder / self.name).write_text(json.dumps(self.values))


def test_config_generation_config_and_tokenizer_are_written(tmp_path: Path) -> None:
    config = Saved("config.json", hidden_size=32)
    config.generation_config = Saved("generation_config.json", eos_token_id=2)  # type: ignore[attr-defined]
    written = save_assets(tmp_path / "huggingface", config, Saved("tokenizer.json", vocab=3), {})
    assert [path.name for path in written] == ["config.json", "generation_config.json", "tokenizer.json"]
    assert json.loads(written[0].read_text()) == {"hidden_size": 32}


def test_without_either_there_is_no_folder(tmp_path: Path) -> None:
    assert save_assets(tmp_path / "huggingface", None, None, {}) == []
    assert not (tmp_path / "huggingface").exists()


def test_a_tokenizer_of_transformers_5_is_one_for_4_too(tmp_path: Path) -> None:
    given = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|turn|>"], "eos_token": "<|end|>"}
    [written] = save_assets(tmp_path, None, Saved("tokenizer_config.json", **given), {})
    assert json.loads(written.read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|turn|>"],
        "eos_token": "<|end|>",
    }


def test_a_tokenizer_of_transformers_4_stays_as_it_is(tmp_path: Path) -> None:
    given = {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": {}, "additional_special_tokens": ["a"]}
    [written] = save_assets(tmp_path, None, Saved("tokenizer_config.json", **given), {})
    assert json.loads(written.read_text()) == given


def test_what_others_write_meanwhile_is_not_taken_for_an_asset(tmp_path: Path) -> None:
    """Other ranks put weights into the folder: listed by two ranks, nobody could read the manifest."""

    class Slow(Saved):
        def save_pretrained(self, folder: Path) -> None:
            (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"of another rank")
            super().save_pretrained(folder)

    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert save_assets(tmp_path, None, Slow("tokenizer.json", vocab=3), {}) == [tmp_path / "tokenizer.json"]
    assert len(list(tmp_path.iterdir())) == 3
