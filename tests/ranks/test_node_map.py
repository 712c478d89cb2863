"""Ranks grouped by node, and the nodes that copies go to, in jobs of any shape."""

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mcore_ckpt.ranks.node_map import Node, NodeMap


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """The host and the domain of each rank. All ranks of a host name the same domain."""
    hosts = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=20))
    domains = {host: draw(st.sampled_from("xyz")) for host in sorted(set(hosts))}
    return hosts, [domains[host] for host in hosts]


@given(jobs())
def test_each_rank_is_on_the_node_of_its_host(job: tuple[list[str], list[str]]) -> None:
    hosts, domains = job
    nodes = NodeMap.of(hosts, domains)
    assert len(nodes) == len(set(hosts))
    for rank, host in enumerate(hosts):
        node = nodes.all[nodes.number_of(rank)]
        assert (node.host, node.domain) == (host, domains[rank])
        assert rank in node.ranks
        assert nodes.number_of_host(host) == nodes.number_of(rank)
    assert sorted(rank for node in nodes.all for rank in node.ranks) == list(range(len(hosts)))
    leads = [node.lead for node in nodes.all]
    assert leads == sorted(leads)
    assert all(node.lead == min(node.ranks) for node in nodes.all)


@given(jobs())
def test_copies_go_to_other_domains_and_to_new_ones_first(job: tuple[list[str], list[str]]) -> None:
    nodes = NodeMap.of(*job)
    for number, node in enumerate(nodes.all):
        chosen = nodes.preferred(number)
        outside = {other for other, there in enumerate(nodes.all) if there.domain != node.domain}
        assert set(chosen) == outside
        assert len(chosen) == len(outside)
        # The first copies are in as many domains as there are.
        domains = [nodes.all[other].domain for other in chosen]
        others = len(set(domains))
        assert len(set(domains[:others])) == others


@given(st.integers(1, 40), st.data())
def test_without_domains_the_next_nodes_are_chosen(count: int, data: st.DataObject) -> None:
    names = [f"n{number}" for number in range(count)]
    number = data.draw(st.integers(0, count - 1))
    assert NodeMap.of(names, names).preferred(number) == tuple((number + step) % count for step in range(1, count))


@pytest.mark.parametrize(("domains", "size"), [(7, 1), (4, 3), (3, 4), (2, 6)])
@pytest.mark.parametrize("in_turn", [True, False])
def test_every_node_gets_the_copies_of_as_many_others(domains: int, size: int, in_turn: bool) -> None:
    """With any number of replicas. Otherwise one node's memory would fill while another's is empty."""
    racks = [f"r{n % domains if in_turn else n // size}" for n in range(domains * size)]
    nodes = NodeMap.of([f"n{n}" for n in range(len(racks))], racks)
    for replicas in range(1, domains):
        given_to = Counter(other for number in range(len(racks)) for other in nodes.preferred(number)[:replicas])
        assert given_to == dict.fromkeys(range(len(racks)), replicas)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=8))
def test_racks_of_different_sizes_get_as_many_copies_as_they_send(sizes: list[int]) -> None:
    racks = [f"r{rack}" for rack, size in enumerate(sizes) for _ in range(size)]
    assume(max(sizes) * 2 <= len(racks))  # otherwise the other racks have too few nodes
    nodes = NodeMap.of([f"n{n}" for n in range(len(racks))], racks)
    assert sorted(nodes.preferred(number)[0] for number in range(len(racks))) == list(range(len(racks)))


@pytest.mark.parametrize(
    ("domains", "number", "expected"),
    [
        ("xxyy", 0, (2, 3)),
        ("xxyy", 1, (3, 2)),
        ("xyxy", 0, (1, 3)),
        ("xyxy", 2, (3, 1)),
        ("xyzxyz", 3, (4, 5, 1, 2)),
        ("xxx", 1, ()),
    ],
)
def test_preferred_nodes_of_racks(domains: str, number: int, expected: tuple[int, ...]) -> None:
    assert NodeMap.of([f"n{n}" for n in range(len(domains))], domains).preferred(number) == expected


@given(jobs(), st.data())
def test_some_ranks_by_node(job: tuple[list[str], list[str]], data: st.DataObject) -> None:
    nodes = NodeMap.of(*job)
    some = data.draw(st.lists(st.integers(0, len(job[0]) - 1), unique=True))
    grouped = nodes.by_node(some)
    assert [rank for rank in some if nodes.number_of(rank) in grouped] == some
    for number, members in grouped.items():
        assert members == tuple(rank for rank in some if nodes.number_of(rank) == number)
    assert list(grouped) == list(dict.fromkeys(map(nodes.number_of, some)))


def test_a_name_is_the_host_without_its_boot() -> None:
    assert Node("node7 0badcafe pid:[4026531836]", "rack3", (4, 5)).name == "node7"
