"""Damages checkpoints at random for a while: `python scripts/fuzz.py --seconds 300 [--seed N] [--target NAME]`.

Exits with 1 at the first thing that a reader must not do, naming the seed and the case. See
tests/faults/hostile/fuzzing.py.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.faults.hostile.fuzzing import TARGETS, Escaped, Sample, fuzz

# More than any reader takes for a few kilobytes, and than torch has mapped.
_MOST_BYTES = 24 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    names = args.target or list(TARGETS)
    failed = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            sample = Sample.make(Path(folder))
            try:
                count = fuzz(sample, name, args.seed, _for(args.seconds / len(names)))
            except Escaped as error:
                traceback.print_exception(error.__cause__ or error)
                print(error)
                failed = 1
            else:
                print(f"{name}: {count} cases", flush=True)
    return failed


def _for(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


if __name__ == "__main__":
    sys.exit(main())
