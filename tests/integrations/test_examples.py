"""Each loop of examples/ is killed by SIGKILL and started again, and prints what an uninterrupted run prints.

In CI the runs are forks of a process that has imported megatron. The full tier starts them as a user does.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcore_ckpt.steps import complete_steps
from tests.support.forks import ENVIRONMENT, Launched, launch

EXAMPLES = Path(__file__).parents[2] / "examples"
IMPORTS = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "mcore_ckpt.integrations.megatron",
    "mcore_ckpt.recover",
)
STEPS = 7


@dataclass(frozen=True)
class Loop:
    """An example: `line` is what it prints of a step. It saves every second step."""

    script: str
    line: re.Pattern[str]
    folders: tuple[str, ...]
    options: tuple[str, ...]

    def command(self, root: Path) -> list[str]:
        folders = [text for option in self.folders for text in (option, str(root))]
        return [str(EXAMPLES / self.script), *folders, *self.options]


PLAIN = Loop(
    "plain_loop.py",
    re.compile(r"step (\d+) loss (\S+) samples (\d+)"),
    ("--checkpoints",),
    ("--steps", str(STEPS), "--save-every", "2"),
)
MEGATRON = Loop(
    "megatron_loop.py",
    re.compile(r"iteration (\d+) loss (\S+) samples (\d+)"),
    ("--save", "--load"),
    ("--train-iters", str(STEPS), "--save-interval", "2", "--async-save"),
)

Process = Launched | subprocess.Popen[bytes]


def forked(command: list[str], stdout: int) -> Process:
    return launch(command, ranks=1, imports=IMPORTS, stdout=stdout)


def separate(command: list[str], stdout: int) -> Process:
    """One rank, by the variables that torchrun sets."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *command],
        env=os.environ | rank | ENVIRONMENT,
        stdout=stdout,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize("start", [forked, pytest.param(separate, marks=pytest.mark.full)])
@pytest.mark.parametrize("loop", [PLAIN, MEGATRON], ids=["plain", "megatron"])
def test_a_killed_loop_goes_on(loop: Loop, start: Callable[[list[str], int], Process], tmp_path: Path) -> None:
    def run(root: Path, last: int | None = None) -> list[str]:
        """The lines of a run's steps. It is killed when it prints that of step `last`."""
        read, write = os.pipe()
        process = start(loop.command(root), write)
        os.close(write)
        output = ""
        with os.fdopen(read) as lines:
            for line in lines:
                output += line
                step = loop.line.fullmatch(line.rstrip())
                if step and int(step[1]) == last:
                    process.kill()
        assert (process.wait() == 0) == (last is None), output
        return [line for line in output.splitlines() if loop.line.fullmatch(line)]

    root = tmp_path / "killed"
    reference = run(tmp_path / "reference")
    assert len(reference) == STEPS
    run(root, last=5)
    saved = complete_steps(root)[-1].step
    assert saved in (2, 4)
    assert run(root) == reference[saved:]
    assert complete_steps(root)[-1].step == 6
    kept = [status.step for status in complete_steps(tmp_path / "reference")]
    assert kept == ([4, 6] if loop is PLAIN else [2, 4, 6])  # the plain one has max_to_keep=2
