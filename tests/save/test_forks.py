"""A forked child ends, whatever the parent was doing, and takes nothing from it."""

import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import InvalidStateError
from mcore_ckpt.events import Committed, Event
from mcore_ckpt.fast.peer_server import PeerServer
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.steps import trainer_lock
from mcore_ckpt.steps.read_lock import reading, unread
from mcore_ckpt.steps.trainer_lock import TrainerLock
from tests.support.forked_children import ALARM_S, ends_normally
from tests.support.unsharded_model import Model
from tests.support.waiting import join_threads, wait_for


def config(**more: Any) -> CheckpointConfig:
    return CheckpointConfig(save_contents=("model",), load_contents=("model",), timeout_s=20, **more)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    manager = CheckpointManager(
        tmp_path / "root", Model(), config=config(async_save=True, remote=f"file://{tmp_path / 'store'}")
    )
    manager.save(1).wait()
    yield manager
    manager.close()


LOCKS: dict[str, Callable[[CheckpointManager], Any]] = {
    "saves": lambda manager: manager._background._save._lock,
    "deletions": lambda manager: manager._background._deletions._lock,
    "listeners": lambda manager: manager._delivery._changed,
    "uploads": lambda manager: manager._context.uploads._lock,  # type: ignore[union-attr]
    "trainer lock": lambda manager: trainer_lock._mutex,
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_child_ends_although_a_lock_was_held_when_it_was_forked(manager: CheckpointManager, name: str) -> None:
    with LOCKS[name](manager):
        assert ends_normally()


def test_a_child_ends_beside_a_save_that_does_not(tmp_path: Path) -> None:
    """Of the threads of the save it has none, so it must not wait for them, or for their disk."""
    may_commit, is_committing = threading.Event(), threading.Event()
    manager = CheckpointManager(tmp_path, Model(), config=config(async_save=True))

    def keep_lock() -> None:
        is_committing.set()
        may_commit.wait()

    manager._context.lock.take = lambda patience_s: keep_lock()  # type: ignore[method-assign]
    manager._destination.prepare = lambda saving, need: None  # type: ignore[method-assign]
    handle = manager.save(1)
    is_committing.wait()

    def wait() -> None:
        with pytest.raises(InvalidStateError, match="this SaveHandle belongs to process"):
            handle.wait()

    assert ends_normally()
    assert ends_normally(wait)
    may_commit.set()
    handle.wait()
    assert ends_normally(handle.wait)  # what has ended can be asked for anywhere
    manager.close()


CALLS: dict[str, Callable[[CheckpointManager], object]] = {
    "save": lambda manager: manager.save(2),
    "load": lambda manager: manager.load(),
    "agree": lambda manager: manager.agree("something", {}, dict),
    "wait": lambda manager: manager.wait(),
    "latest_step": lambda manager: manager.latest_step(),
    "remote_steps": lambda manager: manager.remote_steps(None, required=False),
    "fast_steps_found": lambda manager: manager.fast_steps_found(["actor"], None),
    "before_step": lambda manager: manager.before_step(),
}


def test_a_manager_is_refused_in_a_child_and_goes_on_in_the_parent(manager: CheckpointManager) -> None:
    def use() -> None:
        for call in CALLS.values():
            with pytest.raises(InvalidStateError, match="this CheckpointManager of actor belongs to process"):
                call(manager)
        with pytest.raises(InvalidStateError, match="this Agreement belongs to process"):
            agreement.begin("something")
        manager.close()

    agreement = Agreement(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0, 2, "test", 1.0)  # type: ignore[attr-defined]
    lock = file_names.trainer_file(manager.root.resolve(), "actor")
    keys, claim = manager._trainer.agreement._store.num_keys(), lock.read_bytes()
    assert ends_normally(use)
    assert manager._trainer.agreement._store.num_keys() == keys
    assert lock.read_bytes() == claim
    manager.save(2).wait()
    assert manager.load().step == 2


def test_the_locks_of_the_process_are_free_in_a_child(tmp_path: Path) -> None:
    def take() -> None:
        lock = TrainerLock(tmp_path, "actor")
        lock.take(patience_s=0)
        lock.release()

    with trainer_lock._mutex:
        assert ends_normally(take)


def test_a_child_that_drops_a_read_lock_leaves_it_to_the_parent(manager: CheckpointManager) -> None:
    role_dir = manager.root / "global_steps_1" / "actor"
    with ExitStack() as held:
        held.enter_context(reading([role_dir]))
        assert ends_normally(held.close)
        with unread([role_dir]) as is_free:
            assert not is_free


def connects(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=20).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_child_leaves_the_port_to_the_parent(tmp_path: Path) -> None:
    server = PeerServer(tmp_path, b"secret", "127.0.0.1")
    descriptor = server._socket.fileno()

    def look() -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        server.close()

    with server._lock:
        assert ends_normally(look)
    assert connects(server.address)
    server.close()
    assert not connects(server.address)


def test_a_child_of_a_listener_ends_with_the_call(tmp_path: Path) -> None:
    ends: list[int] = []

    def listener(event: Event) -> None:
        if not isinstance(event, Committed):
            return
        pid = os.fork()
        if pid == 0:
            signal.alarm(ALARM_S)  # Python sets no handler of its own for it
            raise SystemExit
        ends.append(os.waitpid(pid, 0)[1])

    manager = CheckpointManager(tmp_path, Model(), config=config(listeners=[listener]))
    manager.save(1)
    manager.close()
    assert ends == [0]


def test_a_dropped_manager_serves_no_longer(tmp_path: Path) -> None:
    fast = FastTier(tmp_path / "node", replicas=0, durable_every=1)
    managers = [CheckpointManager(tmp_path / "root", Model(), config=config(fast=fast, async_save=True))]
    tier = managers[0]._tier  # type: ignore[union-attr]
    handle = managers[0].save(1)
    handle.wait()
    assert handle.drain is not None
    handle.drain.wait()
    locks = [file_names.trainer_file((tmp_path / folder).resolve(), "actor") for folder in ("root", "node")]
    assert ends_normally(managers.clear)  # the child drops its copy, and nothing of the parent's
    assert connects(tier.server.address)  # type: ignore[union-attr]
    assert all(lock.exists() for lock in locks)
    managers.clear()
    wait_for(lambda: gc.collect() >= 0 and not any(lock.exists() for lock in locks))
    assert not connects(tier.server.address)  # type: ignore[union-attr]
    join_threads("mcore_ckpt peer server")


def test_a_dropped_manager_first_ends_its_save(tmp_path: Path) -> None:
    may_write = threading.Event()
    fast = FastTier(tmp_path / "node", replicas=0, durable_every=None)
    manager = CheckpointManager(tmp_path / "root", Model(), config=config(fast=fast, async_save=True))
    tier = manager._tier  # type: ignore[union-attr]
    publish = tier.publish

    def publish_late(attempt: str, manifest: bytes) -> None:
        may_write.wait()
        publish(attempt, manifest)

    tier.publish = publish_late  # type: ignore[method-assign]
    handle = manager.save(1)
    del manager
    gc.collect()
    assert connects(tier.server.address)  # type: ignore[union-attr]
    may_write.set()
    handle.wait()
    wait_for(lambda: gc.collect() >= 0 and not connects(tier.server.address))  # type: ignore[union-attr]
