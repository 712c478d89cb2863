"""A new kind of checkpoint is one object in the list of kinds: commands then name it, merge it and compare it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_ckpt.cli.main import main
from mcore_ckpt.formats import kinds
from mcore_ckpt.models.registry import model_from_config
from tests.support.global_tensors import to_mcore
from tests.support.tiny_models import make_hf_folder, read_config
from tests.support.toy_kind import Toy, save_toy


@pytest.fixture(autouse=True)
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, Toy()))


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return make_hf_folder(tmp_path / "hf", "qwen2-tied")


@pytest.fixture
def toy(hf: Path, tmp_path: Path) -> Path:
    model = model_from_config(read_config(hf))
    return save_toy(tmp_path / "run" / "toy", to_mcore(model, load_file(hf / "model.safetensors")))


def test_it_is_recognized(toy: Path) -> None:
    assert kinds.kind_of(toy) == "toy"
    assert kinds.kind_of(toy.parent) is None


@pytest.mark.parametrize("command", ["inspect", "verify", "list"])
def test_commands_for_our_own_name_it(command: str, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(toy)]) == 2
    said = capsys.readouterr().err
    assert f"{toy}: is a checkpoint of the toy trainer, which `mcore-ckpt {command}` does not take: " in said
    assert f"`mcore-ckpt merge {toy} OUT` makes a HuggingFace model of it" in said


@pytest.mark.parametrize("path", [".", ".."])
def test_it_is_merged(path: str, toy: Path, hf: Path, tmp_path: Path) -> None:
    """By its own path, and as the only role of a step."""
    assert main(["merge", str(toy / path), str(tmp_path / "merged"), "--hf_model_path", str(hf)]) == 0
    found, wanted = load_file(tmp_path / "merged" / "model.safetensors"), load_file(hf / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_it_is_compared(toy: Path, hf: Path) -> None:
    arguments = ["test", "--local_dir", str(toy), "--reference", str(hf), "--hf_model_path", str(hf)]
    assert main(arguments) == 0
    changed = bytearray((toy / "0000.bin").read_bytes())
    changed[0] ^= 1
    (toy / "0000.bin").write_bytes(changed)
    assert main(arguments) == 1
