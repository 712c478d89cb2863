"""The examples run as they are; killed by SIGKILL and started again, a loop prints what it would have printed."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from mcore_ckpt.steps import listing as steps

REPOSITORY = Path(__file__).parents[2]
LOOP = REPOSITORY / "examples" / "megatron_loop.py"
ITERATION = re.compile(r"iteration (\d+) loss (\S+) samples (\d+)")


def start(*options: object) -> "subprocess.Popen[str]":
    """One rank, by the variables that torchrun sets."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    of_one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", LOOP, *map(str, options)],
        cwd=REPOSITORY,
        env=os.environ | of_one | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*options: object) -> list[str]:
    """The lines of a run that ends in order, those of iterations."""
    process = start(*options)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    return [line for line in output.splitlines() if ITERATION.fullmatch(line)]


def test_the_plain_loop_is_killed_and_goes_on(tmp_path: Path) -> None:
    root, options = tmp_path / "root", ["--train-iters", 7, "--save-interval", 2, "--async-save"]
    reference = run("--save", tmp_path / "reference", *options)
    assert len(reference) == 7

    process = start("--save", root, "--load", root, *options)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("iteration 5 "):
            process.kill()
            break
    process.wait(timeout=60)
    process.stdout.close()
    saved = steps.complete_steps(root)[-1].step
    assert saved in (2, 4)

    assert run("--save", root, "--load", root, *options) == reference[saved:]
    assert steps.complete_steps(root)[-1].step == 6
