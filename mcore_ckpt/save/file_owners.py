"""Lists the files of a save into the fast tier once each, with the nodes that have them or will get copies."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.checkpoint.placement import Placement
from mcore_ckpt.ranks.nodes import Nodes

logger = logging.getLogger(__name__)

Written = tuple[int, WrittenFile]


def place_files(
    written: Sequence[Written], nodes: Nodes, replicas: int, save_count: int
) -> tuple[list[Written], Placement]:
    """Chooses the nodes of each file.

    Data-parallel replicas on several nodes have written the same file. It counts once, and the nodes that have it need
    no copy.

    Args:
        written: the files, each with the rank that has written it, in the order of the ranks.
        nodes: the nodes of the job.
        replicas: how many other nodes shall have each file.
        save_count: see `Placement`.

    Returns:
        The files without repetitions, and the placement of these files.
    """
    first: dict[str, Written] = {}
    holders: dict[str, list[int]] = {}
    for rank, file in written:
        number = nodes.number_of(rank)
        known = first.setdefault(file.path, (rank, file))
        if (known[1].crc32, known[1].size) != (file.crc32, file.size):
            logger.warning(
                "%s: ranks %d and %d have different bytes, although they are replicas: %s gets a copy of rank %d's",
                file.path,
                known[0],
                rank,
                nodes.all[number].name,
                known[0],
            )
            continue
        holders.setdefault(file.path, []).append(number)
    by_file = tuple(_with_copies(nodes, holders[path], replicas) for path in first)
    names = tuple(node.name for node in nodes.all)
    return list(first.values()), Placement(names, by_file, save_count)


def _with_copies(nodes: Nodes, holders: Sequence[int], replicas: int) -> tuple[int, ...]:
    found = list(dict.fromkeys(holders))
    for other in nodes.preferred(found[0]):
        if len(found) > replicas:
            break
        if other not in found:
            found.append(other)
    return tuple(found)
