"""Which checkpoints a load tries, below the root, in the store, or in a folder that is named; and why there is none."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import ManifestSummary
from mcore_ckpt.config import FastTier
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, RemoteError
from mcore_ckpt.fast.tcp_transport import TcpTransport
from mcore_ckpt.fast.tier import NodeTier
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.formats.native.remote_folder import RemoteFolder
from mcore_ckpt.io.store import Store
from mcore_ckpt.load.candidates import find_candidates, folder_of, local_candidate, remote_steps
from mcore_ckpt.ranks.node_map import Node, NodeMap
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import tracker
from mcore_ckpt.steps.node_steps import FastCheckpoint
from mcore_ckpt.steps.owner import Owner
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.steps.retention import PreservationPolicy
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.upload_queue import UploadQueue
from tests.support.checkpoints import ROLE, dead_owner, make, own
from tests.support.stored_tensors import lone_trainer


def role_dir(root: Path, step: int, role: str = ROLE) -> Path:
    return file_names.step_dir(root, step) / role


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 10 and 20, both complete."""
    for step in (10, 20):
        make(role_dir(tmp_path / "root", step), step)
    tracker.update_tracker(tmp_path / "root")
    return tmp_path / "root"


def trainer(root: Path, role: str = ROLE, **config: Any) -> Trainer:
    return replace(lone_trainer(torch.nn.Module(), None, **config), root=root, role=role)


def find(of: Trainer, step: int | None = None, path: Path | None = None, remote: RemoteSteps | None = None) -> Any:
    return find_candidates(of, remote, step, path)


def steps_of(found: Any) -> list[tuple[int, bool]]:
    return [(each["step"], each["remote"]) for each in found["candidates"]]


def refusal(error: type[CheckpointError], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        find(*args, **kwargs)
    assert caught.type is error
    return str(caught.value)


# -- below the root ----------------------------------------------------------------------------------------


def test_the_newest_step_is_tried_first(root: Path) -> None:
    found = find(trainer(root))
    assert found == {
        "candidates": [local_candidate(step, role_dir(root, step)) for step in (20, 10)],
        "passed_over": [],
        "last_resort": "",
        "foreign": None,
    }
    assert folder_of(None, found["candidates"][0]) == LocalFolder(role_dir(root, 20))


def test_a_step_that_is_named(root: Path) -> None:
    assert steps_of(find(trainer(root), step=10)) == [(10, False)]
    text = refusal(CheckpointNotFoundError, trainer(root), step=15)
    advice = f"look at `mcore-ckpt list {root}`, and check root and role"
    assert text == f"{root}: no complete checkpoint of step 15 of {ROLE}: {advice}"


def test_an_empty_root(tmp_path: Path) -> None:
    text = refusal(CheckpointNotFoundError, trainer(tmp_path / "nowhere"))
    assert text.startswith(f"{tmp_path / 'nowhere'}: no complete checkpoint of {ROLE}: look at `mcore-ckpt list ")


def test_a_step_without_the_role(root: Path) -> None:
    text = refusal(CheckpointNotFoundError, trainer(root, role="critic"))
    for step in (20, 10):
        assert f"\n  {file_names.step_dir(root, step)}: complete, but without critic" in text
    make(role_dir(root, 20, "critic"), 20)
    assert steps_of(find(trainer(root, role="critic"))) == [(20, False)]


def test_an_incomplete_newer_step_is_passed_over(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(role_dir(root, 30), 30, (ROLE, "critic"))
    with caplog.at_level(logging.WARNING):
        found = find(trainer(root))
    assert steps_of(found) == [(20, False), (10, False)]
    (reason,) = found["passed_over"]
    assert str(file_names.step_dir(root, 30)) in reason
    assert "critic" in reason
    assert any("a newer step is not loaded: " in record.getMessage() for record in caplog.records)


def remove_a_file(root: Path, step: int) -> None:
    next(role_dir(root, step).glob("optim/*.pt")).unlink()


@pytest.mark.parametrize("strict", [False, True])
def test_a_newer_step_that_lacks_files(strict: bool, root: Path) -> None:
    """A strict load takes no older one in its place."""
    remove_a_file(root, 20)
    of = trainer(root, strict=strict)
    if not strict:
        found = find(of)
        assert steps_of(found)[0] == (10, False)
        assert "20" in found["passed_over"][0]
        return
    text = refusal(CheckpointCorruptError, of)
    assert text.endswith("Nothing has changed. To load another step, name it")
    assert str(file_names.step_dir(root, 20)) in text
    assert steps_of(find(of, step=10)) == [(10, False)]


def test_if_all_steps_lack_files_the_checkpoint_is_damaged(root: Path) -> None:
    """Nobody may take this for a new training."""
    for step in (10, 20):
        remove_a_file(root, step)
    text = refusal(CheckpointCorruptError, trainer(root))
    assert all(str(file_names.step_dir(root, step)) in text for step in (10, 20))


def test_a_tracker_that_names_another_step_is_told(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker.write_tracker(root, 10)
    with caplog.at_level(logging.WARNING):
        find(trainer(root))
        (record,) = caplog.records
        assert "names step 10, but the newest complete step is 20" in record.getMessage()
        caplog.clear()
        find(trainer(root), step=20)
        assert not caplog.records


# -- in the store ------------------------------------------------------------------------------------------


@pytest.fixture
def remote(root: Path, tmp_path: Path) -> RemoteSteps:
    """A store with both steps."""
    found = RemoteSteps(Store(f"file://{tmp_path / 'store'}"))
    queue = UploadQueue(found, root, ROLE, PreservationPolicy())
    for step in (10, 20):
        queue.committed(step)
        assert queue.wait(60)
    return found


class Unreachable:
    """A store that does not answer. It notes whether a step of another run would do."""

    def __init__(self) -> None:
        self.of_any_run: list[bool] = []

    def steps(self) -> Any:
        raise RemoteError("s3://bucket: no answer")

    def step(self, step: int, of_any_run: bool = False) -> Any:
        self.of_any_run.append(of_any_run)
        raise RemoteError("s3://bucket: no answer")


def test_a_local_step_comes_before_the_same_one_in_the_store(root: Path, remote: RemoteSteps) -> None:
    assert steps_of(find(trainer(root), remote=remote)) == [(20, False), (20, True), (10, False), (10, True)]
    assert steps_of(find(trainer(root), step=10, remote=remote)) == [(10, False), (10, True)]


def test_a_new_machine_loads_from_the_store(root: Path, remote: RemoteSteps, tmp_path: Path) -> None:
    found = find(trainer(tmp_path / "empty"), remote=remote)
    assert steps_of(found) == [(20, True), (10, True)]
    folder = folder_of(remote, found["candidates"][0])
    assert isinstance(folder, RemoteFolder)
    assert folder.manifest().step == 20
    assert "store" in str(folder.place)


def test_an_empty_store_is_named_too(tmp_path: Path) -> None:
    store = RemoteSteps(Store(f"file://{tmp_path / 'store'}"))
    text = refusal(CheckpointNotFoundError, trainer(tmp_path / "empty"), remote=store)
    assert text.endswith(f"\n  {store.store.url}: no complete checkpoint either")


def test_a_store_that_does_not_answer(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without local checkpoints it would be wrong to begin anew."""
    store: Any = Unreachable()
    with caplog.at_level(logging.WARNING):
        assert steps_of(find(trainer(root), remote=store)) == [(20, False), (10, False)]
    assert "only local checkpoints can be loaded" in caplog.text
    for step in (None, 10):
        text = refusal(RemoteError, trainer(tmp_path / "empty"), step, remote=store)
        assert text.startswith(
            f"s3://bucket: no answer; {tmp_path / 'empty'} has no checkpoint to load, and the store may"
        )
    assert steps_of(find(trainer(root), 10, remote=store)) == [(10, False)]
    assert store.of_any_run == [True, False], "only if there is no other checkpoint of the step"
    assert remote_steps(None, root, None, required=True) == []


def test_a_step_that_only_the_store_has_whole(root: Path, remote: RemoteSteps) -> None:
    remove_a_file(root, 20)
    found = find(trainer(root), remote=remote)
    assert steps_of(found)[0] == (20, True)


# -- on the nodes of the fast tier -------------------------------------------------------------------------


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NodeTier]:
    """Node 0 of two nodes of a rank each."""
    nodes = NodeMap(tuple(Node(f"n{n}", f"n{n}", (n,), "127.0.0.1:1") for n in range(2)))
    folder = tmp_path / "node"
    transport, lock = TcpTransport(b"secret", 0.1), TrainerLock(folder, ROLE)
    with closing(NodeTier(FastTier(folder), ROLE, nodes, 0, 0, folder, transport, None, lock)) as found:
        yield found


def on_nodes(step: int, attempt: str = "b" * 32, last: int = 3) -> FastCheckpoint:
    """A checkpoint of 4 files, of which the nodes have those up to `last`."""
    head = ManifestSummary(step, ROLE, (ROLE,), attempt, "2025-01-01T00:00:00+00:00")
    return FastCheckpoint(head, 4, ((0, ((0, last),)),), True, False, 0)


def find_on_nodes(of: Trainer, tier: NodeTier, *fast: FastCheckpoint, **named: Any) -> Any:
    return find_candidates(of, None, named.get("step"), named.get("path"), tier, fast)


def test_what_only_the_nodes_have_is_tried_first_if_it_is_newer(root: Path, tier: NodeTier) -> None:
    found = find_on_nodes(trainer(root), tier, on_nodes(30))
    assert steps_of(found) == [(30, False), (20, False), (10, False)]
    assert ["holders" in each for each in found["candidates"]] == [True, False, False]
    assert found["candidates"][0]["below"] is None


def test_a_step_that_is_named_is_not_taken_for_another_one_on_the_nodes(root: Path, tier: NodeTier) -> None:
    assert steps_of(find_on_nodes(trainer(root), tier, on_nodes(30), step=20)) == [(20, False)]
    assert steps_of(find_on_nodes(trainer(root), tier, on_nodes(30), step=30)) == [(30, False)]


def test_a_save_that_is_in_both_is_one_candidate(root: Path, tier: NodeTier) -> None:
    attempt = LocalFolder(role_dir(root, 20)).manifest().attempt
    found = find_on_nodes(trainer(root), tier, on_nodes(20, attempt))
    assert steps_of(found) == [(20, False), (10, False)]
    assert found["candidates"][0]["below"] == str(role_dir(root, 20))


def test_a_folder_below_the_root_names_a_step_on_the_nodes(root: Path, tier: NodeTier, tmp_path: Path) -> None:
    """Before it is copied there. If the nodes have lost it, the message says what they lack."""
    of, path = trainer(root), role_dir(root, 30)
    (candidate,) = find_on_nodes(of, tier, on_nodes(30), path=path)["candidates"]
    assert (candidate["step"], "holders" in candidate) == (30, True)
    with pytest.raises(CheckpointNotFoundError) as caught:
        find_on_nodes(of, tier, on_nodes(30, last=1), path=path)
    assert str(caught.value).startswith(f"{path}: this folder does not exist: name the folder of a role")
    assert "2 of 4 files are on no node that is left" in str(caught.value)
    elsewhere = role_dir(tmp_path / "elsewhere", 30)
    with pytest.raises(CheckpointNotFoundError, match="this folder does not exist"):
        find_on_nodes(of, tier, on_nodes(30), path=elsewhere)


# -- a folder that is named --------------------------------------------------------------------------------


def test_a_role_folder_anywhere(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "copied"
    shutil.copytree(role_dir(root, 10), elsewhere)
    for path in (role_dir(root, 10), elsewhere):
        assert find(trainer(root), path=path) == {"candidates": [local_candidate(0, path)], "foreign": None}


def make_hf(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")


def make_legacy(path: Path) -> None:
    (path / "mp_rank_00").mkdir(parents=True)
    (path / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"")


OTHER: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: None, "this folder does not exist: name the folder of a role, such as .../global_steps_100/actor"),
    (lambda path: path.write_text(""), "is a file: name the folder of a role, such as"),
    (lambda path: path.symlink_to("gone"), "is a link to"),
    (make_hf, "is a HuggingFace model: load it with load_hf"),
    (make_legacy, "is a checkpoint in Megatron's legacy format, which this package does not read"),
    (
        lambda path: make(role_dir(path, 10), 10),
        "is a folder of steps: name the folder of a role, such as ...",
    ),
]


@pytest.mark.parametrize(("make_it", "words"), OTHER)
def test_a_path_that_is_something_else(make_it: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    make_it(path)
    assert refusal(CheckpointNotFoundError, trainer(tmp_path), path=path).startswith(f"{path}: {words}")


def test_the_folder_of_a_step(root: Path) -> None:
    path = file_names.step_dir(root, 10)
    text = refusal(CheckpointNotFoundError, trainer(root), path=path)
    assert text == f"{path}: is the folder of a step: name the folder of a role in it"


def test_a_folder_of_torch_dist_is_left_to_its_reader(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / ".metadata").write_bytes(b"")
    found = find(trainer(tmp_path), path=folder)
    assert found == {"candidates": [local_candidate(0, folder)], "foreign": "torch_dist"}


def test_a_relative_path(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    path = Path(os.path.relpath(role_dir(root, 10)))
    assert find(trainer(root), path=path)["candidates"] == [local_candidate(0, role_dir(root, 10))]


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_checkpoint_that_a_crash_left_aside_is_found(is_dead: bool, root: Path) -> None:
    """It is put back, unless the save that moved it may still be alive: then it is read where it is."""
    path = role_dir(root, 20)
    aside = file_names.replaced_dir(path, "a" * 32)
    path.rename(aside)
    staging = file_names.staging_dir(path, "a" * 32)
    staging.mkdir()
    own(staging, dead_owner(2**22 + 1) if is_dead else Owner.this_process())
    found = find(trainer(root), path=path)
    assert found == {"candidates": [local_candidate(0, path if is_dead else aside)], "foreign": None}
    assert LocalFolder(path if is_dead else aside).manifest().step == 20
    assert path.exists() is is_dead
