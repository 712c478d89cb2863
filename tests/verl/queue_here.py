"""Runs verl's TransferQueue (the real package) in this process alone.

Stood in for are ray's processes: the controller and the storage units are objects of this process. All else is the
package's own: the client, the controller and the storage units talk over ZeroMQ, and write and read their files.
"""

from types import SimpleNamespace
from typing import Any

import ray
import transfer_queue
from omegaconf import OmegaConf
from transfer_queue import interface
from transfer_queue.storage.bootstrap import simple_storage_bootstrap


class _Handle:
    """What ray returns for an actor: each method has a `remote`, whose result `ray.get` takes."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


class _ActorClass:
    def __init__(self, cls: type) -> None:
        self._cls = cls

    def options(self, **where: Any) -> "_ActorClass":
        return self

    def remote(self, **arguments: Any) -> _Handle:
        return _Handle(self._cls(**arguments))


def _no_actor(*name: Any, **where: Any) -> Any:
    raise ValueError("there is no such actor yet")


def start() -> None:
    """Begins with an empty queue. Call it in a process that is not forked any more, because it has threads."""
    ray.get, ray.kill, ray.get_actor = lambda found, timeout=None: found, lambda actor: None, _no_actor
    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    ray.get_runtime_context = lambda: SimpleNamespace(get_actor_id=lambda: None, get_task_id=lambda: None)
    interface.TransferQueueController = _ActorClass(interface.TransferQueueController)
    simple_storage_bootstrap.SimpleStorageUnit = _ActorClass(simple_storage_bootstrap.SimpleStorageUnit)
    simple_storage_bootstrap.get_node_round_robin_scheduling_strategies = lambda count, **more: (
        [SimpleNamespace(node_id="here")] * count
    )
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
