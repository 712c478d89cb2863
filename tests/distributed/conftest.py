"""Run by torchrun, one pytest per rank: `torchrun --nproc_per_node N -m pytest tests/distributed`.

Each launch runs the tests that are marked with its world size. A test passes on all ranks or fails on all.
"""

import os
import shutil
import tempfile
import traceback
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt.io import tuning

# Under a plain pytest there is no process group; tests/test_distributed.py launches torchrun for each world size.
collect_ignore_glob = [] if "WORLD_SIZE" in os.environ else ["test_*.py"]

# A rank that raises leaves the others in a collective until this has passed.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)

# Of its own, which no test uses: it is in step whatever a failed test leaves behind in the others.
AGREEMENT_GROUP = pytest.StashKey[dist.ProcessGroup]()

if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 0)):
    # NCCL wants a device for each rank; with fewer the CPU has to do, and nothing may find those that are there.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


# Of megatron and torch about each other, by the thousand; none is about a checkpoint.
QUIET = (
    "ignore::Warning:megatron",
    "ignore::Warning:torch",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


@pytest.hookimpl(tryfirst=True)  # before pytest makes its folders
def pytest_cmdline_main(config: pytest.Config) -> None:
    if "WORLD_SIZE" in os.environ:
        # Each process cleans pytest's numbered folders up at its end: ranks that share them race, and one fails.
        config.option.basetemp = tempfile.mkdtemp(prefix=f"rank{os.environ['RANK']}-")


@pytest.hookimpl(trylast=True)  # after the terminal reporter has been registered
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "world(size): the number of ranks that this test runs on")
    for warning in QUIET:
        config.addinivalue_line("filterwarnings", warning)
    if "WORLD_SIZE" not in os.environ:
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
    # Small enough that these models are shared by several writers, each in several pieces.
    tuning.SHARE_BYTES = tuning.WRITE_BYTES = 4096
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    config.stash[AGREEMENT_GROUP] = dist.new_group(backend="gloo", timeout=4 * COLLECTIVE_TIMEOUT)
    if dist.get_rank() > 0:
        # Rank 0 reports for all (pytest_runtest_call below).
        config.pluginmanager.unregister(name="terminalreporter")


def pytest_unconfigure(config: pytest.Config) -> None:
    group = config.stash.get(AGREEMENT_GROUP, None)
    if group is not None:
        # torchrun ends all ranks when one has failed: let rank 0 report first.
        dist.barrier(group=group)
        dist.destroy_process_group()
        shutil.rmtree(config.option.basetemp, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "WORLD_SIZE" not in os.environ:
        return
    others = [
        item for item in items if [mark.args[0] for mark in item.iter_markers("world")] != [dist.get_world_size()]
    ]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    yield from _alike(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield from _alike(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield from _alike(item)


def _alike(item: pytest.Item) -> Generator[None, None, None]:
    """One phase of a test: what fails on one rank fails on all, else they would go on with different tests."""
    error: BaseException | None = None
    try:
        yield
    except (Exception, pytest.fail.Exception) as raised:  # the second, which `pytest.raises` raises, is no Exception
        error = raised
    report = None if error is None else (type(error).__name__, "".join(traceback.format_exception(error)))
    reports = _exchange(report, item.config.stash[AGREEMENT_GROUP])
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if not failed:
        return
    if len({name for name, _ in failed.values()}) > 1 or len(failed) < len(reports):
        # Some are still owed a collective that the others will never enter.
        item.session.shouldstop = f"ranks {sorted(failed)} of {len(reports)} failed, and not alike"
    if error is not None:
        for rank, (_, text) in failed.items():
            if rank != dist.get_rank():
                error.add_note(f"and on rank {rank}:\n{text}")
        raise error
    rank, (_, text) = next(iter(failed.items()))
    pytest.fail(f"on rank {rank}:\n{text}", pytrace=False)


def _exchange(report: tuple[str, str] | None, group: dist.ProcessGroup) -> list[tuple[str, str] | None]:
    reports: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report, group=group)
    return reports


@pytest.fixture
def shared_path(tmp_path: Path) -> Path:
    """One folder for all ranks: rank 0's."""
    paths: list[Path] = [tmp_path]
    dist.broadcast_object_list(paths, src=0)
    return paths[0]
