"""Who writes which bytes of a file, and what of which tensor is in them."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_ckpt.checkpoint.index import Alias
from mcore_ckpt.formats.native.file_plan import FilePlan, StructureCache, plan_file
from mcore_ckpt.formats.native.replica_shares import share_out
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.io import tuning
from mcore_ckpt.io.pages import PAGE_BYTES, page_ceil, page_floor
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region

ranks = st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True).map(tuple)
leasts = st.integers(1, 8).map(lambda pages: pages * PAGE_BYTES)


@given(st.integers(0, 1 << 40))
def test_pages(offset: int) -> None:
    low, high = page_floor(offset), page_ceil(offset)
    assert low % PAGE_BYTES == high % PAGE_BYTES == 0
    assert low <= offset <= high
    assert high - low == (PAGE_BYTES if offset % PAGE_BYTES else 0)


@given(ranks=ranks, lengths=st.lists(st.integers(1, 9 * PAGE_BYTES), min_size=1, max_size=60), least=leasts)
def test_ranges_tile_the_image_and_begin_where_a_tensor_begins(
    ranks: tuple[int, ...], lengths: list[int], least: int
) -> None:
    *starts, end = accumulate(lengths, initial=0)
    share = share_out(ranks, end, least, starts)
    assert (share.cuts[0], share.cuts[-1]) == (0, end)
    assert len(share.cuts) == len(share.writers) + 1
    assert set(share.cuts[1:-1]) <= set(map(page_ceil, starts))
    ranges = [share.range_of(rank) for rank in share.writers]
    assert ranges == list(pairwise(share.cuts))
    sizes = [stop - start for start, stop in ranges]
    assert min(sizes) > 0
    assert len(sizes) == 1 or len(sizes) <= end // least
    # A rank has at most one tensor more than its fair part, and no other cuts would have a shorter longest range.
    count = max(1, min(len(ranks), end // least))
    assert max(sizes) <= -(-end // count) + max(lengths) + PAGE_BYTES
    if count == 2:
        possible = [cut for cut in map(page_ceil, starts) if 0 < cut < end]
        assert max(sizes) == min([max(cut, end - cut) for cut in possible], default=end)
    # The first rank owns the file, and so has its end, which only the owner can write.
    assert share.owner == ranks[0] == share.writers[-1]
    assert set(share.writers) == set(ranks[: len(share.writers)])
    assert all(share.range_of(rank) == (0, 0) for rank in {*ranks, 100} - set(share.writers))


def request_of(sizes: list[int], writers: tuple[int, ...] = (), name: str = "t") -> WriteRequest:
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    writes = tuple(
        TensorWrite((f"{name}{i}",), ShardKey(f"{name}{i}", "model"), Region.whole(tuple(t.shape)), t, tuple(t.shape))
        for i, t in enumerate(tensors)
    )
    return WriteRequest("model/a.pt", "model", writes, writers=writers)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "COPY_GROUP_BYTES", 3 * PAGE_BYTES)


@pytest.mark.usefixtures("small_groups")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 5 * PAGE_BYTES), max_size=12), writers=ranks)
def test_each_tensor_comes_from_one_writer(sizes: list[int], writers: tuple[int, ...]) -> None:
    images, request = StructureCache(), request_of(sizes, writers)
    plans = [plan_file(request, rank, images) for rank in writers]
    by_tensor: dict[int, list[tuple[int, int, int]]] = {number: [] for number, size in enumerate(sizes) if size}
    for plan in sorted(plans, key=lambda plan: plan.start):
        assert (plan.start, plan.stop) in ((0, 0), *pairwise(plan.share.cuts))
        assert 0 <= plan.head < PAGE_BYTES
        position = plan.start - plan.head
        parts = plan.parts
        for number, skip, at, nbytes in zip(parts.tensor, parts.skip, parts.at, parts.nbytes, strict=True):
            assert 0 < nbytes <= tuning.COPY_GROUP_BYTES
            assert position <= at
            assert at + nbytes <= plan.stop
            assert at == plan.pt.slots[number].offset + skip
            by_tensor[number].append((plan.start, skip, skip + nbytes))
            position = at + nbytes
    for number, spans in by_tensor.items():
        # A writer that has the first bytes of a tensor on its last page may not be the one that has all of it.
        writer = spans[-1][0]
        stops = [0, *(stop for start, _, stop in spans if start == writer)]
        assert [skip for start, skip, _ in spans if start == writer] == stops[:-1]
        assert stops[-1] == sizes[number]
        assert all(stop < PAGE_BYTES for start, _, stop in spans if start != writer)


def plans_of(*requests: WriteRequest) -> list[FilePlan]:
    return [plan_file(request, 0, StructureCache()) for request in requests]


def test_the_structure_is_the_same_for_replicas_and_for_nobody_else() -> None:
    sizes, writers = [5000, 9000], (0, 1)
    base = request_of(sizes, writers)
    (one, again, *others) = plans_of(
        base,
        request_of(sizes, writers),
        request_of(sizes, (0, 2)),
        request_of(sizes),
        request_of([5000, 8999], writers),
        request_of([9000, 5000], writers),
        request_of(sizes, writers, name="u"),
        WriteRequest(
            base.path,
            base.kind,
            tuple(
                TensorWrite(w.path, w.key, w.region, w.tensor.view(torch.int8), w.shape, w.is_buffer)
                for w in base.tensors
            ),
            writers=writers,
        ),
    )
    assert one.structure == again.structure
    assert len({plan.structure for plan in (one, *others)}) == 1 + len(others)


def test_the_names_of_a_file_are_those_of_its_tensors_and_aliases_once() -> None:
    base = request_of([3, 4])
    alias = Alias(ShardKey("elsewhere", "param"), "model", Region.whole((3,)), "uint8")
    same = Alias(ShardKey("t0", "param"), "model", Region.whole((3,)), "uint8")
    plain, more = plans_of(base, WriteRequest(base.path, base.kind, base.tensors, (alias, same)))
    assert plain.names == ("t0", "t1")
    assert more.names == ("t0", "t1", "elsewhere")
    assert plain.holds != more.holds
