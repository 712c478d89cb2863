"""Programs that run to the end of the interpreter, each in a fork of one process: to import torch takes longer."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FORK = """
import json, os, sys

imports, programs, folder = json.load(sys.stdin)
exec(imports)
statuses = []
for number, program in enumerate(programs):
    child = os.fork()
    if child == 0:
        output = os.open(os.path.join(folder, str(number)), os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        break
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    program = "print(json.dumps(statuses))"
# Here, so that an exception or sys.exit ends the interpreter as it does in a program of its own.
exec(program)
"""


@dataclass(frozen=True)
class Ended:
    """What has become of a program: its exit status, and its output and errors."""

    status: int
    output: str


def run_to_the_end(imports: str, programs: Mapping[str, str], folder: Path) -> dict[str, Ended]:
    """Runs programs one after the other.

    Args:
        imports: what is done once, before the first fork: nothing but imports.
        programs: by name.
        folder: for their output.
    """
    done = subprocess.run(
        [sys.executable, "-c", _FORK],
        input=json.dumps([imports, [*programs.values()], str(folder)]),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout)
    return {
        name: Ended(status, (folder / str(number)).read_text())
        for number, (name, status) in enumerate(zip(programs, statuses, strict=True))
    }
