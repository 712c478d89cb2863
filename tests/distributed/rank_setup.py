"""What makes a process a rank of these tests: its process groups, and that it stays in step with the others."""

import os
import traceback
from collections.abc import Generator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt.io import tuning
from tests.support import emerging  # noqa: F401, before any test imports megatron

# A rank that raises leaves the others in a collective until this has passed.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)

# A group that no test uses: it is in step whatever a failed test leaves behind in the others.
AGREEMENT_GROUP = pytest.StashKey[dist.ProcessGroup]()

# Warnings of megatron and torch about each other, by the thousand; none is about a checkpoint.
QUIET = (
    "ignore::Warning:megatron",
    "ignore::Warning:torch",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


def hide_devices_from_too_many_ranks() -> None:
    """Makes ranks use the CPU where there is no device for each of them, which NCCL needs."""
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 0)):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def set_up(config: pytest.Config) -> None:
    """Makes this process a rank. Where it has a default group already, that one is used."""
    # Small enough that these models are shared by several writers, each in several pieces.
    tuning.SHARE_BYTES = tuning.WRITE_BYTES = 4096
    if not dist.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            backend = "nccl"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    config.stash[AGREEMENT_GROUP] = dist.new_group(backend="gloo", timeout=4 * COLLECTIVE_TIMEOUT)


def alike(item: pytest.Item) -> Generator[None, None, None]:
    """One phase of a test: it fails on all ranks if it fails on one, else they would go on with different tests."""
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
