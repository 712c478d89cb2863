"""Finds the checkpoints that the nodes of the fast tier have together, and the places to read each checkpoint from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.fast.spread_folder import Source, SpreadFolder
from mcore_ckpt.fast.tier import NodeTier
from mcore_ckpt.formats.native.folder import Folder, LocalFolder
from mcore_ckpt.formats.native.remote_folder import RemoteFolder
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.steps.node_steps import FastCheckpoint, HeldRole, fast_checkpoints

logger = logging.getLogger(__name__)


def own_held(tier: NodeTier | None) -> list[HeldRole]:
    """Returns, on a node's lead, the checkpoints of the node; an empty list on other ranks, and without a fast tier."""
    return tier.held() if tier is not None and tier.is_lead else []


def found_on_nodes(tier: NodeTier | None, records: Sequence[Record]) -> list[FastCheckpoint]:
    """Joins, on rank 0, what the leads have reported as `held`. The latest commit comes first."""
    if tier is None:
        return []
    found = fast_checkpoints(
        (number, [HeldRole.of(item) for item in records[node.lead]["held"]])
        for number, node in enumerate(tier.nodes.all)
    )
    return tier.of_this_run(found)


def to_adopt(found: Sequence[FastCheckpoint], records: Sequence[Record]) -> list[str]:
    """Returns the saves that some node has committed, and another node has not.

    Leaves out saves that are not whole. A node that commits a save deletes its earlier save of the same step, and this
    earlier save may be whole.
    """
    whole = {each.attempt for each in found if each.is_complete}
    held = [HeldRole.of(item) for record in records for item in record["held"]]
    return sorted({each.head.attempt for each in held if not each.is_committed} & whole)


def node_candidate(tier: NodeTier, fast: FastCheckpoint) -> Record:
    """Describes a checkpoint on the nodes as JSON values. The caller sets `below` if the root or store has it, too."""
    folder = str(tier.role_dir(fast.step, fast.role))
    return {"step": fast.step, "folder": folder, "remote": False, **_spread(fast), "below": None}


def _spread(fast: FastCheckpoint) -> Record:
    return {"attempt": fast.attempt, "holders": [[node, has] for node, has in fast.holders]}


def spread_folder(tier: NodeTier, role: str, candidate: Record, below: Folder | None) -> SpreadFolder:
    """Returns the places that have a candidate's files, as this rank sees them: own node, other nodes, root or store.

    `candidate` is what rank 0 has chosen (`load.candidates.candidates_of`). `below` is the same checkpoint in the root
    or the store; None if it is only on the nodes.
    """
    step, count = candidate["step"], len(tier.nodes)
    place = tier.role_dir(step, role)
    holders = {node: tuple((first, last) for first, last in has) for node, has in candidate["holders"]}
    key = f"{file_names.step_name(step)}/{role}"
    # This node comes first, then the next nodes in a circle, so that not all nodes ask the same node.
    sources = [
        Source(LocalFolder(place) if node == tier.number else RemoteFolder(tier.peer(node), key), holders[node])
        for node in sorted(holders, key=lambda node: (node - tier.number) % count)
    ]
    if below is not None:
        sources.append(Source(below))
    return SpreadFolder(place, candidate["attempt"], tuple(sources))


def why_not_whole(tier: NodeTier, checkpoint: FastCheckpoint) -> str:
    """Says which files a checkpoint of the fast tier lacks, and which nodes had these files. Only rank 0 calls this."""
    place = f"{tier.role_dir(checkpoint.step, checkpoint.role)} on the nodes"
    if not checkpoint.is_committed:
        return f"{place}: the save did not finish"
    missing = checkpoint.missing
    if not missing:
        return f"{place}: another role of the step is not whole"
    text = f"{place}: {len(missing)} of {checkpoint.files} files are on no node that is left"
    with suppress(CheckpointError, OSError):
        candidate = {"step": checkpoint.step, **_spread(checkpoint)}
        placement = spread_folder(tier, checkpoint.role, candidate, None).manifest().placement
        if placement is not None:
            had = Counter(placement.nodes[node] for position in missing for node in placement.by_file[position])
            names = ", ".join(name for name, _ in had.most_common(8))
            text += f": they were on {names}, which are lost"
    return text
