"""examples/plain_loop.py is killed by SIGKILL and started again, and prints the losses of an uninterrupted run."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from mcore_ckpt.steps import complete_steps

REPOSITORY = Path(__file__).parents[2]
LOOP = REPOSITORY / "examples" / "plain_loop.py"
STEP = re.compile(r"step (\d+) loss (\S+) samples (\d+)")
OPTIONS = ("--steps", "7", "--save-every", "2")


def start(root: Path) -> "subprocess.Popen[str]":
    """Starts one rank, with the variables that torchrun sets."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", LOOP, "--checkpoints", root, *OPTIONS],
        env=os.environ | rank | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(root: Path) -> list[str]:
    """Returns the lines of the steps of a run that ends by itself."""
    process = start(root)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    return [line for line in output.splitlines() if STEP.fullmatch(line)]


def test_the_plain_loop_resumes_after_a_kill(tmp_path: Path) -> None:
    root = tmp_path / "killed"
    reference = run(tmp_path / "reference")
    assert len(reference) == 7
    assert [status.step for status in complete_steps(tmp_path / "reference")] == [4, 6]  # max_to_keep=2

    process = start(root)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 5 "):
            process.kill()
            break
    process.wait(timeout=60)
    process.stdout.close()
    saved = complete_steps(root)[-1].step
    assert saved in (2, 4)

    assert run(root) == reference[saved:]
