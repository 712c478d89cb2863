"""Groups the ranks of a job by the node that they run on, and chooses the nodes that get copies of a node's files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Node:
    """One node of the job: a machine, or a container with its own folders.

    Attributes:
        host: the result of `hosts.this_host` on the node.
        domain: the failure domain, such as a rack. Nodes that fail together have the same domain.
        ranks: the world ranks that run on the node, ascending. The first of these ranks is the node's lead.
        address: "host:port" of the lead's peer server; empty until it is known.
    """

    host: str
    domain: str
    ranks: tuple[int, ...]
    address: str = ""

    @property
    def lead(self) -> int:
        """The rank that does all work that is needed once per node."""
        return self.ranks[0]

    @property
    def name(self) -> str:
        """The name of the host, for messages."""
        return self.host.partition(" ")[0]


@dataclass(frozen=True)
class NodeMap:
    """All nodes of the job, in the order of their leads.

    Example:
        >>> nodes = NodeMap.of(["a", "a", "b", "b"], ["a", "a", "b", "b"])
        >>> nodes.number_of(3), nodes.preferred(1)
        (1, (0,))
    """

    all: tuple[Node, ...]

    @staticmethod
    def of(hosts: Sequence[str], domains: Sequence[str]) -> NodeMap:
        """Groups the ranks by host. `hosts[rank]` and `domains[rank]` belong to world rank `rank`."""
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks.setdefault(host, []).append(rank)
        return NodeMap(tuple(Node(host, domains[members[0]], tuple(members)) for host, members in ranks.items()))

    def __len__(self) -> int:
        return len(self.all)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {node.host: number for number, node in enumerate(self.all)}

    @cached_property
    def _by_rank(self) -> dict[int, int]:
        return {rank: number for number, node in enumerate(self.all) for rank in node.ranks}

    def number_of(self, rank: int) -> int:
        """Returns the number of the node that a world rank runs on."""
        return self._by_rank[rank]

    def number_of_host(self, host: str) -> int:
        """Returns the number of the node with this host."""
        return self._numbers[host]

    @cached_property
    def _by_domain(self) -> tuple[tuple[int, ...], int]:
        """The nodes' numbers, grouped by domain, and the number of nodes in the largest domain."""
        members: dict[str, list[int]] = {}
        for number, node in enumerate(self.all):
            members.setdefault(node.domain, []).append(number)
        return tuple(number for group in members.values() for number in group), max(map(len, members.values()))

    @cached_property
    def _preferred(self) -> dict[int, tuple[int, ...]]:
        return {}

    def preferred(self, number: int) -> tuple[int, ...]:
        """Returns the nodes that copies of a node's files may go to, the best first.

        These are the nodes of other failure domains. The list has one node of each other domain first, then a second
        node of each domain, and so on. If no domains are given, the node with the next number is the best.
        """
        if number not in self._preferred:  # cached, because a save asks once for each file
            self._preferred[number] = self._in_order(number)
        return self._preferred[number]

    def _in_order(self, number: int) -> tuple[int, ...]:
        # The nodes are ordered by domain, and `step` is the number of nodes in the largest domain. So the node that
        # comes `step` places after a node is in another domain, unless one domain has more than half of all nodes.
        # Because `step` is the same for all nodes, each node gets the copies of one other node. If each node chose the
        # first node of the next domain, that node would get the copies of a whole domain.
        in_order, step = self._by_domain
        count, at = len(in_order), in_order.index(number)
        steps = (*range(step, step * count, step), *range(1, count))
        others = dict.fromkeys(in_order[(at + far) % count] for far in steps)
        own = self.all[number].domain
        turns: dict[int, int] = {}
        seen: Counter[str] = Counter()
        for other in others:
            domain = self.all[other].domain
            if domain != own:
                turns[other] = seen[domain]
                seen[domain] += 1
        return tuple(sorted(turns, key=turns.__getitem__))

    def by_node(self, ranks: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Groups some ranks by the number of their node."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.number_of(rank), []).append(rank)
        return {number: tuple(members) for number, members in found.items()}

    def writers_of(self, replicas: Sequence[int], copies: int) -> list[tuple[int, ...]]:
        """Groups replicas of a file by node. The replicas on one node together write the file into the node's folder.

        There is one group on the node of the first replica, and one group on each of up to `copies` other nodes. These
        other nodes then need no copy. Replicas in no group do not write.
        """
        by_node, home = self.by_node(replicas), self.number_of(replicas[0])
        others = [node for node in self.preferred(home) if node in by_node][:copies]
        return [by_node[node] for node in (home, *others)]
