"""Which checkpoints a load tries, in which order, and from where it reads each: nodes, root and store."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import ManifestSummary
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.config import FastTier
from mcore_ckpt.fast.found import found_on_nodes, spread_folder, to_adopt, why_not_whole
from mcore_ckpt.fast.tcp_transport import TcpTransport
from mcore_ckpt.fast.tier import NodeTier
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.formats.native.remote_folder import RemoteFolder
from mcore_ckpt.load.candidates import AnyStep, candidates_of, folder_of
from mcore_ckpt.ranks.node_map import Node, NodeMap
from mcore_ckpt.steps.choice import choose
from mcore_ckpt.steps.listing import step_status
from mcore_ckpt.steps.node_steps import FastCheckpoint, HeldRole, node_steps
from mcore_ckpt.steps.remote_steps import RemoteRole, RemoteStep
from mcore_ckpt.steps.trainer_lock import TrainerLock
from tests.support import small_model

STEP = small_model.STEP
FILES = 4


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NodeTier]:
    """Node 1 of three nodes of two ranks. Their servers do not answer."""
    nodes = NodeMap(tuple(Node(f"n{n}", f"n{n}", (2 * n, 2 * n + 1), "127.0.0.1:1") for n in range(3)))
    folder = tmp_path / "node"
    lock = TrainerLock(folder, "actor")
    with closing(
        NodeTier(FastTier(folder), "actor", nodes, 1, 2, folder, TcpTransport(b"secret", 0.1), None, lock)
    ) as tier:
        yield tier


def held(
    attempt: str = "a", has: Sequence[tuple[int, int]] = ((0, FILES - 1),), step: int = 7, is_committed: bool = True
) -> HeldRole:
    created = "2025-01-01T00:00:00+00:00"
    return HeldRole(ManifestSummary(step, "actor", ("actor",), attempt, created), FILES, tuple(has), is_committed, 0)


def records_of(tier: NodeTier, by_node: dict[int, list[HeldRole]]) -> list[dict[str, Any]]:
    """What the ranks have sent: only leads know something."""
    records: list[dict[str, Any]] = [{"held": []} for node in tier.nodes.all for _ in node.ranks]
    for number, some in by_node.items():
        records[tier.nodes.all[number].lead]["held"] = [each.to_record() for each in some]
    return records


def found_in(tier: NodeTier, by_node: dict[int, list[HeldRole]]) -> list[FastCheckpoint]:
    return found_on_nodes(tier, records_of(tier, by_node))


def candidates(tier: NodeTier, below: list[AnyStep], found: list[FastCheckpoint]) -> list[dict[str, Any]]:
    steps = [*below, *node_steps(found, ("actor",), lambda checkpoint: "lost")]
    return candidates_of("actor", choose(steps, ("actor",)).steps, tier)


def test_what_the_leads_tell_is_of_their_nodes(tier: NodeTier) -> None:
    found = found_in(tier, {0: [held(has=[(0, 1)])], 2: [held(has=[(2, 3)]), held("b", step=9)]})
    assert [(each.step, each.attempt, each.holders) for each in found] == [
        (9, "b", ((2, ((0, 3),)),)),
        (7, "a", ((0, ((0, 1),)), (2, ((2, 3),)))),
    ]
    assert found_on_nodes(None, [{"held": []}]) == []


def test_a_commit_is_finished_only_if_the_checkpoint_is_whole(tier: NodeTier) -> None:
    """On a node that finishes it, it takes the place of an earlier save of the step, which may be whole."""
    staged, first = held(has=[(2, 3)], is_committed=False), held("first")
    whole = {0: [held(has=[(0, 1)])], 1: [staged, first]}
    assert to_adopt(found_in(tier, whole), records_of(tier, whole)) == ["a"]
    part = {0: [held(has=[(0, 0)])], 1: [staged, first]}
    assert to_adopt(found_in(tier, part), records_of(tier, part)) == []
    nowhere = {1: [held(is_committed=False), first]}
    assert to_adopt(found_in(tier, nowhere), records_of(tier, nowhere)) == []
    everywhere = {0: [held()], 1: [held()]}
    assert to_adopt(found_in(tier, everywhere), records_of(tier, everywhere)) == []


def test_the_newest_of_nodes_root_and_store_is_the_first(tier: NodeTier, tmp_path: Path) -> None:
    root = small_model.make(tmp_path / "root", small_model.tensors_of())
    (same,) = found_in(tier, {0: [held(read_manifest(root).attempt, step=STEP)]})
    (newer,) = found_in(tier, {0: [held("n", step=9)]})
    store = RemoteStep(6, {"actor": RemoteRole(6, "actor", ("actor",), "c" * 32, "")})
    found = candidates(tier, [store, step_status(root.parent)], [newer, same])
    assert [(each["step"], each.get("attempt"), each.get("below")) for each in found] == [
        (9, "n", None),
        (6, None, None),
        (STEP, same.attempt, str(root)),
    ]
    on_nodes, in_store, in_both = (folder_of(None, each, "actor", tier) for each in (found[0], found[2], found[2]))
    assert len(on_nodes.sources) == 1  # type: ignore[attr-defined]
    assert len(in_both.sources) == 2  # type: ignore[attr-defined]
    assert in_store.manifest() == read_manifest(root)


def test_another_save_of_the_same_step_precedes_that_of_the_root(tier: NodeTier, tmp_path: Path) -> None:
    root = small_model.make(tmp_path / "root", small_model.tensors_of())
    (other,) = found_in(tier, {0: [held("other", step=STEP)]})
    found = candidates(tier, [step_status(root.parent)], [other])
    assert [each.get("attempt") for each in found] == ["other", None]


def test_own_node_then_the_next_ones_then_the_root(tier: NodeTier, tmp_path: Path) -> None:
    (checkpoint,) = found_in(tier, {n: [held(has=[(n, n + 1)])] for n in range(3)})
    (candidate,) = candidates(tier, [], [checkpoint])
    below = LocalFolder(tmp_path / "root")
    folder = spread_folder(tier, "actor", candidate, below)
    assert folder.place == tier.role_dir(7) == file_names.step_dir(tier.folder, 7) / "actor"
    kinds = [(type(source.folder), str(source.folder), source.has) for source in folder.sources]
    assert kinds == [
        (LocalFolder, str(tier.role_dir(7)), ((1, 2),)),
        (RemoteFolder, "n2:global_steps_7/actor", ((2, 3),)),
        (RemoteFolder, "n0:global_steps_7/actor", ((0, 1),)),
        (LocalFolder, str(tmp_path / "root"), None),
    ]


def test_why_a_step_is_lost(tier: NodeTier) -> None:
    def reason(by_node: dict[int, list[HeldRole]]) -> str:
        (checkpoint,) = found_in(tier, by_node)
        return why_not_whole(tier, checkpoint)

    place = f"{tier.role_dir(7)} on the nodes"
    assert reason({0: [held(is_committed=False)]}) == f"{place}: the save did not finish"
    assert reason({0: [held()]}) == f"{place}: another role of the step is not whole"
    # Even if no node answers that could say which nodes had the files.
    assert reason({0: [held(has=[(1, 2)])]}) == f"{place}: 2 of {FILES} files are on no node that is left"
