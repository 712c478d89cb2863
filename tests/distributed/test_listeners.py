"""Each rank tells its own listeners, with its own bytes; what rank 0 alone does, it alone tells."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt import Event
from mcore_ckpt.errors import CommitError
from mcore_ckpt.events import Committed, Failed
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import manager_of
from tests.distributed.layouts import LAYOUTS
from tests.distributed.training import build, parallel
from tests.support.told_events import DISK_ERROR, broken_disk

pytestmark = pytest.mark.world(2)


def test_each_rank_tells_its_own_events(shared_path: Path) -> None:
    rank, layout = dist.get_rank(), LAYOUTS["dp2-bf16"]
    got: list[Event] = []
    more: list[Event] = []
    with parallel(layout):
        # Ranks may have different listeners.
        listeners = (got.append, more.append)[: 1 + rank]
        manager = manager_of(build(layout, seed=1), shared_path, max_to_keep=1, listeners=listeners)
        reports = [manager.save(step).wait() for step in (1, 2)]
        manager.load()
        with broken_disk() if rank == 1 else nullcontext():
            error = error_of(lambda: manager.save(3))
        raised_everywhere(CommitError, error)
        manager.close()
    wanted = Counter(Started=3, Captured=3, Written=3, Committed=2, Failed=1, Loaded=1, Deleted=1)
    wanted -= Counter(Captured=1, Written=1, Deleted=1) if rank == 1 else Counter()
    with everywhere():
        assert Counter(type(event).__name__ for event in got) == wanted
        assert more == (got if rank == 1 else [])
        assert {event.rank for event in got} == {rank}
        assert [e.nbytes for e in got if isinstance(e, Committed)] == [report.nbytes for report in reports]
        (failed,) = [event for event in got if isinstance(event, Failed)]
        assert "rank 1: " in failed.error.message
        assert DISK_ERROR in failed.error.message
        assert failed.phases[-1].name == ("write" if rank == 1 else "commit")
