"""The examples of AReaL's document on checkpoints, as it prints them. Run by tests/integrations/test_areal.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from areal.api.cli_args import RecoverConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mcore_ckpt.state.model import unwrap
from tests.integrations.areal import exporting, recovering, simulated
from tests.integrations.areal.children import in_child
from tests.integrations.areal.simulated import NAMES
from tests.support.document_examples import AREAL_LOAD_EXPORT, AREAL_RECOVER, AREAL_SAVER, relocated


def test_an_export_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    def work() -> None:
        trainer = exporting.trainer_of(tmp_path, **yaml.safe_load(AREAL_SAVER)["saver"])
        assert trainer.saver.config.mode == "auto"
        trainer.train(5)
        trainer.close()

    in_child(work)
    assert exporting.exports(tmp_path) == {"default": exporting.names(3)}


def test_an_export_is_loaded_with_transformers(tmp_path: Path) -> None:
    words = {"a": 0, "b": 1, "[unk]": 2}

    def work() -> torch.Tensor:
        trainer = exporting.trainer_of(tmp_path, freq_steps=1, mode="sync")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="[unk]")))
        trainer.saver.save(trainer.actor, 0, 99, 99, tokenizer=tokenizer)
        trainer.close()
        return unwrap(trainer.actor.model[0]).embedding.word_embeddings.weight.detach().clone()

    weight = in_child(work)
    (folder,) = tmp_path.glob("checkpoints/*/exp/trial/default/epoch0epochstep99globalstep99")
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "checkpoint").symlink_to(folder.parent)
    found: dict[str, Any] = {}
    exec(relocated(AREAL_LOAD_EXPORT, tmp_path), found)
    assert torch.equal(found["model"].get_input_embeddings().weight, weight[: exporting.VOCAB_SIZE])
    assert found["tokenizer"].get_vocab() == words


def test_recovery_from_every_hundredth_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = simulated.train

    def train_last(training: simulated.Training, first: int, last: int) -> None:
        """Steps are counted, whether they train or not. The saved one has to have an optimizer's state."""
        if first >= 98:
            train(training, first, last)

    monkeypatch.setattr(simulated, "train", train_last)
    # In YAML a bare `on` is true, of which AReaL's own configuration makes a word that it refuses.
    read = yaml.safe_load(AREAL_RECOVER)["recover"]
    with pytest.raises(ValueError, match="Invalid recover mode 'True'"):
        RecoverConfig(**NAMES, fileroot=str(tmp_path), **{**read, "mode": str(read["mode"])})
    config = yaml.safe_load(AREAL_RECOVER.replace(" on ", ' "on" '))["recover"]
    assert config == {**read, "mode": "on"}
    in_child(recovering.trained, tmp_path / "run", 102, roles=("default",), **config)
    assert recovering.complete(tmp_path / "run") == [99]
    assert in_child(recovering.trained, tmp_path / "run", 101, seed=7, roles=("default",), **config)["start"] == 100
