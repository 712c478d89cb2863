"""Launches a file of tests/distributed by torchrun: without it, all of them run on forked ranks."""

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_tests_of_several_ranks_run_under_torchrun(run_python: Callable[..., str], inner_pytest: list[str]) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    output = run_python(*torchrun, *inner_pytest, "tests/distributed/test_paths.py", "-k", "no_step")
    # Rank 0 reports for both.
    assert output.count(" passed") == 1, output
