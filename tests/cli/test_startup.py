"""What starting a command costs: it waits for the import of nothing that only other work needs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mcore_ckpt
from mcore_ckpt.cli.main import COMMANDS
from tests.support.small_model import make, tensors_of

pytestmark = pytest.mark.slow

# Each takes a second or more to import.
SLOW = ("torch", "transformers", "megatron", "safetensors", "numpy")

# Runs the command in a process that has imported nothing yet, and tells what it has imported then.
SCRIPT = f"""
import json, sys
from mcore_ckpt.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert ended.code == 0
print(json.dumps([name for name in {SLOW} if name in sys.modules]))
"""


def started(*arguments: str) -> tuple[list[str], set[str]]:
    """The lines that a command prints, and which of the slow modules its process has imported."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *told, imported = done.stdout.splitlines()
    return told, set(json.loads(imported))


@pytest.mark.parametrize("arguments", [("--help",), *((name, "--help") for name in COMMANDS)], ids=" ".join)
def test_help_does_not_wait_for_torch(arguments: tuple[str, ...]) -> None:
    told, imported = started(*arguments)
    assert told[0].startswith("usage: mcore-ckpt")
    assert imported == set()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("startup")
    make(made, tensors_of())
    return made


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("list {}", "newest complete step: 5"),
        ("list {} --json", '"complete": true'),
        ("inspect {}", "step 5 of actor"),
        ("inspect {} --tensors", "decoder.final_layernorm.weight"),
        ("inspect {} --json", '"step": 5'),
        ("verify {}", "sound, 5 files"),
        ("watch {} --once", "complete"),
        ("watch {} --until 5 --json", '"newest": 5'),
        ("prune {} --max-to-keep 1", "0 of 1 folders deleted"),
        ("doctor {} --megabytes 1", "checkpoints can be saved here"),
    ],
)
def test_commands_that_read_no_tensor_do_not_wait_for_torch(command: str, words: str, root: Path) -> None:
    told, imported = started(*command.format(root).split())
    assert words in "\n".join(told)
    assert imported == set()


@pytest.mark.parametrize("command", ["list", "inspect", "verify", "watch", "prune", "doctor"])
def test_nor_do_those_that_find_nothing(command: str, tmp_path: Path) -> None:
    script = SCRIPT.replace("assert ended.code == 0", "pass")
    done = subprocess.run([sys.executable, "-c", script, command, str(tmp_path / "nosuch")], capture_output=True)
    assert b"nosuch: there is no such folder" in done.stderr
    assert json.loads(done.stdout) == []


def test_a_tensor_is_read_with_torch(root: Path) -> None:
    told, imported = started("inspect", str(root), "--tensor", "decoder.final_layernorm.weight")
    assert any("min" in line for line in told)
    assert "torch" in imported, "what the other tests look for can be seen"


def test_only_the_module_of_the_command_is_imported() -> None:
    script = "import sys; from mcore_ckpt.cli.main import build_parser; build_parser(['list']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names = {name.removeprefix("mcore_ckpt.cli.") for name in done.stdout.split()}
    assert names & set(COMMANDS.values()) == {"list_command"}


# -- the version -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [["-m", "mcore_ckpt"], ["-m", "mcore_ckpt.cli.main"]], ids=" ".join)
def test_version(start: list[str]) -> None:
    done = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"mcore-ckpt {mcore_ckpt.__version__}\n"


def test_the_version_has_one_place() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mcore_ckpt.version.__version__"}


# -- the public names --------------------------------------------------------------------------------------


def test_public_names_are_there_when_they_are_asked_for() -> None:
    assert set(mcore_ckpt.__all__) <= set(dir(mcore_ckpt))
    for name in mcore_ckpt.__all__:
        assert getattr(mcore_ckpt, name).__name__ == name
    assert not hasattr(mcore_ckpt, "no_such_name")
    # Submodules, which Python asks for in the same way, are still found.
    names: dict[str, object] = {}
    exec("from mcore_ckpt import *; from mcore_ckpt import schedule", names)
    assert set(mcore_ckpt.__all__) <= names.keys()
