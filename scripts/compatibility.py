"""Runs the tests of the integrations, and writes docs/compatibility.md from their results.

    .venv/bin/python scripts/compatibility.py [--full] [FRAMEWORK...]      after scripts/test.sh has installed all

A cell has the number of cases that passed, or "failed". With --full all cases run, otherwise those that CI runs. If
frameworks are named, only their tests run, and the other rows stay as they are.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.compatibility import COLUMNS, FOLDER, PACKAGES, PAGE, RECORDS, REPOSITORY

BEGIN, END = "<!-- written by scripts/compatibility.py -->", "<!-- end -->"
# The files with the tests of each framework. Some of them start a pytest of their own beside the framework's package.
TESTS = {
    "verl": ("tests/verl",),
    "AReaL": ("tests/integrations/test_areal.py",),
    "ROLL": ("tests/integrations/test_roll.py", "tests/distributed/test_roll_ranks.py"),
    "Megatron-Bridge": ("tests/bridge",),
    "slime": ("tests/distributed/test_slime.py",),
    "miles": ("tests/distributed/test_slime.py",),
    "NeMo-RL": ("tests/bridge", "tests/integrations/test_nemo_rl_driver_files.py"),
    "SkyRL": ("tests/skyrl",),
    "ms-swift": ("tests/swift",),
    "Megatron-LM": (
        "tests/distributed/test_megatron_loop.py",
        "tests/distributed/test_rollout_bank.py",
        "tests/distributed/test_for_trainers.py",
    ),
}


def main(full: bool, wanted: list[str]) -> int:
    chosen = wanted or list(TESTS)
    paths = sorted({path for framework in chosen for path in TESTS[framework]})
    results, code = run(paths, full)
    found = rows(line for line in results if line["framework"] in chosen)
    missing = sorted(set(chosen) - {_framework(line) for line in found})
    if missing:
        print(f"no results of {', '.join(missing)}: the page stays as it is")
        return code or 1
    before, _, rest = PAGE.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    kept = [
        line for line in old.strip().splitlines()[2:] if line.strip("| ").split(" |")[0].split(" ")[0] not in chosen
    ]
    lines = sorted([*kept, *found], key=_place)
    PAGE.write_text(f"{before}{BEGIN}\n{header()}\n" + "\n".join(lines) + f"\n{END}{after}")
    return code


def run(paths: list[str], full: bool) -> tuple[list[dict[str, Any]], int]:
    """What the tests showed, and what pytest exited with."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *paths]
        environment = {**os.environ, FOLDER: folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *(["--full"] if full else [])], cwd=REPOSITORY, env=environment)
        files = sorted(Path(folder).glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()], done.returncode


def rows(results: Iterable[dict[str, Any]]) -> list[str]:
    """One line of the table for each framework and version."""
    counted: dict[tuple[str, str], dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for line in results:
        for column in line["columns"]:
            counted[line["framework"], line["version"]][column].append(line["passed"])
    return [row(*key, columns) for key, columns in counted.items()]


def row(framework: str, version: str, columns: dict[str, list[bool]]) -> str:
    tested = "real package" if framework in PACKAGES else "stand-in" if framework in RECORDS else ""
    if framework == "Megatron-LM":
        tested = "real loader (going back), recorded interface"
    cells = [
        ("failed" if not all(columns[each]) else str(len(columns[each]))) if columns[each] else "" for each in COLUMNS
    ]
    return f"| {framework} {version} | {tested} | {' | '.join(cells)} |"


def header() -> str:
    return f"| framework | tested with | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}"


def _place(line: str) -> tuple[int, str]:
    return list(TESTS).index(_framework(line)), line


def _framework(line: str) -> str:
    return line.strip("| ").partition(" ")[0]


if __name__ == "__main__":
    named = [argument for argument in sys.argv[1:] if argument != "--full"]
    sys.exit(main("--full" in sys.argv[1:], named))
