"""How many calls to the file system thousands of steps and files take: for each step, for each file, and no more.

Counted by a library before the C library (tests/faults/disks/delays.c), native threads included.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "many_files.py"
# Enough that looks at them overlap.
FEW, MANY = 40, 80

# Calls for each step.
OF_A_STEP = {
    # The step is listed; the manifest is looked at, found to be no link and a file, and read.
    "list, first time": {"list": 1, "stat": 3, "open": 1, "read": 1},
    "list, again": {"list": 1, "stat": 1},
    "tracker of a save": {},
    "old steps of a save": {"list": 1, "stat": 1},
    # Besides, the whole manifest is read, the role's folder is listed, and the size of its file is taken.
    "complete steps, bytes included": {"list": 2, "stat": 4, "open": 1, "read": 1},
    "recover's search": {"list": 1, "stat": 1},
    "start of a manager": {"list": 1, "stat": 1},
    "first save's sweep": {"list": 1, "stat": 1},
    "spelling of a step": {},
    # Besides, the whole manifest is read, for the sum of the sizes and for what the step is worth.
    "mcore-ckpt list": {"list": 2, "stat": 8, "open": 2, "read": 2},
    # It keeps all of these steps, so it looks what they are worth. Besides, the sizes of all files: two here, in two
    # folders. And one more look for leftovers.
    "mcore-ckpt prune --dry-run": {"list": 5, "stat": 7, "open": 1, "read": 1},
}
# Calls for each file.
OF_A_FILE = {
    "rank 0's look at all files": {"stat": 1},
    "what a step is worth": {"stat": 1},
    # It is no link, it is a file, and it can be opened.
    "sizes before a load": {"stat": 2, "open": 1},
    "rename over an old checkpoint": {"unlink": 1},
    "deletion of the step": {"unlink": 1},
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """By operation and kind of call, what each further step and file takes."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("many")
    numbers = [str(FEW), str(MANY)]
    command = [sys.executable, str(BENCHMARK), "--json", "--delay-ms", "0", "--steps", *numbers, "--files", *numbers]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(folder)}, stdout=subprocess.PIPE, check=True)
    told: dict[str, list[dict[str, int]]] = defaultdict(list)
    for line in done.stdout.splitlines():
        told[json.loads(line)["name"]].append(json.loads(line)["calls"])
    return {name: _of_each(few, many) for name, (few, many) in told.items()}


def _of_each(few: dict[str, int], many: dict[str, int]) -> dict[str, float]:
    rates = {kind: (many.get(kind, 0) - few.get(kind, 0)) / (MANY - FEW) for kind in {*few, *many}}
    return {kind: rate for kind, rate in rates.items() if rate}


@pytest.mark.parametrize("operation", [*OF_A_STEP, *OF_A_FILE])
def test_calls(calls: dict[str, dict[str, float]], operation: str) -> None:
    assert calls[operation] == (OF_A_STEP | OF_A_FILE)[operation]


def test_every_operation_is_counted(calls: dict[str, dict[str, float]]) -> None:
    assert calls.keys() == OF_A_STEP.keys() | OF_A_FILE.keys()
