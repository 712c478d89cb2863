"""Runs the checks and prints a line for each, then a block for docs/benchmarks.md.

    python -m gpu_checks [CHECK ...]        # else all; the exit status is 1 if one has failed

Start it with scripts/gpu_check.sh, which builds the package first.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from gpu_checks.checks import CHECKS, Check
from gpu_checks.outcome import Outcome
from gpu_checks.report import block
from gpu_checks.runner import Call, call_all


def main(words: list[str], checks: tuple[Check, ...] = CHECKS) -> int:
    """Runs the checks that the words name, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CHECK", help=f"which checks: {', '.join(c.name for c in checks)}")
    names = parser.parse_args(words).names
    if unknown := sorted(set(names) - {check.name for check in checks}):
        parser.error(f"there is no check {', '.join(unknown)}: {', '.join(check.name for check in checks)}")

    folder = Path(tempfile.mkdtemp(prefix="gpu_check-"))
    print(f"gpu_check: logs are in {folder}", flush=True)
    chosen = [check for check in checks if not names or check.name in names]
    outcomes: dict[Check, Outcome] = {}
    for number, check in enumerate(chosen, 1):
        # Checks keep what they print and their checkpoints in this folder.
        inside = Call(check.function, (), {"TMPDIR": _made(folder / check.name)})
        (outcomes[check],) = call_all([inside], check.limit_s, folder / check.name / "own")
        print(f"{number:2}. {check.title}: {outcomes[check].line}", flush=True)
        _remove_data(folder / check.name)
    print("\nFor docs/benchmarks.md:\n")
    print(block({check.title: outcome for check, outcome in outcomes.items()}), flush=True)
    return int(any(outcome.status == "failed" for outcome in outcomes.values()))


def _made(folder: Path) -> str:
    os.makedirs(folder)
    return str(folder)


def _remove_data(folder: Path) -> None:
    """Removes checkpoints and the files of tests, which would fill the disk. Logs and results stay."""
    for pattern in ("saved-*", "pytest-of-*"):
        for data in folder.glob(pattern):
            shutil.rmtree(data, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
