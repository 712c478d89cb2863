"""Compiles the tests as pytest does, with their assertions rewritten, and what they import of packages just installed.

Without it, the workers of pytest and the servers of their ranks, which start together, would each do so: pip is told to
compile nothing, and three processes that import torch, transformers and megatron at once took 38 CPU seconds for the
first time, where one takes 14 and then each of them 5.
"""

import importlib
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite  # pytest has no public way to write what it caches; requirements.txt pins it

TESTS = Path(__file__).parents[1] / "tests"
# They import most of what all tests do.
MODULES = (
    "tests.distributed.training",
    "tests.support.checkpoints",
    "tests.support.tiny_models",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
)


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
    status = pytest.main(["--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist"], plugins=[CompileAndEnd()])
    sys.path.insert(0, str(TESTS.parent))
    for module in MODULES:
        importlib.import_module(module)
    sys.exit(status)
