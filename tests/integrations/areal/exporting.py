"""AReaL's Saver: HuggingFace models where its documents say, whole or not there. Run by test_areal.py."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from areal.api import SaveLoadMeta
from transformers import AutoModelForCausalLM, LlamaConfig

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.integrations.areal import Saver, export
from mcore_ckpt.integrations.areal import saver as saver_module
from mcore_ckpt.integrations.areal.engine import HF_ASYNC, is_checkpointed
from mcore_ckpt.state.model import unwrap
from tests.distributed.hf_words import hf_config
from tests.distributed.training import VOCAB_SIZE, Layout
from tests.integrations.areal.children import fork, in_child
from tests.integrations.areal.contract import saver_config, spec
from tests.integrations.areal.killing import Disk
from tests.integrations.areal.recovering import said_by
from tests.integrations.areal.simulated import BareEngine, Engine, Trainer

LAYOUT = Layout(1, num_layers=1, precision="bf16", global_batch=2)


def trainer_of(root: Path, roles: Sequence[str] = ("default",), **saver: Any) -> Trainer:
    engines = {role: Engine(LAYOUT, seed, hf_config=hf_config(LAYOUT)) for seed, role in enumerate(roles)}
    return Trainer(engines, root, saver, {"mode": "on", "freq_steps": 100})


def exports(root: Path) -> dict[str, list[str]]:
    """By role, what lies in its folder under names that are not hidden."""
    folders = [path for path in root.glob("checkpoints/*/exp/trial/*") if path.name != "recover_info"]
    return {folder.name: sorted(path.name for path in folder.iterdir() if path.name[0] != ".") for folder in folders}


def names(*steps: int) -> list[str]:
    return [f"epoch{step // 4}epochstep{step % 4}globalstep{step}" for step in steps]


# "auto" is "async" by another name.
@pytest.mark.parametrize("mode", ["auto", "sync", pytest.param("async", marks=pytest.mark.full)])
def test_a_model_is_exported_where_the_documents_say(tmp_path: Path, mode: str) -> None:
    def work() -> torch.Tensor:
        trainer = trainer_of(tmp_path, mode=mode, freq_steps=2)
        trainer.train(2)
        assert trainer.saver.is_async == (mode != "sync")
        weight = unwrap(trainer.actor.model[0]).embedding.word_embeddings.weight.detach().clone()
        # What is saved is what was there then.
        trainer.train_step(2)
        trainer.close()
        return weight

    weight = in_child(work)
    assert exports(tmp_path) == {"default": names(1)}
    (folder,) = tmp_path.glob("checkpoints/*/exp/trial/default/epoch0epochstep1globalstep1")
    assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(model.get_input_embeddings().weight, weight[:VOCAB_SIZE])


def test_actor_and_critic_are_exported_at_the_same_steps(tmp_path: Path) -> None:
    """AReaL counts each step once for each of them: of two, with freq_steps=2, the second alone is ever saved."""

    def work() -> None:
        trainer = trainer_of(tmp_path, ("default", "critic"), freq_steps=2, mode="sync")
        trainer.train(3)
        state = trainer.saver.state_dict()
        assert [(role, counts["steps"]) for role, counts in state.items()] == [("default", 1), ("critic", 1)]
        resumed = Saver(saver_config(tmp_path, freq_steps=2), spec())
        resumed.load_state_dict(state)
        assert resumed.state_dict().keys() == state.keys()
        trainer.close()

    in_child(work)
    assert exports(tmp_path) == {"default": names(1), "critic": names(1)}


def test_an_epoch_s_last_step(tmp_path: Path) -> None:
    def work() -> None:
        trainer = trainer_of(tmp_path, freq_epochs=1, freq_steps=3, mode="sync")
        trainer.train(4)
        trainer.close()

    in_child(work)
    assert exports(tmp_path) == {"default": names(2, 3)}


# CI kills at the first point and at few on the way; and, as the full tier does, at the last four.
@pytest.mark.parametrize("every", [pytest.param(9, marks=pytest.mark.full), 30])
def test_killed_while_it_exports(tmp_path: Path, every: int) -> None:
    """AReaL makes the folder first, and what is in it is half a model until the last file is there."""

    def work() -> None:
        trainer = trainer_of(tmp_path / "run", freq_steps=1, mode="sync")
        trainer.train_step(0, save=False)

        def save(disk: Disk) -> list[str]:
            with disk.watched():
                trainer.save(0)
            return disk.done

        shutil.rmtree(tmp_path / "run")
        status, done = fork(lambda: save(Disk(None)))
        assert status == 0, done
        (whole,) = (tmp_path / "run").glob("checkpoints/*/exp/trial/default/epoch*")
        wanted = {path.name: path.read_bytes() for path in whole.iterdir()}
        seen = set()
        # The last ones are those after the move.
        for number in (*range(0, len(done) - 4, every), *range(len(done) - 4, len(done))):
            shutil.rmtree(tmp_path / "run")
            status, _ = fork(lambda number=number: save(Disk(number)))
            assert status == -signal.SIGKILL, done[number]
            found = exports(tmp_path / "run").get("default", [])
            seen.add(len(found))
            if found:
                assert {path.name: path.read_bytes() for path in whole.iterdir()} == wanted
            # Another process, that exports another step: what is whole is put in place, and nothing stays hidden.
            for kept in tmp_path.glob("run/checkpoints/*/exp/trial/default"):
                shutil.copytree(kept, tmp_path / "kept")
                assert fork(lambda: export._finish_earlier(tmp_path / "kept"))[0] == 0
                names = [path.name for path in (tmp_path / "kept").iterdir()]
                assert [name for name in names if "export" in name or "replaced" in name] == []
                for path in (tmp_path / "kept").glob("epoch*"):
                    assert {file.name: file.read_bytes() for file in path.iterdir()} == wanted
                shutil.rmtree(tmp_path / "kept")
            # A run that was resumed before this step exports it again.
            status, done_again = fork(lambda: save(Disk(None)))
            assert status == 0, done_again
            assert {path.name: path.read_bytes() for path in whole.iterdir()} == wanted
            assert [path.name for path in whole.parent.iterdir() if "export" in path.name] == []
        assert seen == {0, 1}

    in_child(work)


def test_a_failed_export_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the training: at the next export, or at the end."""

    def work() -> str:
        def fail(folder: Path, path: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        monkeypatch.setattr(export, "_put", fail)
        trainer = trainer_of(tmp_path, freq_steps=1, mode="async")
        trainer.train(1)
        with pytest.raises(CheckpointError) as raised:
            trainer.saver.finalize()
        trainer.close()
        return str(raised.value)

    message = in_child(work)
    assert names(0)[0] in message
    assert os.strerror(errno.ENOSPC) in message


class Stock(BareEngine):
    """AReaL's own engine, which writes no model here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exported: list[str] = []

    def _save_model_to_hf(self, path: str, **others: Any) -> None:
        self.exported.append(path)


class UnheardOf(LlamaConfig):
    model_type = "unheard_of"


class Unknown(Engine, Stock):
    """Ours, of an architecture that there is no table for."""


def test_other_engines_are_exported_as_ever(tmp_path: Path) -> None:
    def work() -> tuple[list[str], list[str]]:
        told = said_by(saver_module)
        engine = Stock(LAYOUT, 1)
        assert not is_checkpointed(engine)
        saver = Saver(saver_config(tmp_path, freq_steps=1, mode="async"), spec())
        saver.save(engine, 0, 0, 0)
        assert not saver.is_async
        return [os.path.basename(path) for path in engine.exported], told

    exported, told = in_child(work)
    assert exported == names(0)
    assert any("Stock cannot export asynchronously" in text for text in told)


@pytest.mark.parametrize("weight_format", ["hf", HF_ASYNC])
def test_an_architecture_without_a_table_is_exported_by_areal(tmp_path: Path, weight_format: str) -> None:
    def work() -> list[str]:
        engine = Unknown(LAYOUT, 1, hf_config=UnheardOf(**hf_config(LAYOUT).to_dict()))
        engine.save(SaveLoadMeta(path=str(tmp_path / "x"), weight_format=weight_format, with_optim=False))
        engine.checkpointer.close()
        return engine.exported

    assert in_child(work) == [str(tmp_path / "x")]
