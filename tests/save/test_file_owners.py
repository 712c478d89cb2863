"""Which nodes have which files of a save into the fast tier: by whom they are written, and who gets copies."""

import logging
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.formats.native.write_requests import WriteRequest
from mcore_ckpt.ranks.node_map import NodeMap
from mcore_ckpt.save.destination import Written
from mcore_ckpt.save.file_contents import _with_writers, together
from mcore_ckpt.save.nodes import place_files
from mcore_ckpt.save.rank_reports import FileReport
from tests.support.unsharded_model import trainer_of


def nodes_of(*sizes: int, domains: str = "") -> NodeMap:
    """Nodes of so many ranks each; of the domains if they are given, one letter for each node."""
    hosts = [f"n{number}" for number, size in enumerate(sizes) for _ in range(size)]
    return NodeMap.of(hosts, [domains[int(host[1:])] for host in hosts] if domains else hosts)


def file(path: str, crc: int = 7, size: int = 10) -> FileReport:
    return FileReport(path, "model", size, crc, None, "")


@st.composite
def saves(draw: st.DrawFn) -> tuple[NodeMap, list[Written]]:
    """Files that some ranks have written, each of the same bytes wherever it is."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    domains = draw(st.sampled_from(["", "xxyyzz", "xyxyxy", "xyyyyy"]))
    nodes = nodes_of(*sizes, domains=domains)
    writers = st.sets(st.integers(0, sum(sizes) - 1), min_size=1, max_size=4)
    by_path = {f"{number}.pt": draw(writers) for number in range(draw(st.integers(0, 5)))}
    return nodes, [(rank, file(path)) for rank in range(sum(sizes)) for path, some in by_path.items() if rank in some]


@given(saves(), st.integers(0, 4), st.integers(0, 100))
def test_every_file_is_on_as_many_nodes_as_there_can_be(
    save: tuple[NodeMap, list[Written]], replicas: int, save_count: int
) -> None:
    nodes, written = save
    files, placement = place_files(written, nodes, replicas, save_count)
    assert placement.save_count == save_count
    assert placement.nodes == tuple(node.name for node in nodes.all)
    assert [kept.path for _, kept in files] == list(dict.fromkeys(kept.path for _, kept in written))
    assert len(placement.by_file) == len(files)
    for (rank, kept), on in zip(files, placement.by_file, strict=True):
        writers = [nodes.number_of(other) for other, same in written if same.path == kept.path]
        assert rank == min(other for other, same in written if same.path == kept.path)
        assert on[0] == nodes.number_of(rank)
        assert len(set(on)) == len(on)
        # Who has the bytes anyway comes first, and none is left out.
        assert set(on[: len(set(writers))]) == set(writers)
        possible = {*writers, *nodes.preferred(on[0])}
        assert len(on) == max(len(set(writers)), min(1 + replicas, len(possible)))


def test_copies_are_sent_only_if_replicas_are_too_few() -> None:
    nodes = nodes_of(1, 1, 1, 1)
    written = [(0, file("own")), (0, file("both")), (1, file("both")), (3, file("last"))]
    assert place_files(written, nodes, 1, 0)[1].by_file == ((0, 1), (0, 1), (3, 0))
    assert place_files(written, nodes, 2, 0)[1].by_file == ((0, 1, 2), (0, 1, 2), (3, 0, 1))
    assert place_files(written, nodes, 0, 0)[1].by_file == ((0,), (0, 1), (3,))


@pytest.mark.parametrize("other", [file("a", crc=8), file("a", size=11)])
def test_replicas_that_differ_are_not_counted(caplog: pytest.LogCaptureFixture, other: FileReport) -> None:
    """Their node gets a copy if it is the next one, as if it had nothing."""
    written = [(0, file("a")), (1, file("a")), (2, other), (3, file("a"))]
    with caplog.at_level(logging.WARNING):
        files, placement = place_files(written, nodes_of(2, 1, 1), 2, 0)
    assert files == [(0, file("a"))]
    assert placement.by_file == ((0, 2, 1),)
    assert "a: ranks 0 and 2 have different bytes, although they are replicas: n1" in caplog.text


def test_nothing_is_written() -> None:
    assert place_files([], nodes_of(1, 1), 1, 5)[1].by_file == ()


def test_copies_of_racks_are_spread_evenly() -> None:
    nodes = nodes_of(*[2] * 8, domains="xxxxyyyy")
    written = [(rank, file(f"{rank}.pt")) for rank in range(16)]
    on = Counter(node for copies in place_files(written, nodes, 1, 0)[1].by_file for node in copies)
    assert on == dict.fromkeys(range(8), 4)


# -- who writes what all replicas hold ------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    domains=st.sampled_from(["", "xxyyz", "xyxyx"]),
    replicas=st.integers(0, 3),
    shared=st.booleans(),
    data=st.data(),
)
def test_replicas_write_a_file_together_on_as_many_nodes_as_shall_have_it(
    sizes: list[int], domains: str, replicas: int, shared: bool, data: st.DataObject
) -> None:
    nodes = nodes_of(*sizes, domains=domains)
    some = st.lists(st.integers(0, sum(sizes) - 1), min_size=1, unique=True).map(sorted)
    ranks = data.draw(some)
    trainer = replace(trainer_of(torch.nn.Linear(1, 1), None), config=CheckpointConfig(shared_writes=shared))
    writers_of = partial(nodes.writers_of, copies=replicas)
    request = WriteRequest("model.pt", "model", ())
    requests = {}
    for rank in range(sum(sizes)):
        trainer.agreement.rank = rank
        for found in _with_writers(trainer, ranks, request, writers_of):
            assert rank not in requests, "a rank writes a file once"
            requests[rank] = found.writers
    home = nodes.number_of(ranks[0])
    with_replicas = [node for node in nodes.preferred(home) if set(nodes.all[node].ranks) & set(ranks)]
    expected = [home, *with_replicas[:replicas]]
    on_nodes = [[rank for rank in ranks if nodes.number_of(rank) == node] for node in expected]
    if shared:
        assert requests == {rank: tuple(members) for members in on_nodes for rank in members}
    else:
        assert requests == {members[0]: () for members in on_nodes}
    # What is so written needs no copies but where there are too few replicas.
    written = [(rank, file("model.pt")) for rank in sorted(requests)]
    placement = place_files(written, nodes, replicas, 0)[1]
    assert set(placement.by_file[0]) >= set(expected)


def test_without_a_fast_tier_all_replicas_write_one_file() -> None:
    trainer = trainer_of(torch.nn.Linear(1, 1), None)
    request = WriteRequest("model.pt", "model", ())
    assert [found.writers for found in _with_writers(trainer, [0, 3, 5], request, together)] == [(0, 3, 5)]
