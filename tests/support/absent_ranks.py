"""Makes this process one rank of a world whose other ranks do not exist: groups can be made, but not used."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def rank_of(world: int, rank: int) -> Iterator[None]:
    """Lets the block run as this rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
