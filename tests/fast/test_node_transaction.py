"""One node's part of a commit into the fast tier, and what it does with what other nodes have."""

import logging
import shutil
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, encode_manifest
from mcore_ckpt.checkpoint.placement import Placement
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointError, CommitError
from mcore_ckpt.fast import transaction as node_transaction
from mcore_ckpt.fast.peer_server import PeerServer
from mcore_ckpt.fast.peer_store import PeerStore
from mcore_ckpt.fast.transaction import (
    adopt,
    commit_on_nodes,
    committed_manifest,
    make_staging,
    remove_staging,
    rename_committed,
)
from mcore_ckpt.ranks.node_map import NodeMap
from mcore_ckpt.steps.node_steps import HeldRole, files_here, held_roles
from mcore_ckpt.steps.runs import Ownership
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.transaction import Attempt
from tests.support import small_model
from tests.support.waiting import LONG_S

STEP = small_model.STEP


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, which are on two nodes."""
    return small_model.make(tmp_path_factory.mktemp("whole"), small_model.tensors_of(), tp=2)


@pytest.fixture(scope="module")
def manifest(whole: Path) -> Manifest:
    found = read_manifest(whole)
    placement = Placement(("n0", "n1"), tuple((file.rank, 1 - file.rank) for file in found.files))
    return replace(found, placement=placement)


class Node:
    """Node 1, of rank 1."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        role_dir = file_names.step_dir(folder, STEP) / "actor"
        self.attempt = Attempt(manifest.attempt, file_names.staging_dir(role_dir, manifest.attempt), role_dir)
        node = NodeMap.of(["n0", "n1"], ["n0", "n1"]).all[1]
        self.tier: Any = SimpleNamespace(
            node=node,
            folder=folder,
            role="actor",
            role_dir=lambda step, role: file_names.step_dir(folder, step) / role,
            ownership=lambda saved: Ownership(),
            unrenamed=[],
            shared=None,
            lock=TrainerLock(folder, "actor"),
        )

    def write(self, whole: Path, manifest: Manifest, ranks: tuple[int, ...]) -> None:
        """Puts the files of some ranks into the staging folder."""
        make_staging(self.attempt, 0o700)
        for file in manifest.files:
            if file.rank in ranks:
                path = self.attempt.staging / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(whole / file.path, path)

    def place(self, manifest: Manifest) -> None:
        node_transaction._place_manifest(self.attempt, self.tier, encode_manifest(manifest))


@pytest.fixture
def node(tmp_path: Path, manifest: Manifest) -> Node:
    return Node(tmp_path, manifest)


def of_rank(manifest: Manifest, rank: int) -> list[int]:
    return [position for position, file in enumerate(manifest.files) if file.rank == rank]


def test_a_node_s_own_files_and_the_manifest_of_all(node: Node, whole: Path, manifest: Manifest) -> None:
    node.write(whole, manifest, (1,))
    node.place(manifest)
    assert read_manifest(node.attempt.staging) == manifest
    assert files_here(node.attempt.staging, manifest) == of_rank(manifest, 1)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_an_own_file_that_is_not_there_is_not_committed(
    node: Node, whole: Path, manifest: Manifest, damage: Callable[[Path], None]
) -> None:
    node.write(whole, manifest, (1,))
    path = manifest.files[of_rank(manifest, 1)[0]].path
    damage(node.attempt.staging / path)
    with pytest.raises(CheckpointError, match=path):
        node.place(manifest)
    assert not (node.attempt.staging / file_names.MANIFEST_FILE).exists()


def test_replicas_of_the_same_bytes_count_as_copies(
    node: Node, whole: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    node.write(whole, manifest, (0, 1))
    with caplog.at_level(logging.WARNING):
        node.place(manifest)
    assert files_here(node.attempt.staging, manifest) == list(range(len(manifest.files)))
    assert not caplog.records


def test_replicas_of_other_bytes_are_not_copies(
    node: Node, whole: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Even if they have the same size. If they stayed, nobody would fetch the file of the manifest."""
    node.write(whole, manifest, (0, 1))
    different = next(n for n in of_rank(manifest, 0) if manifest.files[n].index)
    path, size = manifest.files[different].path, manifest.files[different].size
    for number in range(1, 100):  # the CRCs in the index have different numbers of digits
        other_tensors = {name: tensor + number for name, tensor in small_model.tensors_of().items()}
        other = small_model.make(tmp_path / f"other{number}", other_tensors, tp=2)
        if (other / path).stat().st_size == size:
            break
    shutil.copy(other / path, node.attempt.staging / path)
    assert different in files_here(node.attempt.staging, manifest)
    node.place(manifest)
    assert files_here(node.attempt.staging, manifest) == [n for n in range(len(manifest.files)) if n != different]
    assert f"{path}" in caplog.text


def test_a_node_whose_ranks_have_written_nothing_has_the_manifest(node: Node, manifest: Manifest) -> None:
    """It may be the only one left, and then says what is lost."""
    files = tuple(file for file in manifest.files if file.rank == 0)
    placement = Placement(("n0", "n1"), ((0, 1),) * len(files))
    node.place(replace(manifest, files=files, placement=placement))
    assert files_here(node.attempt.staging, manifest) == []
    assert [(held.has, held.is_committed) for held in held_roles(node.tier.folder)] == [((), False)]


def test_staging_folders_of_the_role_are_removed(node: Node, whole: Path, manifest: Manifest, tmp_path: Path) -> None:
    node.write(whole, manifest, (1,))
    old = file_names.staging_dir(file_names.step_dir(tmp_path, 3) / "actor", "b" * 32)
    others = file_names.staging_dir(file_names.step_dir(tmp_path, STEP) / "critic", "c" * 32)
    committed = file_names.step_dir(tmp_path, 4) / "actor"
    for folder in (old, others, committed):
        folder.mkdir(parents=True)
    file_names.step_dir(tmp_path, 9).symlink_to(tmp_path / "nowhere")
    remove_staging(tmp_path, "actor", lambda head: True)
    assert not node.attempt.staging.exists()
    assert not old.parent.exists()
    assert others.exists()
    assert committed.exists()


def test_staging_folders_of_another_run_stay(node: Node, whole: Path, manifest: Manifest, tmp_path: Path) -> None:
    """Its other nodes may have committed what is in them. One without a manifest is of a save that failed."""
    node.write(whole, manifest, (1,))
    node.place(manifest)
    failed = file_names.staging_dir(file_names.step_dir(tmp_path, 3) / "actor", "b" * 32)
    failed.mkdir(parents=True)
    remove_staging(tmp_path, "actor", lambda head: head.attempt != manifest.attempt)
    assert [held.head.attempt for held in held_in(node.tier)] == [manifest.attempt]
    assert not failed.exists()


def test_a_save_does_not_remove_what_could_not_be_renamed(node: Node, whole: Path, manifest: Manifest) -> None:
    node.write(whole, manifest, (1,))
    node.place(manifest)
    node.tier.unrenamed = [node.attempt]
    node.attempt.role_dir.write_text("in the way")
    for _ in range(2):
        with pytest.raises(OSError, match="actor"):
            rename_committed(node.tier)
        assert node.attempt.staging.is_dir()
    node.attempt.role_dir.unlink()
    rename_committed(node.tier)
    assert read_manifest(node.attempt.role_dir).attempt == manifest.attempt
    assert node.tier.unrenamed == []


def held_in(tier: Any) -> list[HeldRole]:
    return held_roles(tier.folder)


def test_what_others_have_committed_is_adopted(node: Node, whole: Path, manifest: Manifest) -> None:
    node.write(whole, manifest, (1,))
    node.place(manifest)
    (held,) = held_in(node.tier)
    adopt(node.tier, [held], ["d" * 32])
    assert [each.is_committed for each in held_in(node.tier)] == [False]
    adopt(node.tier, [held], [manifest.attempt])
    assert [each.is_committed for each in held_in(node.tier)] == [True]
    assert committed_manifest(node.attempt) == manifest
    adopt(node.tier, held_in(node.tier), [manifest.attempt])  # nothing is left to do


def test_adoption_replaces_an_earlier_save_of_the_step(node: Node, whole: Path, manifest: Manifest) -> None:
    earlier = replace(manifest, attempt="e" * 32)
    first = Node(node.tier.folder, earlier)
    first.write(whole, earlier, (1,))
    first.place(earlier)
    adopt(first.tier, held_in(first.tier), [earlier.attempt])
    node.write(whole, manifest, (1,))
    node.place(manifest)
    adopt(node.tier, held_in(node.tier), [manifest.attempt])
    assert [(each.head.attempt, each.is_committed) for each in held_in(node.tier)] == [(manifest.attempt, True)]


def test_what_cannot_be_adopted_is_only_logged(
    node: Node, whole: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    node.write(whole, manifest, (1,))
    node.place(manifest)
    held = held_in(node.tier)
    shutil.rmtree(node.attempt.staging)
    adopt(node.tier, held, [manifest.attempt])
    assert "is committed on other nodes, but its folder cannot be renamed here" in caplog.text


@pytest.mark.parametrize("has_renamed", [True, False])
def test_a_rank_that_does_not_hear_of_the_commit_asks_node_0(
    whole: Path,
    manifest: Manifest,
    has_renamed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise its next save would remove its part of a step that all others count as committed."""
    node = Node(tmp_path / "node1", manifest)
    if has_renamed:
        place = file_names.step_dir(tmp_path / "node0", STEP) / "actor"
        place.mkdir(parents=True)
        (place / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    rounds: list[str] = []

    def decide(agreement: Any, topic: str, work: Callable[[], Any], *arguments: Any, name: str) -> dict[str, Any]:
        rounds.append(name)
        work()
        if name.endswith("-nodes"):
            raise CommitError("rank 1 waited for rank 0")
        return {}

    monkeypatch.setattr(node_transaction, "decide", decide)
    node.tier.number, node.tier.is_lead = 1, True
    node.tier.receive = lambda attempt, patience_s: encode_manifest(manifest)
    node.tier.lock = SimpleNamespace(take=lambda patience_s: None)
    agreement: Any = SimpleNamespace(is_coordinator=False, timeout_s=1.0, limited=nullcontext)

    def write(staging: Path) -> dict[str, Any]:
        node.write(whole, manifest, (1,))
        return {}

    with (
        closing(PeerServer(tmp_path / "node0", b"secret", "127.0.0.1")) as server,
        closing(PeerStore(server.address, b"secret", "n0", LONG_S)) as store,
    ):
        node.tier.peer = lambda number: store
        with nullcontext() if has_renamed else pytest.raises(CommitError, match="rank 1 waited"):
            commit_on_nodes(agreement, "saving", node.attempt, node.tier, write, lambda records: manifest)
    assert len(rounds) == 2
    assert [held.is_committed for held in held_in(node.tier)] == [has_renamed]
    assert ("is committed, but not all ranks know it" in caplog.text) == has_renamed


def test_a_commit_that_does_not_come(
    node: Node, whole: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_transaction, "_RENAME_S", 0.0)
    with pytest.raises(CommitError, match="is not committed on this node, or was replaced"):
        committed_manifest(node.attempt)
    node.write(whole, manifest, (1,))
    node.place(replace(manifest, attempt="f" * 32))
    node.attempt.staging.rename(node.attempt.role_dir)
    with pytest.raises(CommitError, match="is not committed on this node, or was replaced"):
        committed_manifest(node.attempt)


@pytest.mark.parametrize("has_renamed", [True, False])
def test_rank_0_looks_at_its_own_folder_when_its_round_fails(
    whole: Path, manifest: Manifest, has_renamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, manifest)
    node.tier.node, node.tier.number, node.tier.is_lead = NodeMap.of(["n0", "n1"], ["n0", "n1"]).all[0], 0, True
    node.tier.publish = lambda attempt, data: None
    agreement: Any = SimpleNamespace(is_coordinator=True, timeout_s=1.0)

    def decide(
        agreement: Any, topic: str, work: Callable[[], Any], combine: Any, error: Any, act: Any = None, **_: Any
    ) -> Any:
        combine([work()])
        if act is not None:
            if has_renamed:
                act()
            raise CommitError("the key-value store is gone")
        return {}

    def write(staging: Path) -> dict[str, Any]:
        node.write(whole, manifest, (0,))
        return {}

    monkeypatch.setattr(node_transaction, "decide", decide)
    with nullcontext() if has_renamed else pytest.raises(CommitError, match="store is gone"):
        commit_on_nodes(agreement, "saving", node.attempt, node.tier, write, lambda records: manifest)
    assert [held.is_committed for held in held_in(node.tier)] == [True] * has_renamed
    assert not node.attempt.staging.exists()
