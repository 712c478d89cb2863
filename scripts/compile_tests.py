"""Compiles the tests as pytest does, with their assertions rewritten, so that its workers find them compiled.

Without it, each of the workers, and each server of their ranks, rewrites all of them at its start.
"""

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite  # pytest has no public way to write what it caches; requirements.txt pins it

TESTS = Path(__file__).parents[1] / "tests"


class CompileAndEnd:
    """A plug-in of pytest that runs no test."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        state = config.stash[rewrite.assertstate_key]
        for file in sorted([*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")]):
            folder = rewrite.get_cache_dir(file)
            compiled = folder / (file.stem + rewrite.PYC_TAIL)
            if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(folder):
                stat, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(state, code, stat, compiled)
        return 0


if __name__ == "__main__":
    sys.exit(pytest.main(["--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist"], plugins=[CompileAndEnd()]))
