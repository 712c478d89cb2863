"""Ctrl-C in the middle of each command: status 130, and nothing is left of what it was writing, hidden or not."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.main import main
from mcore_ckpt.io import removal, tuning
from tests.support.checkpoints import ROLE, dead_owner, make, own, stage
from tests.support.mcore_checkpoints import make_checkpoint
from tests.support.node_folders import divide
from tests.support.tiny_models import make_hf_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a HuggingFace model, and a checkpoint of it, also divided among two nodes of the fast tier."""
    folder = tmp_path_factory.mktemp("interrupts")
    hf = make_hf_folder(folder / "hf", "llama")
    made = make_checkpoint(folder / "made", hf, tp=2)
    shutil.move(made.parent.parent, folder / "checkpoints")
    shutil.rmtree(folder / "made")
    (role_dir,) = (folder / "checkpoints").glob("*/*/")
    divide(role_dir, [folder / "node0", folder / "node1"])
    return folder


@pytest.fixture(autouse=True)
def small_pieces(ctrl_c: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there is a middle."""
    monkeypatch.setattr(tuning, "STREAM_BYTES", 1 << 14)


def interrupt_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends this process a SIGINT at the n-th progress of a command."""
    update, told = Progress.update, 0

    def interrupting(self: Progress, *args: Any, **fields: Any) -> None:
        nonlocal told
        told += 1
        if told == number:
            os.kill(os.getpid(), signal.SIGINT)
        update(self, *args, **fields)

    monkeypatch.setattr(Progress, "update", interrupting)


def tree(folder: Path) -> list[tuple[Path, float]]:
    return sorted((path, path.stat().st_mtime if path.is_file() else 0) for path in folder.rglob("*"))


# Megatron's form stores the same tensor of all layers as one, so a small model's is written at once.
NUMBERS = {"convert to torch_dist": (1,), "convert back": (1,)}
WRITING = {
    "merge": ("merge", "checkpoints", "out"),
    "convert to native": ("convert", "--hf_model_path", "hf", "--output_path", "out"),
    "convert to torch_dist": ("convert", "--hf_model_path", "hf", "--output_path", "out", "--format", "torch_dist"),
    "convert back": ("convert", "checkpoints", "--format", "torch_dist", "--output_path", "out"),
    "reshard": ("reshard", "checkpoints", "out", "--pp", "2"),
    "page": ("inspect", "checkpoints", "--html", "page.html", "--diff", "checkpoints"),
    "collect": ("collect", "node0", "node1", "out"),
    "branch": ("branch", "checkpoints", "5", "out"),
}
READING = {
    "verify": ("verify", "checkpoints"),
    "inspect": ("inspect", "checkpoints", "--tensor", "embedding.word_embeddings.weight"),
    "diff": ("diff", "checkpoints", "checkpoints"),
    "test": ("test", "hf", "--reference", "hf"),
}


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        pytest.param(arguments, number, id=f"{name}, {number}")
        for name, arguments in WRITING.items()
        for number in NUMBERS.get(name, (1, 3))
    ],
)
def test_nothing_is_left_of_what_was_being_written(
    arguments: tuple[str, ...],
    number: int,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(model)
    before = tree(model)
    interrupt_at(number, monkeypatch)
    assert main(arguments) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "mcore-ckpt: interrupted\n"
    assert tree(model) == before


@pytest.mark.parametrize("arguments", [*READING.values()], ids=READING)
def test_reading_ends_too(
    arguments: tuple[str, ...], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model)
    before = tree(model)
    interrupt_at(1, monkeypatch)
    assert main(arguments) == 130
    assert capsys.readouterr().out == ""
    assert tree(model) == before


@pytest.fixture
def old_steps(tmp_path: Path, dead_pid: int) -> Path:
    for step in (1, 2, 3):
        make(file_names.step_dir(tmp_path, step) / ROLE, 1)
    dead, _ = stage(file_names.step_dir(tmp_path, 3) / "critic", 1)
    own(dead, dead_owner(dead_pid))
    return tmp_path


def interrupting_unlinks(number: int) -> Callable[..., None]:
    unlink, done = removal._unlink, 0

    def interrupting(folder: int, name: str) -> None:
        nonlocal done
        done += 1
        if done == number:
            os.kill(os.getpid(), signal.SIGINT)
        unlink(folder, name)

    return interrupting


@pytest.mark.parametrize("number", [1, 5, 6])
def test_prune_ends_with_the_step_that_it_is_deleting(
    number: int, old_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has begun to delete is gone for good, so it deletes the rest of it. A step has five files."""
    with monkeypatch.context() as patched:
        patched.setattr(removal, "_unlink", interrupting_unlinks(number))
        assert main(["prune", str(old_steps), "--max-to-keep", "1"]) == 130
    gone = 1 if number <= 5 else 2
    names = {file_names.step_name(step) for step in range(1 + gone, 4)}
    assert {path.name for path in old_steps.iterdir()} == names
    assert main(["prune", str(old_steps), "--max-to-keep", "1"]) == 0
    assert {path.name for path in old_steps.iterdir()} == {file_names.step_name(3)}
    assert [path.name for path in file_names.step_dir(old_steps, 3).iterdir()] == [ROLE]
