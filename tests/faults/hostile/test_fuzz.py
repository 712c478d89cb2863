"""A short, always equal run of the fuzzer; `python scripts/fuzz.py --seconds N` runs longer ones."""

import os
from pathlib import Path

import pytest

from tests.faults.hostile.fuzzing import TARGETS, Sample, fuzz

CASES = int(os.environ.get("MCORE_CKPT_FUZZ_CASES", "60"))


@pytest.mark.parametrize("target", TARGETS)
def test_only_our_errors_come_out(target: str, tmp_path: Path) -> None:
    assert fuzz(Sample.make(tmp_path), target, 0, iter(range(CASES))) == CASES
