"""The commands of verl's document, as it prints them, on small checkpoints under the names that they have there."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_ckpt.cli.main import build_parser, main
from tests.support import small_model
from tests.support.document_examples import MERGE_FSDP, MERGE_MEGATRON, MERGE_USAGE, REPOSITORY, relocated, run_in_shell
from tests.support.forks import forked
from tests.support.mcore_checkpoints import make_checkpoint, weights
from tests.support.tiny_models import make_hf_folder

pytestmark = pytest.mark.slow

TARGET = re.compile(r" \\\n +--target_dir \S+")
# A fork is in the folder of the process that it is a fork of.
PROGRAM = """
import os, runpy, sys
os.chdir({folder!r})
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

Run = Callable[[str, Path], subprocess.CompletedProcess[str]]


def run_in_fork(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a shell does with such a command, but in a process that has imported everything."""
    python, script, *arguments = shlex.split(command.replace("\\\n", ""), comments=True)
    assert python == "python"
    program = folder / "program.py"
    program.write_text(PROGRAM.format(folder=str(folder)))
    imports = ("mcore_ckpt.cli.main", "mcore_ckpt.tools.convert.merge")
    return forked([program, REPOSITORY / script, *arguments], imports=imports)


RUNS = [run_in_fork, pytest.param(lambda command, folder: run_in_shell(command, folder, {}), marks=pytest.mark.full)]


def folder_of(command: str) -> str:
    (folder,) = re.findall(r"--local_dir (\S+)", command)
    return folder


@pytest.fixture
def megatron_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint where the document has one, under tp = 2, pp = 2. Returns the folder of the HuggingFace model."""
    monkeypatch.setattr(small_model, "STEP", 1)
    hf = make_hf_folder(tmp_path / "hf", "qwen2-tied")
    made = make_checkpoint(tmp_path / "saved", hf, 2, pp=2)
    place = tmp_path / folder_of(MERGE_MEGATRON)
    place.parent.mkdir(parents=True)
    shutil.move(made, place)
    return hf


def assert_merged(target: Path, hf: Path) -> None:
    from transformers import AutoModelForCausalLM

    found, wanted = weights(target), weights(hf)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.tie_word_embeddings == ("lm_head.weight" not in wanted)


@pytest.mark.parametrize("run", RUNS)
def test_merging_megatrons(megatron_checkpoint: Path, tmp_path: Path, run: Run) -> None:
    done = run(relocated(MERGE_MEGATRON, tmp_path), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_merged(tmp_path / "path/to/merged_hf_model", megatron_checkpoint)


@pytest.mark.parametrize("run", RUNS)
def test_merging_without_a_target(megatron_checkpoint: Path, tmp_path: Path, run: Run) -> None:
    """As verl's merger 0.9, into `tmp`; but a model that is there already is not written over."""
    command = TARGET.sub("", MERGE_MEGATRON)
    assert "target" not in command
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_merged(tmp_path / "tmp", megatron_checkpoint)
    again = run(command, tmp_path)
    assert again.returncode == 2
    assert f"{tmp_path / 'tmp'}: exists already and is not empty: name another folder" in again.stderr


def test_mcore_ckpt_itself_wants_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(tmp_path)]) == 2
    assert "target: give it once" in capsys.readouterr().err


@pytest.mark.parametrize("run", RUNS)
def test_merging_fsdps(tmp_path: Path, run: Run) -> None:
    actor = tmp_path / folder_of(MERGE_FSDP)
    hf = make_hf_folder(actor / "huggingface", "qwen2")
    torch.save(weights(hf), actor / "model_world_size_1_rank_0.pt")
    wanted = shutil.move(hf / "model.safetensors", tmp_path)
    done = run(relocated(MERGE_FSDP, tmp_path), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_merged(tmp_path / "path/to/merged_hf_model", Path(wanted).parent)


def test_every_flag_of_the_usage_is_known() -> None:
    flags = set(re.findall(r"--[\w-]+", MERGE_USAGE))
    assert len(flags) == 8
    (commands,) = (action.choices for action in build_parser()._actions if isinstance(action.choices, dict))
    merge = commands["merge"]
    assert flags <= merge._option_string_actions.keys()
    assert set(merge._option_string_actions["--backend"].choices) == {"fsdp", "megatron"}
