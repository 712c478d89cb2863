"""What the command line says about words that it does not know, and how options may be spelled."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import Any

import pytest

from mcore_ckpt.cli.main import COMMANDS, build_parser, main


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said about arguments that cannot be used."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lst", "."], "there is no command 'lst': did you mean list?"),
        (["Verify", "."], "there is no command 'Verify': did you mean verify?"),
        (["publish"], "there is no command 'publish': use one of demo, doctor, bench, list, inspect, watch,"),
        (["--verson"], "unrecognized arguments: --verson: did you mean --version?"),
        (["--json", "list", "."], "unrecognized arguments: --json: name a command first"),
    ],
)
def test_unknown_commands(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(arguments, capsys)
    assert words in said
    assert said.startswith("usage: mcore-ckpt [-h] [--version] command")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", ".", "--jsno"], "unrecognized arguments: --jsno: did you mean --json?"),
        (["inspect", ".", "--stpe=3"], "unrecognized arguments: --stpe=3: did you mean --step?"),
        (["prune", ".", "--max_too_keep", "2"], "--max_too_keep 2: did you mean --max-to-keep?"),
        (["merge", ".", "out", "--hf-modell-path", "x"], "--hf-modell-path x: did you mean --hf_model_path?"),
        (["merge", ".", "out", "--hf-modl"], "--hf-modl: did you mean --hf_model_path?"),
        (["list", ".", "more"], "unrecognized arguments: more"),
        (["list"], "the following arguments are required: ROOT"),
        (["convert", "--format", "x", "--output_path", "y"], "invalid choice: 'x'"),
        (["watch", ".", "--until"], "argument --until: expected one argument"),
    ],
)
def test_unusable_arguments_of_a_command(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(arguments, capsys)
    assert words in said
    assert said.startswith(f"usage: mcore-ckpt {arguments[0]} [-h]")
    assert f"mcore-ckpt {arguments[0]}: error: " in said


def test_nothing_is_suggested_that_is_only_a_little_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(["bench", ".", "--step", "7"], capsys).endswith("--step 7")


def test_secrets_are_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    for secret in ("--jsno=https://user:SECRET@host/x", "--jsno=\npassword: SECRET"):
        said = refused(["list", ".", secret], capsys)
        assert "did you mean --json?" in said
        assert "SECRET" not in said


def test_the_help_lists_all_commands_whatever_follows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help", "list"])
    assert "verify" in capsys.readouterr().out


# -- spelling ----------------------------------------------------------------------------------------------

# What each command needs beside an option.
NEEDED = {
    **{name: ["x"] for name in ("list", "inspect", "watch", "verify", "prune", "doctor")},
    **{name: ["x", "y"] for name in ("diff", "reshard", "collect")},
    "branch": ["x", "1", "y"],
    "convert": ["--output_path", "x"],
    "test": ["--reference", "x"],
    "completion": ["bash"],
}


def parser_of(name: str) -> argparse.ArgumentParser:
    (found,) = (each for each in build_parser([name])._actions if isinstance(each, argparse._SubParsersAction))
    return found.choices[name]


def options() -> list[tuple[str, argparse.Action, str]]:
    """Each option of each command: the command, what argparse knows of it, and one of its names."""
    return [
        (name, action, text)
        for name in COMMANDS
        for action in parser_of(name)._actions
        for text in action.option_strings
        if not isinstance(action, argparse._HelpAction)
    ]


@pytest.mark.parametrize(("name", "action", "text"), [pytest.param(*each, id=each[0] + each[2]) for each in options()])
@pytest.mark.parametrize("sign", ["-", "_"])
def test_every_option_is_taken_in_both_spellings(name: str, action: argparse.Action, text: str, sign: str) -> None:
    value: list[str] = [] if action.nargs == 0 else [str(list(action.choices or ["1"])[-1])]
    spelled = "--" + text[2:].replace("-", sign).replace("_", sign)
    needed = NEEDED.get(name, [])
    given = [getattr(parser_of(name).parse_args([*needed, each, *value]), action.dest) for each in (text, spelled)]
    assert given[0] == given[1] != parser_of(name).get_default(action.dest)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_one_spelling(name: str) -> None:
    shown = [text for each, _, text in options() if each == name]
    assert len({text.replace("_", "-") for text in shown}) == len(shown)


@pytest.mark.parametrize(
    ("arguments", "dest", "value"),
    [
        (["prune", "x", "--max_to=3"], "max_to_keep", "3"),
        (["merge", "x", "y", "--max_shard", "5GB"], "max_shard_size", "5000000000"),
        (["convert", "--output-pa", "y", "--hf-mod", "1_0/a_b"], "hf_model_path", "1_0/a_b"),
        (["convert", "--output-path=a_b-c", "--tp-size=2"], "output_path", "a_b-c"),
        (["merge", "--local-dir", "a_b-c", "--target-dir", "d"], "source_flag", "a_b-c"),
    ],
)
def test_the_beginning_of_an_option_is_enough(arguments: list[str], dest: str, value: Any) -> None:
    assert str(getattr(build_parser().parse_args(arguments), dest)) == value


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_may_begin_with_the_home_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves `--html=~/x` as it is, and a folder with the name `~` would be made."""
    monkeypatch.setenv("HOME", "/home/me")
    for action in parser_of(name)._actions:
        with suppress(argparse.ArgumentTypeError, ValueError):  # a number, which is no path
            value = action.type("~/x") if callable(action.type) else None
            assert "~" not in str(value), action.dest


def test_what_follows_two_dashes_is_no_option() -> None:
    args = build_parser().parse_args(["list", "--", "--hf-model_path"])
    assert str(args.root) == "--hf-model_path"
