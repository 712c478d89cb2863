"""Copies of files on other nodes: three nodes on a thread each, with folders and servers of their own."""

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, encode_manifest
from mcore_ckpt.checkpoint.placement import Placement
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.config import FastTier
from mcore_ckpt.fast import copies as copies_module
from mcore_ckpt.fast.copies import Copies, CopyHandle, _RateLimit
from mcore_ckpt.fast.peer_server import PeerServer
from mcore_ckpt.fast.peer_store import PeerStore
from mcore_ckpt.fast.tcp_transport import TcpTransport
from mcore_ckpt.fast.tier import NodeTier
from mcore_ckpt.io import files, tuning
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.ranks.node_map import Node, NodeMap
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.steps.node_steps import files_here
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.transaction import Attempt
from tests.support import small_model
from tests.support.rank_threads import on_threads
from tests.support.waiting import LONG_S, wait_for

STEP, NODES = small_model.STEP, 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three ranks, which are on three nodes."""
    return small_model.make(tmp_path_factory.mktemp("whole"), small_model.tensors_of(), tp=1)


class Job:
    """Three nodes that have saved a step. Each one's files are to be copied to the next one."""

    def __init__(self, root: Path, whole: Path, stack: ExitStack, timeout_s: float = LONG_S, **fast: int) -> None:
        self.whole, self.root = whole, root
        manifest = read_manifest(whole)
        self.owner = [position % NODES for position in range(len(manifest.files))]
        by_file = tuple((node, (node + 1) % NODES) for node in self.owner)
        placement = Placement(tuple(f"n{n}" for n in range(NODES)), by_file)
        self.manifest = replace(manifest, placement=placement)
        store = dist.HashStore()  # type: ignore[attr-defined]
        folders = [root / str(node) for node in range(NODES)]
        for folder in folders:
            folder.mkdir(parents=True)
        self.servers = [stack.enter_context(closing(PeerServer(folder, b"secret", "127.0.0.1"))) for folder in folders]
        nodes = NodeMap(tuple(Node(f"n{n}", f"n{n}", (n,), self.servers[n].address) for n in range(NODES)))
        self.tiers = [
            NodeTier(
                FastTier(folders[n], replicas=1, **fast),
                "actor",
                nodes,
                n,
                n,
                folders[n],
                TcpTransport(b"secret", LONG_S),
                self.servers[n],
                TrainerLock(folders[n], "actor"),
            )
            for n in range(NODES)
        ]
        self.copies = [
            stack.enter_context(closing(Copies(Agreement(store, n, NODES, "copies", timeout_s), self.tiers[n])))
            for n in range(NODES)
        ]

    def place(self, node: int, step: int = STEP) -> Path:
        return self.tiers[node].role_dir(step)

    def commit(self, step: int = STEP, attempt: str | None = None) -> Manifest:
        """Each node has its own files and the manifest."""
        manifest = replace(self.manifest, step=step, attempt=attempt or self.manifest.attempt)
        for node in range(NODES):
            place = self.place(node, step)
            for position, file in enumerate(manifest.files):
                if self.owner[position] == node:
                    (place / file.path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(self.whole / file.path, place / file.path)
            (place / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
        return manifest

    def add(self, node: int, manifest: Manifest) -> CopyHandle:
        place = self.place(node, manifest.step)
        attempt = Attempt(manifest.attempt, file_names.staging_dir(place, manifest.attempt), place)
        return self.copies[node].add(manifest.step, attempt)

    def copy(self, manifest: Manifest) -> list[str | None]:
        """Copies a step on all nodes, and returns the problem that each has been told."""
        handles = [self.add(node, manifest) for node in range(NODES)]
        return [handle.wait(LONG_S) for handle in handles]

    def wait_until_fetching(self, step: int) -> None:
        """Waits until each node has begun with a file."""
        for node in range(NODES):
            wait_for(lambda node=node: list(self.place(node, step).rglob("*.partial")))

    def wanted(self, node: int) -> list[int]:
        assert self.manifest.placement is not None
        return self.manifest.placement.files_on(node)

    def assert_has(self, node: int, positions: list[int], step: int = STEP) -> None:
        place = self.place(node, step)
        assert files_here(place, self.manifest) == positions
        for position in positions:
            path = self.manifest.files[position].path
            assert (place / path).read_bytes() == (self.whole / path).read_bytes()
        assert not list(place.rglob("*.partial"))


Make = Callable[..., Job]


@pytest.fixture
def make(tmp_path: Path, whole: Path) -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda **choices: Job(tmp_path, whole, stack, **choices)


@pytest.fixture
def job(make: Make) -> Job:
    return make()


def test_files_of_parts_may_have_any_names(tmp_path: Path, whole: Path) -> None:
    """The longest name there is, and names that look as if they were of copies that are under way."""
    place = shutil.copytree(whole, tmp_path / "whole" / whole.name)
    manifest = read_manifest(place)
    paths = [f"{file_names.part_dir('p', 0)}/{name}" for name in ("x", ".x.partial", "y" * 255, ".copy-0.partial")]
    records = []
    for path in paths:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(path.encode())
        records.append(FileRecord(path, "part", 0, len(path), crc32(path.encode())))
    parts = replace(manifest, files=(*manifest.files, *records), parts={"p": [(0, 0)]})
    (place / file_names.MANIFEST_FILE).write_bytes(encode_manifest(parts))
    with ExitStack() as stack:
        job = Job(tmp_path / "nodes", place, stack)
        assert job.copy(job.commit()) == [None] * NODES
        for node in range(NODES):
            there = job.place(node)
            assert files_here(there, job.manifest) == job.wanted(node)
            assert all((there / path).read_bytes() == path.encode() for path in paths if (there / path).exists())
            assert {path.name for path in there.rglob("*.partial")} <= {".x.partial", ".copy-0.partial"}
            assert not list(there.glob("*/.copy-*"))


def test_each_node_gets_what_it_should_have(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PEER_BYTES", 1000)  # several pieces of a file
    manifest = job.commit()
    assert job.copy(manifest) == [None] * NODES
    for node in range(NODES):
        job.assert_has(node, job.wanted(node))
        assert job.copies[node].is_complete(manifest.attempt)
        assert job.copies[node].needed() == set()


def test_the_names_of_copies_are_synced(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of files beside the manifest, too, such as common.pt. Else a power loss could undo the copies."""
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_dir", synced.append)
    monkeypatch.setattr(copies_module, "sync_dir", synced.append)
    assert job.copy(job.commit()) == [None] * NODES
    got = {
        job.place(n) / job.manifest.files[at].path for n in range(NODES) for at in job.wanted(n) if job.owner[at] != n
    }
    assert got
    assert {path.parent for path in got} | {job.place(n) for n in range(NODES)} <= set(synced)


def test_what_is_there_already_is_not_sent(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = job.commit()
    path = manifest.files[0].path
    (job.place(1) / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(job.whole / path, job.place(1) / path)
    asked: list[str] = []
    read_into = PeerStore.read_into

    def noting(self: PeerStore, key: str, start: int, memory: memoryview) -> None:
        asked.append(key)
        read_into(self, key, start, memory)

    monkeypatch.setattr(PeerStore, "read_into", noting)
    assert job.copy(manifest) == [None] * NODES
    job.assert_has(1, job.wanted(1))
    assert len(asked) == len(manifest.files) - 1
    assert not any(key.endswith(path) for key in asked)


@pytest.mark.parametrize("damage", ["rot", "missing", "cut"])
def test_a_file_that_its_node_cannot_send(job: Job, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """All other files arrive, nothing wrong does, and every rank is told the same."""
    manifest = job.commit()
    path = job.place(0) / manifest.files[0].path
    if damage == "rot":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "missing":
        path.unlink()
    else:
        os.truncate(path, 5)
    with caplog.at_level(logging.WARNING):
        problems = job.copy(manifest)
    assert len(set(problems)) == 1
    problem = str(problems[0])
    if damage == "rot":
        assert problem.startswith("n1 has got 1 of 2 files: ")
        assert problem.endswith("has a wrong CRC: its bytes are damaged")
    else:  # its own node notices, too, and asks the other one
        assert re.match(r"n[01] has got 1 of 2 files: .* \(and more on 1 other nodes\)$", problem)
    assert manifest.files[0].path in problem
    assert f"step {STEP} is on too few nodes: {problem}" in caplog.text
    job.assert_has(1, [position for position in job.wanted(1) if position != 0])
    job.assert_has(2, job.wanted(2))
    assert not any(copies.is_complete(manifest.attempt) for copies in job.copies)


def test_a_node_whose_server_is_gone(job: Job) -> None:
    manifest = job.commit()
    job.servers[0].close()
    problems = job.copy(manifest)
    assert len(set(problems)) == 1
    assert "n0: cannot be reached at 127.0.0.1" in str(problems[0])
    job.assert_has(2, job.wanted(2))
    job.assert_has(0, job.wanted(0))


def test_of_several_steps_the_newest_is_copied_next(job: Job) -> None:
    """All nodes copy the same steps, whenever they learn of them. A step that is passed over is said to be."""
    steps = [job.commit(step, f"{step:032x}") for step in (1, 2, 3)]
    with job.copies[0].paused(), job.copies[1].paused(), job.copies[2].paused():
        first = [job.add(node, steps[0]) for node in range(NODES)]
        job.wait_until_fetching(1)
        later = [[job.add(node, manifest) for manifest in steps[1:]] for node in range(NODES)]
        assert job.copies[1].needed() == {steps[0].attempt, steps[2].attempt}
        assert not any(handle.done for handle in first)
        with pytest.raises(TimeoutError, match="the copies of step 1 are still under way after 0 s"):
            first[0].wait(0)
        for step in (1, 3):
            with pytest.raises(TimeoutError, match=f"the copies of step {step} are still"):
                job.copies[0].wait(0, step=step)
        job.copies[0].wait(step=4)
    assert [handle.wait(LONG_S) for handle in first] == [None] * NODES
    for second, third in later:
        assert second.wait(LONG_S) == "a newer step was saved before the copies of this step could begin"
        assert third.wait(LONG_S) is None
        assert (second.complete, third.complete) == (False, True)
    for node in range(NODES):
        job.assert_has(node, job.wanted(node), step=3)
        assert files_here(job.place(node, 2), job.manifest) == [n for n, owner in enumerate(job.owner) if owner == node]


def test_a_node_that_does_not_know_of_a_commit_gets_the_copies_of_the_next_step(make: Make) -> None:
    """Its save has failed, although rank 0 has committed it. From then on, it is one step behind the others."""
    job = make(timeout_s=0.4)
    first, second = (job.commit(step, f"{step:032x}") for step in (1, 2))
    alone = [job.add(node, first) for node in (0, 2)]
    assert all("no word from rank 1" in str(handle.wait(LONG_S)) for handle in alone)
    assert job.copy(second) == [None] * NODES
    job.assert_has(1, job.wanted(1), step=2)


def test_a_step_is_passed_over_if_any_node_knows_a_newer_one(job: Job) -> None:
    """Such a node may have deleted the step already."""
    first, second = (job.commit(step, f"{step:032x}") for step in (1, 2))
    handles = [job.add(node, first) for node in (0, 1)]
    may_begin = threading.Event()
    job.copies[2]._worker.add(partial(may_begin.wait, LONG_S))
    handles.append(job.add(2, first))
    newest = job.add(2, second)
    may_begin.set()
    assert [handle.wait(LONG_S) for handle in handles] == [
        "a newer step was saved before the copies of this step could begin"
    ] * 3
    assert [handle.wait(LONG_S) for handle in (job.add(0, second), job.add(1, second), newest)] == [None] * NODES


def test_a_rank_without_a_thread_is_told_so_and_tries_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = job.commit()

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        assert job.add(1, manifest).wait(LONG_S) == "the system allows no more threads on this rank"
    assert job.copies[1].needed() == set()
    assert job.copy(manifest) == [None] * NODES


def test_a_rate_that_is_too_low_ends_by_the_deadline(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one byte a second it would take an hour. The copies are given up, and nothing hangs."""
    monkeypatch.setattr(tuning, "PEER_BYTES", 1000)
    job = make(timeout_s=0.8, bytes_per_s=1)
    problems = job.copy(job.commit())
    assert "the copies took too long: allow more bytes_per_s" in str(problems[0])


def test_a_rate_limits_all_threads_together(make: Make) -> None:
    """By what they have to wait for, not by how long they have waited."""
    job = make(bytes_per_s=1000)
    limit = job.copies[0]._limit
    waits = list(on_threads({n: lambda: limit.take(500) for n in range(4)}).values())
    assert sorted(round(wait, 1) for wait in waits) == [0.0, 0.5, 1.0, 1.5]
    assert _RateLimit(None).take(1 << 40) == 0.0


def test_closing_gives_up_what_is_under_way(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PEER_BYTES", 1000)
    job = make(bytes_per_s=1)
    manifest = job.commit()
    handles = [job.add(node, manifest) for node in range(NODES)]
    job.wait_until_fetching(STEP)
    later = job.commit(6, "b" * 32)
    waiting = [job.add(node, later) for node in range(NODES)]
    threads = [threading.Thread(target=copies.close) for copies in job.copies]
    for thread in threads:
        thread.start()
    assert "the manager was closed" in str(handles[0].wait(LONG_S))
    assert all(handle.wait(LONG_S) is not None for handle in (*handles, *waiting))
    for thread in threads:
        thread.join(LONG_S)
    assert not any(list(job.place(node).rglob("*.partial")) for node in range(NODES))


def test_a_step_deleted_meanwhile(job: Job) -> None:
    manifest = job.commit()
    with job.copies[0].paused(), job.copies[1].paused(), job.copies[2].paused():
        handles = [job.add(node, manifest) for node in range(NODES)]
        job.wait_until_fetching(STEP)
        for node in range(NODES):
            job.place(node).rename(job.place(node).with_name("aside"))  # as FastSaves.retire_old does
    assert all(handle.wait(LONG_S) is not None for handle in handles)
    assert not any(job.place(node).exists() for node in range(NODES))
