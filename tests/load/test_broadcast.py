"""Replicated tensors: one rank reads each batch for all, and what cannot be sent is refused."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io import tuning
from mcore_ckpt.load.broadcast import batches, refuse_broadcast, to_read
from mcore_ckpt.load.fill import TensorFill
from mcore_ckpt.ranks.topology import Replicas

GROUPS: Sequence[tuple[int, ...]] = ((), (0,), (0, 1), (0, 2, 4))


def fill(numel: int, replicas: tuple[int, ...], dtype: torch.dtype) -> TensorFill:
    target = torch.zeros(numel, dtype=dtype)
    return TensorFill((), dtype, lambda: target, replicas=replicas)


fills = st.lists(
    st.builds(fill, st.integers(0, 9), st.sampled_from(GROUPS), st.sampled_from([torch.float32, torch.bfloat16])),
    max_size=12,
)


@given(fills, st.integers(1, 60))
def test_each_tensor_is_read_by_one_of_its_replicas(found: list[TensorFill], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "BROADCAST_BYTES", limit)
        shared = batches(found)
    for batch in shared:
        assert batch.reader in batch.replicas
        kinds = {(each.replicas, each.target().dtype) for each in batch.fills}
        assert kinds == {(batch.replicas, batch.fills[0].dtype)}
        nbytes = sum(each.target().nbytes for each in batch.fills)
        assert len(batch.fills) == 1 or nbytes <= limit
    for each in found:
        readers = [rank for rank in range(6) if any(each is other for other in to_read(found, shared, rank))]
        if len(each.replicas) > 1:
            assert len(readers) == 1
            assert readers[0] in each.replicas
        else:
            assert readers == list(range(6)), "a tensor without replicas is read by each rank that has it"


def test_the_replicas_read_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BROADCAST_BYTES", 8)
    found = [fill(2, (0, 2, 4), torch.float32) for _ in range(4)]
    assert [batch.reader for batch in batches(found)] == [0, 2, 4, 0]
    assert [len(batch.fills) for batch in batches([fill(1, (0, 1), torch.float32) for _ in range(5)])] == [2, 2, 1]


@pytest.mark.parametrize(("backend", "refused"), [("nccl", True), ("gloo", False)])
def test_nccl_does_not_send_from_the_cpu(backend: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, replicas = torch.nn.Linear(2, 2), Replicas((0, 1))
    refuse_broadcast([chunk], replicas, "load_replicas='broadcast'")  # there are no process groups
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    refuse_broadcast([torch.nn.Module()], replicas, "load_replicas='broadcast'")
    if not refused:
        refuse_broadcast([chunk], replicas, "load_replicas='broadcast'")
        return
    with pytest.raises(UnsupportedError, match=r"^load_replicas='broadcast': parameters are in CPU memory, but NCCL"):
        refuse_broadcast([torch.nn.Module(), chunk], replicas, "load_replicas='broadcast'")
