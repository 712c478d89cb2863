"""What starting the command costs: `--help` waits for nothing that only work needs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

import mcore_ckpt
from mcore_ckpt.cli.main import build_parser

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


def subcommands() -> list[str]:
    actions = build_parser()._actions
    return [name for each in actions if isinstance(each, argparse._SubParsersAction) for name in each.choices]


@pytest.mark.parametrize("arguments", [("--help",), *((name, "--help") for name in subcommands())], ids=" ".join)
def test_help_does_not_wait_for_torch(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *told, imported = done.stdout.splitlines()
    assert told[0].startswith("usage: mcore-ckpt")
    assert json.loads(imported) == []


def test_public_names_are_there_when_they_are_asked_for() -> None:
    assert set(mcore_ckpt.__all__) <= set(dir(mcore_ckpt))
    for name in mcore_ckpt.__all__:
        assert getattr(mcore_ckpt, name).__name__ == name
    assert not hasattr(mcore_ckpt, "no_such_name")
    # Submodules, which Python asks for in the same way, are still found.
    names: dict[str, object] = {}
    exec("from mcore_ckpt import *; from mcore_ckpt import schedule", names)
    assert set(mcore_ckpt.__all__) <= names.keys()
