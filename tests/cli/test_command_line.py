"""What all commands have in common: examples in `--help`, `--json`, narrow terminals, and a shell's completion."""

from __future__ import annotations

import argparse
import builtins
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.cli.main import COMMANDS, build_parser, command_module, main
from tests.support import small_model
from tests.support.small_model import make, resharded, tensors_of


def parsers() -> dict[str, argparse.ArgumentParser]:
    (found,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    return dict(found.choices)


def examples() -> list[str]:
    return [example for command in COMMANDS for example in command_module(command).EXAMPLES]


def typed(example: str) -> list[str]:
    """The arguments of an example: no explanation, and nothing that is the shell's."""
    return shlex.split(example.partition(" # ")[0].partition(" > ")[0])


@pytest.mark.parametrize("example", examples())
def test_every_example_is_understood(example: str) -> None:
    args = build_parser().parse_args(typed(example))
    assert callable(args.run)


def test_every_command_has_examples_of_its_own() -> None:
    assert list(parsers()) == list(COMMANDS)
    for name in COMMANDS:
        examples = command_module(name).EXAMPLES
        assert examples
        assert all(typed(example)[0] == name for example in examples)


@pytest.mark.parametrize("columns", [200, 40, 10])
@pytest.mark.parametrize("name", parsers())
def test_help_shows_them_on_any_terminal(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    _, _, last = shown.partition("\nexamples:\n")
    lines = [line.partition("#")[0].strip() for line in last.splitlines()]
    assert lines == ["mcore-ckpt " + example.partition(" # ")[0] for example in command_module(name).EXAMPLES]


def test_all_that_report_have_json() -> None:
    without = [name for name, parser in parsers().items() if "--json" not in parser._option_string_actions]
    assert without == ["completion"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples name: two steps, and the newer one under another layout."""
    made = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patched:
        for step in (90, 100):
            patched.setattr(small_model, "STEP", step)
            role_dir = make(made / "checkpoints", tensors_of())
        resharded(role_dir, made / "resharded", tp=2)
    return made


@pytest.mark.parametrize(
    "example",
    [
        example
        for example in examples()
        if typed(example)[0] in ("list", "inspect", "watch", "diff", "verify", "prune") and "s3://" not in example
    ],
)
def test_examples_run(example: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    arguments = typed(example)
    if arguments == ["watch", "checkpoints"]:
        arguments.append("--once")
    assert main(arguments) == 0


# -- completion --------------------------------------------------------------------------------------------

COMPLETE = """
source /dev/stdin
COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
"$(complete -p mcore-ckpt | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("mcore-ckpt in", {"inspect"}),
        ("mcore-ckpt inspect --ten", {"--tensor", "--tensors"}),
        ("mcore-ckpt convert --format ''", {"native", "torch_dist"}),
        ("mcore-ckpt list check", {"checkpoints"}),
        ("mcore-ckpt completion ''", {"bash", "zsh"}),
    ],
)
def test_bash_completes(words: str, wanted: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "check.txt").touch()
    done = subprocess.run(
        ["bash", "-c", COMPLETE.format(words=words)],
        input=script("bash", capsys),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert wanted <= set(done.stdout.split())
    assert "check.txt" not in done.stdout


def test_zsh_gets_a_script_of_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("zsh", capsys)
    assert text.startswith("#compdef mcore-ckpt")
    for name in parsers():
        assert f"{name}:" in text


def test_completion_without_shtab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real: Callable[..., Any] = builtins.__import__

    def without(name: str, *args: Any, **fields: Any) -> Any:
        if name == "shtab":
            raise ImportError(name)
        return real(name, *args, **fields)

    monkeypatch.delitem(sys.modules, "shtab", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'mcore_ckpt[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["watch", ".", "--until", "-1"], "'-1' is not a step"),
        (["inspect", ".", "--step", "1.0"], "'1.0' is not a step"),
        (["merge", ".", "s3://bucket/run"], "is the URL 's3://bucket/run': use the path of a folder"),
        (["reshard", ".", "file:/mnt"], "is the URL"),
        (
            ["verify", "https://user:SECRET@host/x?token=SECRET"],
            "is the URL 'https://***@host/x': use the path of a folder",
        ),
        (["list", "S3://bucket/run"], "`mcore-ckpt list --remote URL` take the URL of a store"),
        (["merge", ".", "out", "--hf_model_path", "https://user:SECRET@host/x"], "is the URL 'https://***@host/x'"),
    ],
)
def test_steps_and_paths_have_their_form(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    said = " ".join(capsys.readouterr().err.split())
    assert words in said
    assert "SECRET" not in said
