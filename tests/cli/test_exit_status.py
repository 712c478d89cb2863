"""The same mistake has the same exit status, whichever command meets it: docs/command_line.md has the table."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_ckpt.cli.main import main
from tests.support import small_model
from tests.support.small_model import make, tensors_of

BAD, UNUSABLE = 1, 2
TO_OTHERS = "convert {path} --format torch_dist --output_path {out}"
READING = (
    *("inspect {path}", "verify {path}", "reshard {path} {out}", "merge {path} {out}", TO_OTHERS),
    "test --local_dir {path} --reference {hf}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two steps, an empty folder, a file, and what looks like a model of HuggingFace."""
    made = tmp_path_factory.mktemp("status")
    with pytest.MonkeyPatch.context() as patched:
        for step in (90, 100):
            patched.setattr(small_model, "STEP", step)
            make(made / "root", tensors_of())
    (made / "empty").mkdir()
    (made / "file").touch()
    (made / "hf").mkdir()
    for name in ("config.json", "model.safetensors"):
        (made / "hf" / name).write_text("{}")
    return made


def said(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: Path, *more: str
) -> tuple[int, str]:
    """The exit status of a command, and what it says on stderr."""
    words = command.format(path=path, out=tmp_path / "out", hf=folder / "hf", root=folder / "root").split()
    try:
        status = main([*words, *more])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert not (tmp_path / "out").exists()
    return status, " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "command",
    [
        *(*READING, "list {path}", "watch {path} --once", "prune {path}", "diff {path} {root}", "diff {root} {path}"),
        *("doctor {path}", "bench {path}", "collect {path} {root}", "test {path} --reference {hf}"),
        "convert --hf_model_path {path} --output_path {out}",
    ],
)
@pytest.mark.parametrize(("name", "words"), [("nosuch", "there is no such folder"), ("file", "is a file")])
def test_a_path_that_is_no_folder(
    command: str, name: str, words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(command, folder, tmp_path, capsys, folder / name)
    assert (status, words in text) == (UNUSABLE, True), text


@pytest.mark.parametrize("command", [*READING, "diff {path} {root}", "diff {root} {path}"])
def test_a_folder_without_checkpoints(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(command, folder, tmp_path, capsys, folder / "empty")
    assert (status, "checkpoint" in text) == (BAD, True), text


@pytest.mark.parametrize("command", READING)
def test_a_step_that_is_not_in_the_root(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(command, folder, tmp_path, capsys, folder / "root", "--step", "7")
    assert (status, "of step 7: there are the steps 100, 90" in text) == (BAD, True), text


@pytest.mark.parametrize("option", ["--pin", "--unpin"])
def test_nor_can_it_be_pinned(option: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said("prune {path}", folder, tmp_path, capsys, folder / "root", option, "7")
    assert (status, "there is no step 7" in text) == (BAD, True), text


@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize("inside", ["global_steps_100", "global_steps_100/actor"])
def test_a_step_that_is_not_that_of_the_folder(
    command: str, inside: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(command, folder, tmp_path, capsys, folder / "root" / inside, "--step", "90")
    assert (status, "is a checkpoint of step 100, not 90: leave out --step" in text) == (UNUSABLE, True), text


@pytest.mark.parametrize("step", [90, 100])
def test_the_step_of_a_role_that_was_copied_is_in_its_manifest(
    step: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "root" / "global_steps_100" / "actor", tmp_path / "copy")
    status, text = said("verify {path}", folder, tmp_path, capsys, tmp_path / "copy", "--step", str(step))
    assert (status, "is a checkpoint of step 100, not 90" in text) == ((UNUSABLE, True) if step == 90 else (0, False))


@pytest.mark.parametrize("command", [each for each in READING if not each.startswith(("verify", "reshard"))])
def test_a_role_that_the_step_does_not_have(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(command, folder, tmp_path, capsys, folder / "root", "--role", "critic")
    assert (status, "actor" in text) == (UNUSABLE, True), text


@pytest.mark.parametrize(
    "command",
    [
        *("reshard {root} {path}", "merge {root} {path}", "convert {root} --format torch_dist --output_path {path}"),
        *("convert --hf_model_path {hf} --output_path {path}", "collect {root} {path}", "inspect {root} --html {path}"),
    ],
)
@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_target_that_cannot_be_made(
    command: str, name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(command, folder, tmp_path, capsys, folder / name)
    assert (status, str(folder / "file") in text) == (UNUSABLE, True), text
    assert (folder / "file").read_bytes() == b""


@pytest.mark.parametrize(
    "arguments",
    [
        *("prune {} --max-to-keep x", "prune {} --max-to-keep 0", "doctor {} --megabytes x"),
        *("merge {} out --lora-alpha x", "merge {} out --lora-alpha 0", "merge {} out --max-shard-size x"),
        *("inspect {} --step x", "watch {} --last 0", "watch {} --interval nan", "diff {} {} --most -1"),
        *("bench --tp x", "doctor {} --megabytes -1"),
        *("list {} --jsno", "list", "lst {}", "--jsno list {}", ""),
    ],
)
def test_values_that_mean_nothing(
    arguments: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = folder / "root"
    status, text = said(arguments.format(root, root), folder, tmp_path, capsys, root)
    assert status == UNUSABLE
    assert "invalid _" not in text, "the name of a function tells nobody anything"
