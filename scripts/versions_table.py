"""Runs tests with each version of megatron-core, and writes the table of docs/compatibility.md from their results.

    .venv/bin/python scripts/versions_table.py [--full] [ROW...]      after scripts/test.sh has installed the versions

A cell has the number of cases that passed, "-" if the version lacks what is tested, or "failed". With --full all cases
of the files run, otherwise those that CI runs. If rows are named, only these run, and the others stay as they are.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.megatron_cases import CASES, REPOSITORY, VERSIONS, Cases, packages

BEGIN, END = "<!-- written by scripts/versions_table.py -->", "<!-- end -->"
RING = "loads what each version saved"


def main(full: bool, wanted: list[str]) -> int:
    page = REPOSITORY / "docs" / "compatibility.md"
    before, _, rest = page.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    there = rows_of(old)
    rows: dict[str, dict[str, str]] = {}
    for what in (*CASES, RING):
        if wanted and what not in wanted:
            rows[what] = there.get(what, dict.fromkeys(VERSIONS, "?"))
        elif what == RING:
            rows[what] = {version: cell_of_ring(version) for version in VERSIONS}
        else:
            rows[what] = {version: cell(version, CASES[what], full) for version in VERSIONS}
    page.write_text(f"{before}{BEGIN}\n{table(rows)}{END}{after}")
    return any("failed" in found for row in rows.values() for found in row.values())


def cell(version: str, cases: Cases, full: bool) -> str:
    chosen = ["--full"] if full else ["-k", cases.chosen]
    return run([cases.path, *chosen], packages(version))


def cell_of_ring(version: str) -> str:
    """Loads of what each version saved, the version itself included."""
    test = "tests/test_versions.py"
    return run([test, "--full", "-k", f"loads_every_other and -{version}]"], [])


def run(arguments: list[str], path: list[Path]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        search = os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)
        print(*arguments, "->", done.returncode, flush=True)
        return "failed" if done.returncode else shown(ElementTree.parse(report).getroot().find("testsuite"))


def shown(suite: ElementTree.Element | None) -> str:
    assert suite is not None
    tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    return "-" if tests == skipped else str(tests - skipped)


def rows_of(text: str) -> dict[str, dict[str, str]]:
    """The rows of a table that `table` has written."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()[2:]]
    return {what: dict(zip(VERSIONS, cells, strict=True)) for what, *cells in lines}


def table(rows: dict[str, dict[str, str]]) -> str:
    lines = [f"| megatron-core | {' | '.join(VERSIONS)} |", f"|---|{'---|' * len(VERSIONS)}"]
    lines += [f"| {what} | {' | '.join(row[version] for version in VERSIONS)} |" for what, row in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    named = [argument for argument in sys.argv[1:] if argument != "--full"]
    sys.exit(main("--full" in sys.argv[1:], named))
