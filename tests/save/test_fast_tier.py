"""The fast tier of one process: what is in its node's folder, what in the root, and what is loaded."""

import logging
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.config import FastTier
from mcore_ckpt.errors import (
    AgreementError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CommitError,
    InvalidArgumentError,
    LockedError,
    NoRoomError,
)
from mcore_ckpt.fast import tier as node_tier
from mcore_ckpt.fast.copies import Copies
from mcore_ckpt.io import json_fields, tuning
from mcore_ckpt.recover import recover
from mcore_ckpt.save import nodes
from mcore_ckpt.save.background import SaveHandle
from mcore_ckpt.steps import tracker
from mcore_ckpt.steps.listing import complete_steps
from mcore_ckpt.steps.node_steps import HeldRole
from mcore_ckpt.steps.transaction import Attempt
from tests.support.owners import parent
from tests.support.small_disks import fill, free_bytes, tmpfs
from tests.support.unsharded_model import Model
from tests.support.waiting import LONG_S, join_threads


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SPACE_SETTLES_S", 0.0)


class Job:
    """One training job: its root, its node's folder, and its managers, one after the other."""

    def __init__(self, root: Path, node: Path) -> None:
        self.root, self.node = root, node
        self.model_class = Model
        self.model = Model()
        self.managers: list[CheckpointManager] = []

    def start(self, config: dict[str, Any] | None = None, role: str = "actor", **fast: Any) -> CheckpointManager:
        """A manager, after the end of earlier ones, and a model of other values."""
        self.close()
        self.model = self.model_class()
        choices = FastTier(self.node, **{"replicas": 0, **fast})
        words = ("model", "extra")
        found = CheckpointConfig(save_contents=words, load_contents=words, fast=choices, **(config or {}))
        self.managers.append(CheckpointManager(self.root, self.model, role=role, config=found))
        return self.managers[-1]

    def close(self) -> None:
        while self.managers:
            self.managers.pop().close()

    def save(self, step: int, **choices: Any) -> SaveHandle:
        """Saves weights that name the step."""
        with torch.no_grad():
            self.model.weight.fill_(step)
        handle = self.managers[-1].save(step, extra_state={"seen": step}, **choices)
        handle.wait(LONG_S)
        if not self.managers[-1]._trainer.config.async_save:
            self.managers[-1].wait()  # until old steps are deleted, too
        return handle

    def loads(self, expected: int, **choices: Any) -> Path:
        """Loads, and returns the place from which the step came."""
        step, result = expected, self.managers[-1].load(**choices)
        assert result.step == step
        assert result.extra_state == {"seen": step}
        assert torch.equal(self.model.weight, torch.full_like(self.model.weight, step))
        return Path(result.report.path)

    def on_node(self) -> list[int]:
        return sorted(file_names.step_dirs(self.node))

    def in_root(self) -> list[int]:
        return [status.step for status in complete_steps(self.root)]

    def role_dir(self, step: int) -> Path:
        return file_names.step_dir(self.node, step) / "actor"

    def rot(self, step: int) -> None:
        """Flips a bit of the weights in the node's folder."""
        manifest = read_manifest(self.role_dir(step))
        path = self.role_dir(step) / manifest.files_of("model")[0].path
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with closing(Job(tmp_path / "root", tmp_path / "node")) as job:
        yield job


def test_a_step_goes_to_the_node_and_comes_back(job: Job) -> None:
    job.start()
    handle = job.save(7)
    assert handle.committed
    assert handle.copies is not None
    assert handle.copies.complete
    assert handle.drain is None
    assert (job.on_node(), job.in_root()) == ([7], [])
    manifest = read_manifest(job.role_dir(7))
    assert manifest.placement is not None
    assert manifest.placement.nodes == (socket.gethostname(),)
    assert set(manifest.placement.by_file) == {(0,)}
    job.start()
    assert job.loads(7) == job.role_dir(7)
    assert job.loads(7, step=7, verify="full") == job.role_dir(7)


def test_without_durable_steps_nothing_is_written_to_the_root(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        job.start(durable_every=None)
    assert "replicas=0 and durable_every=None, so a lost node loses all checkpoints" in caplog.text
    for step in range(1, 4):
        assert job.save(step).drain is None
    job.start(durable_every=None)
    job.loads(3)
    job.close()
    assert list(job.root.rglob("*")) == []
    shutil.rmtree(job.node)
    manager = job.start(durable_every=None)
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint of actor"):
        manager.load()


def test_durable_steps_are_in_the_root_as_if_they_had_been_saved_there(job: Job) -> None:
    job.start(durable_every=2, keep=1)
    handles = {step: job.save(step) for step in range(1, 6)}
    assert [step for step, handle in handles.items() if handle.drain is not None] == [2, 4]
    for step in (2, 4):
        drain = handles[step].drain
        assert drain is not None
        assert (drain.step, drain.wait(LONG_S), drain.committed, drain.exception) == (
            step,
            file_names.step_dir(job.root, step) / "actor",
            True,
            None,
        )
    assert (job.on_node(), job.in_root()) == ([5], [2, 4])
    assert tracker.read_tracker(job.root) == 4
    manifest = read_manifest(file_names.step_dir(job.root, 4) / "actor")
    assert manifest.placement is None
    job.close()
    # A manager that knows nothing of the fast tier reads it.
    words = ("model", "extra")
    plain = CheckpointManager(
        job.root, job.model, role="actor", config=CheckpointConfig(save_contents=words, load_contents=words)
    )
    with closing(plain):
        job.managers.append(plain)
        assert job.loads(4) == file_names.step_dir(job.root, 4) / "actor"
        job.managers.clear()


def test_a_lost_node_costs_the_steps_since_the_durable_one(job: Job) -> None:
    job.start(durable_every=2)
    for step in range(1, 6):
        job.save(step)
    job.close()
    shutil.rmtree(job.node)
    job.start(durable_every=2)
    assert job.loads(4) == file_names.step_dir(job.root, 4) / "actor"
    job.save(6)
    assert job.on_node() == [6]
    assert job.loads(6) == job.role_dir(6)


def test_the_node_is_read_even_if_the_root_has_the_step(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.start(durable_every=1)
    job.save(1)
    job.start(durable_every=1)
    assert job.loads(1) == job.role_dir(1)
    job.rot(1)
    with caplog.at_level(logging.WARNING):
        job.loads(1)
    assert f"is read from {file_names.step_dir(job.root, 1)}" in caplog.text
    assert "wrong CRC" in caplog.text


def test_a_rotted_step_that_is_nowhere_else(job: Job) -> None:
    """The next older one is taken, and the report says why."""
    manager = job.start()
    job.save(1)
    job.save(2)
    job.rot(2)
    job.start()
    job.loads(1)
    job.rot(1)
    manager = job.start()
    with pytest.raises(CheckpointCorruptError, match="wrong CRC"):
        manager.load()


def test_steps_stay_as_many_as_asked_for(job: Job) -> None:
    job.start(keep=3)
    for step in range(1, 6):
        job.save(step)
    assert job.on_node() == [3, 4, 5]
    job.start(keep=1)
    job.save(6)
    assert job.on_node() == [6]


def test_the_count_of_steps_goes_on_in_the_next_life(job: Job) -> None:
    job.start(durable_every=3)
    job.save(1)
    job.save(2)
    job.start(durable_every=3)
    job.loads(2)
    job.save(3)
    assert job.in_root() == [3]


def test_a_step_is_saved_again(job: Job) -> None:
    job.start(durable_every=2)
    job.save(1)
    first = read_manifest(job.role_dir(1)).attempt
    handle = job.save(1)  # the second step that is saved, so it is durable
    assert read_manifest(job.role_dir(1)).attempt != first
    assert handle.drain is not None
    assert (job.on_node(), job.in_root()) == ([1], [1])
    job.save(1)
    assert [entry.name for entry in job.role_dir(1).parent.iterdir()] == ["actor"]
    in_root = read_manifest(file_names.step_dir(job.root, 1) / "actor").attempt
    assert read_manifest(job.role_dir(1)).attempt != in_root
    job.start(durable_every=2)
    assert job.loads(1) == job.role_dir(1)


def test_a_step_is_not_saved_again_while_it_is_being_copied(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the first save would come among those of the second one, and count as one of them."""
    job.start(durable_every=1)
    waited: list[int | None] = []
    monkeypatch.setattr(Copies, "wait", lambda self, timeout=None, step=None: waited.append(step))
    make, before = nodes.make_staging, []

    def noting(attempt: Attempt, mode: int) -> None:
        before.append((waited[-1], file_names.parse_step(attempt.role_dir.parent.name)))
        make(attempt, mode)

    monkeypatch.setattr(nodes, "make_staging", noting)
    for step in (3, 3, 4):
        job.save(step)
    assert before == [(3, 3), (3, 3), (4, 4)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_drain_without_a_thread_of_its_own(job: Job, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job.start(config={"async_save": is_async}, durable_every=1)
    start = threading.Thread.start

    def starts(self: threading.Thread) -> None:
        if self.name == "mcore_ckpt drain":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", starts)
    handle = job.save(5)
    assert handle.drain is not None
    assert handle.drain.committed
    assert job.in_root() == [5]


def test_a_training_that_begins_earlier_again(job: Job) -> None:
    """The steps after the loaded one are of a training that was given up."""
    job.start(keep=3)
    for step in (1, 2, 3):
        job.save(step)
    job.start(keep=3)
    job.loads(1, step=1)
    job.save(2)
    assert job.on_node() == [1, 2]
    job.start(keep=3)
    job.loads(2)


def test_a_step_is_saved_again_while_its_folder_is_being_deleted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own old folder, because the training went back to an earlier step. The new one must not be deleted."""
    job.start(keep=3)
    for step in (1, 2, 3):
        job.save(step)
    manager = job.start(keep=3)
    job.loads(1, step=1)
    may_delete, delete = threading.Event(), nodes._delete

    def delete_late(folders: Sequence[Path]) -> None:
        assert may_delete.wait(LONG_S)
        delete(folders)

    monkeypatch.setattr(nodes, "_delete", delete_late)
    for step in (2, 3):
        with torch.no_grad():
            job.model.weight.fill_(step)
        manager.save(step, extra_state={"seen": step})
    may_delete.set()
    manager.wait()
    assert job.on_node() == [1, 2, 3]
    assert [entry.name for entry in job.role_dir(3).parent.iterdir()] == ["actor"]
    job.start(keep=3)
    job.loads(3)


def test_a_path_that_names_a_step(job: Job) -> None:
    """The path is below the root, wherever the step is."""
    job.start()
    path = file_names.step_dir(job.root, 3) / "actor"
    with torch.no_grad():
        job.model.weight.fill_(3)
    manager = job.managers[-1]
    manager.save(3, path=path, extra_state={"seen": 3}).wait()
    assert job.on_node() == [3]
    job.start()
    job.loads(3, path=path)
    job.loads(3, path=path.parent)
    with pytest.raises(CheckpointNotFoundError):
        job.managers[-1].load(path=file_names.step_dir(job.root, 4) / "actor")


def test_a_path_that_names_no_step_is_refused(job: Job, tmp_path: Path) -> None:
    manager = job.start()
    with pytest.raises(InvalidArgumentError, match=r"is not part of a step below .*leave path out"):
        manager.save(3, path=tmp_path / "elsewhere")
    job.save(4)


def test_recover_takes_the_newest_step_of_both(job: Job) -> None:
    job.start(durable_every=2)
    for step in (1, 2, 3):
        job.save(step)
    manager = job.start(durable_every=2)
    assert recover([manager]).step == 3
    shutil.rmtree(job.role_dir(3))
    assert recover([job.start(durable_every=2)]).step == 2
    job.close()
    shutil.rmtree(job.node)
    assert recover([job.start(durable_every=2)]).step == 2
    job.close()
    shutil.rmtree(job.root)
    assert recover([job.start(durable_every=2)]).step is None


def test_recover_says_which_newer_step_is_lost(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.start(durable_every=1)
    job.save(1)
    job.close()
    job.start(durable_every=None)
    job.save(2)
    path = read_manifest(job.role_dir(2)).files[0].path
    (job.role_dir(2) / path).unlink()
    recovery = recover([job.start()])
    assert recovery.step == 1
    (reason,) = recovery.skipped
    files = len(read_manifest(job.role_dir(2)).files)
    assert f"1 of {files} files are on no node that is left: they were on {socket.gethostname()}" in reason


def test_recover_does_not_begin_anew_because_all_steps_are_lost(job: Job) -> None:
    job.start(durable_every=None)
    job.save(1)
    path = read_manifest(job.role_dir(1)).files[0].path
    (job.role_dir(1) / path).unlink()
    with pytest.raises(
        CheckpointNotFoundError, match=r"no step is complete with actor: .* use resume='off'.*\n.*files are on no node"
    ):
        recover([job.start(durable_every=None)])
    assert recover([job.start(durable_every=None)], "off").step is None


def test_two_roles_make_a_step(job: Job) -> None:
    roles = {"roles": ("actor", "critic")}
    actor = job.start(roles)
    managers = job.managers[:]
    job.managers.clear()
    critic = job.start(roles, role="critic")
    job.managers += managers
    actor.save(1)
    assert actor.fast_steps_found(("actor",), None)[0] == []
    critic.save(1)
    whole, lost = actor.fast_steps_found(("actor",), None)
    assert ([each.step for each in whole], lost) == ([1], [])
    assert critic.fast_steps_found(("actor", "critic"), None) == (whole, lost)
    assert recover([actor, critic]).step == 1


def test_async_saves(job: Job) -> None:
    job.start({"async_save": True}, durable_every=1)
    handles = [job.save(step) for step in (1, 2, 3)]
    job.close()
    for handle in handles:
        assert handle.committed
        assert handle.drain is None or handle.drain.committed
    assert handles[0].drain is not None
    assert 1 in job.in_root()
    job.start()
    job.loads(3)


# -- whose a step is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable_every", [10, None])
def test_a_new_root_on_nodes_of_another_run(job: Job, tmp_path: Path, durable_every: int | None) -> None:
    """It does not become that run, nor a copy of it."""
    job.start()
    job.save(1)
    job.root = tmp_path / "other"
    job.start(durable_every=durable_every)
    job.save(2)
    old, new = (read_manifest(job.role_dir(step)).run for step in (1, 2))
    assert old is not None
    assert new is not None
    assert new.id != old.id
    assert new.parent is None
    job.start(durable_every=durable_every)
    job.loads(2)
    with pytest.raises(CommitError, match="step 1 is there already, and belongs to another run"):
        job.save(1)
    assert job.on_node() == [1, 2]


def test_a_copied_root_on_the_nodes_of_the_original(job: Job, tmp_path: Path) -> None:
    """The steps that were copied are the copy's also on the nodes. The later ones of the original are not."""
    job.start(durable_every=1)
    job.save(1)
    job.save(2)
    shutil.copytree(job.root, tmp_path / "copy")
    job.start()
    job.loads(2)
    job.save(3)
    job.root = tmp_path / "copy"
    job.start(keep=1)
    job.loads(2)
    assert job.on_node() == [2, 3]
    job.save(4)
    assert job.on_node() == [3, 4]
    run = read_manifest(job.role_dir(4)).run
    assert run is not None
    assert run.parent is not None
    assert run.parent.step == 2


# -- what is refused ------------------------------------------------------------------------------------------


def server_threads() -> None:
    """Fails if a server of a manager that could not be made is still there."""
    join_threads("mcore_ckpt peer server")


def test_copies_without_other_nodes_are_refused(job: Job) -> None:
    with pytest.raises(InvalidArgumentError, match=r"replicas .* is 1, .* only 1 \(.*\): use replicas=0 or more nodes"):
        job.start(replicas=1)
    server_threads()


@pytest.mark.parametrize("durable_every", [1, None])
def test_the_root_is_no_folder_of_the_fast_tier(job: Job, durable_every: int | None) -> None:
    """Durable steps would be deleted as old steps of the fast tier."""
    job.root.mkdir()
    job.node.symlink_to(job.root)
    with pytest.raises(InvalidArgumentError, match="which is the root: use another folder"):
        job.start(durable_every=durable_every)
    server_threads()


def test_a_failure_after_the_server_has_started(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path, refused: object) -> list[HeldRole]:
        raise OSError("no such disk")

    monkeypatch.setattr(node_tier, "held_roles", fails)
    with pytest.raises(AgreementError, match="no such disk"):
        job.start()
    server_threads()


@pytest.fixture
def small_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, tmpfs(Path(folder, "memory"), size="256k") as memory:
        yield memory


class LargeModel(Model):
    """Of a quarter of a megabyte, so that the names of its files do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(256, 256))


def test_a_folder_that_cannot_hold_the_steps_is_refused_with_numbers(job: Job, small_memory: Path) -> None:
    job.node = small_memory / "run"
    with pytest.raises(NoRoomError) as caught:
        job.start(keep=30)
    message = str(caught.value)
    assert f"{job.node} on {socket.gethostname()} would have to hold" in message
    assert (
        f"bytes of memory, but only {256 << 10} bytes are available: 32 steps (keep=30, and what is being saved)"
        in message
    )
    server_threads()
    job.start(keep=3)
    job.save(1)


def test_space_is_counted_again_in_the_next_life(job: Job, small_memory: Path) -> None:
    """What the last life has left will be replaced."""
    job.node = small_memory / "run"
    subprocess.run(["mount", "-o", "remount,size=2m", str(small_memory)], check=True)
    job.model_class = LargeModel
    for first in (1, 10):
        job.start(keep=4, durable_every=None)
        for step in range(first, first + 5):
            job.save(step)
        assert len(job.on_node()) == 4
        assert free_bytes(small_memory) < 4 * 256 * 1024
    with pytest.raises(NoRoomError, match=r"8 steps \(keep=7, and what is being saved\)"):
        job.start(keep=7, durable_every=None)
    job.start(keep=6, durable_every=None)
    job.loads(14)


def test_a_folder_that_others_have_filled(job: Job, small_memory: Path) -> None:
    """The save fails on all ranks, the last step stays, and training goes on."""
    job.node = small_memory / "run"
    job.start(keep=2)
    job.save(1)
    ballast = fill(small_memory, free_bytes(small_memory) - 8192)
    with pytest.raises(CommitError, match="No space left on device"):
        job.save(2)
    assert job.on_node() == [1]
    assert [entry.name for entry in job.role_dir(1).parent.parent.iterdir() if entry.is_dir()] == ["global_steps_1"]
    ballast.unlink()
    job.save(3)
    assert job.on_node() == [1, 3]


def test_a_root_that_is_full_costs_only_the_durable_step(job: Job, small_memory: Path) -> None:
    job.root = small_memory / "root"
    job.start(durable_every=1)
    job.save(1)
    ballast = fill(small_memory, free_bytes(small_memory) - 8192)
    with pytest.raises(NoRoomError, match="are needed, but only"):
        job.save(2)
    assert (job.on_node(), job.in_root()) == ([1, 2], [1])
    assert job.loads(2) == job.role_dir(2)
    ballast.unlink()
    job.start(durable_every=10)
    job.loads(2)
    job.save(3)
    assert job.in_root() == [1]


def test_after_a_failed_copy_to_the_root_the_next_step_is_durable(job: Job, small_memory: Path) -> None:
    job.root = small_memory / "root"
    job.start({"async_save": True}, durable_every=2)
    job.save(1)
    ballast = fill(small_memory, free_bytes(small_memory) - 8192)
    drain = job.save(2).drain
    assert drain is not None
    with pytest.raises(NoRoomError):
        drain.wait(LONG_S)
    ballast.unlink()
    drain = job.save(3).drain
    assert drain is not None
    drain.wait(LONG_S)
    assert job.in_root() == [3]


def test_two_jobs_in_one_folder(job: Job) -> None:
    """The second one, whose root is another, is told at its first save. It may read."""
    job.start()
    job.save(1)
    job.start()
    other = parent()
    lock = file_names.trainer_file(job.node, "actor")
    lock.write_bytes(json_fields.encode(asdict(other) | {"claim": "other"}))
    job.loads(1)
    with pytest.raises(LockedError, match=r"saves actor here, and is alive\. Two trainers would delete"):
        job.save(2)
    assert job.on_node() == [1]
    lock.unlink()
    job.save(2)


def test_a_job_that_takes_the_lock_over_meanwhile(job: Job) -> None:
    job.start()
    job.save(1)
    other = parent()
    lock = file_names.trainer_file(job.node, "actor")
    lock.write_bytes(json_fields.encode(asdict(other) | {"claim": "other"}))
    with pytest.raises(LockedError):
        job.save(2)
    assert job.on_node() == [1]
    lock.unlink()


def test_a_file_where_the_folder_should_be(job: Job) -> None:
    job.node.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"File exists|Not a directory"):
        job.start()
    server_threads()
