"""One rank's part of test_fast_refusals.py: it does the cases that it is told of, one after the other, in one job.

A case asks the test to do something to the hosts by a file in the shared folder (`Stage.ask`).
"""

import datetime
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.fast.peer_protocol import HEADER, HERE
from mcore_ckpt.fast.peer_server import PeerServer
from mcore_ckpt.io import tuning
from mcore_ckpt.recover import recover
from mcore_ckpt.save import new_manifest
from mcore_ckpt.save.background import SaveHandle
from tests.distributed.checkpointing import position
from tests.distributed.snapshot import poison
from tests.distributed.training import Layout, Training, build, parallel, train
from tests.hosts.fast_life import SIZES
from tests.hosts.fast_ranks import digest

TIMEOUT_S = 4.0
YEAR_S = 365 * 86400


class Stage:
    """What a case works with.

    Attributes:
        training: a training of one tensor-parallel part on each rank, so that each host has files of its own.
        case: the name of the case. It has folders of its own.
        is_full: whether to show a reason in all its forms.
    """

    def __init__(self, training: Training, arguments: dict[str, Any], case: str) -> None:
        self.training, self.case, self.is_full = training, case, arguments["full"]
        self._shared, self._folder = Path(arguments["shared"]), Path(arguments["folder"])

    def manager(self, **fast: Any) -> CheckpointManager:
        tier = FastTier(self._folder / self.case, **{"replicas": 1, "keep": 2, "durable_every": None, **fast})
        config = CheckpointConfig(timeout_s=TIMEOUT_S, async_save=True, fast=tier, if_failed="warn")
        training = self.training
        root = self._shared / self.case
        return CheckpointManager(root, training.model, training.optimizer, training.scheduler, config=config)

    def save(self, manager: CheckpointManager, step: int, note: bool = False) -> SaveHandle:
        """Trains and saves. With `note`, the test will know the digest of the state."""
        train(self.training, step - 1, step)
        if note:
            state = digest(self.training)
            if dist.get_rank() == 0:
                (self._shared / f"{self.case}.{step}").write_text(state)
        return manager.save(step, extra_state=position(step))

    def recovered(self, manager: CheckpointManager) -> dict[str, Any]:
        poison(self.training)
        found = recover(manager)
        state = digest(self.training)
        note = self._shared / f"{self.case}.{found.step}"
        return {
            "step": found.step,
            "is_exact": note.exists() and state == note.read_text(),
            "skipped": list(found.skipped),
        }

    def ask(self, action: str) -> None:
        """Has the test do something, and waits until it is done. Every rank calls it."""
        done = self._shared / f"{self.case}.done.{action}"
        if dist.get_rank() == 0:
            (self._shared / f"{self.case}.ask.{action}").touch()
        deadline = time.monotonic() + 30
        while not done.exists():
            assert time.monotonic() < deadline, f"nobody has done {action}"
            time.sleep(0.005)


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    layout = Layout(dist.get_world_size(), tp=dist.get_world_size(), **SIZES)
    found = {}
    with parallel(layout):
        training = build(layout, seed=1)
        for case in arguments["cases"]:
            found[case] = CASES[case](Stage(training, arguments, case))
            dist.barrier()
    if arguments["dies"]:
        Path(arguments["shared"], f"results.{dist.get_rank()}").write_text(json.dumps(found))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def error_of(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except CheckpointError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


# -- what a manager refuses -------------------------------------------------------------------------------------


def settings(stage: Stage) -> dict[str, Any]:
    rank = dist.get_rank()
    refused: dict[str, dict[str, Any]] = {
        "too many replicas": {"replicas": dist.get_world_size()},
        "one failure domain": {"domain": lambda: "rack 7"},
        "different settings": {"keep": 2 + rank},
        "no space": {},
    }
    stage.ask("fill")
    found: dict[str, Any] = {name: error_of(lambda of=fast: stage.manager(**of)) for name, fast in refused.items()}  # type: ignore[misc]
    stage.ask("empty")
    stage.manager().close()
    return found


def alone(stage: Stage) -> dict[str, Any]:
    return {"refused": error_of(stage.manager)}


# -- what happens in a save -------------------------------------------------------------------------------------


def full(stage: Stage) -> dict[str, Any]:
    """A folder becomes full in the middle of a run."""
    manager = stage.manager()
    first = stage.save(manager, 1, note=True)
    first.wait()
    assert first.copies is not None
    first.copies.wait(20)
    stage.ask("fill")
    failed = error_of(stage.save(manager, 2).wait)
    before = stage.recovered(manager)
    stage.ask("empty")
    third = stage.save(manager, 3, note=True)
    third.wait()
    assert third.copies is not None
    copies = third.copies.wait(20)
    after = stage.recovered(manager)
    manager.close()
    return {"failed": failed, "before": before, "copies": copies, "after": after}


def clock(stage: Stage) -> dict[str, Any]:
    """The clock of rank 0's host is wrong by a year, in one job, and of rank 1's in the next."""
    now, real = time.time, new_manifest.datetime
    found = []
    for wrong in (0, 1):
        if dist.get_rank() == wrong:
            time.time = lambda: now() - YEAR_S
            year_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=YEAR_S)
            new_manifest.datetime = SimpleNamespace(  # type: ignore[assignment]
                datetime=SimpleNamespace(now=lambda _, at=year_ago: at), UTC=datetime.UTC
            )
        manager = stage.manager(durable_every=2, keep=1)
        copies = []
        for step in range(2 * wrong + 1, 2 * wrong + 3):
            handle = stage.save(manager, step, note=True)
            handle.wait()
            assert handle.copies is not None
            copies.append(handle.copies.wait(20))
        assert handle.drain is not None
        handle.drain.wait(20)
        found.append({"copies": copies, **stage.recovered(manager)})
        manager.close()
        time.time, new_manifest.datetime = now, real
    return {"found": found}


def limited(stage: Stage) -> dict[str, Any]:
    """Copies take their time, at a limited rate, after the last save."""
    tuning.PEER_BYTES = 1 << 16
    PeerServer._obey = _late  # type: ignore[method-assign]
    found = _saves_beside_copies(stage, stage.manager(bytes_per_s=1 << 20))
    PeerServer._obey = _honest  # type: ignore[method-assign]
    return found


def slow(stage: Stage) -> dict[str, Any]:
    """Copies take their time, because a host answers only after the last save."""
    PeerServer._obey = _late  # type: ignore[method-assign]
    found = _saves_beside_copies(stage, stage.manager())
    PeerServer._obey = _honest  # type: ignore[method-assign]
    return found


def slow_link(stage: Stage) -> dict[str, Any]:
    """Copies, and all that ranks say to each other, wait for a slow link."""
    manager = stage.manager()
    stage.ask("slow")
    found = _saves_beside_copies(stage, manager)
    stage.ask("fast")
    return found


def _saves_beside_copies(stage: Stage, manager: CheckpointManager) -> dict[str, Any]:
    _saves_are_done.clear()
    first = stage.save(manager, 1)
    first.wait()
    handles = [first]
    for step in (2, 3):
        handles.append(manager.save(step))  # without training, which would wait for the link, too
        handles[-1].wait()
    assert first.copies is not None
    still_under_way = not first.copies.done
    started = time.monotonic()
    _saves_are_done.set()
    problems = [handle.copies and handle.copies.wait(20) for handle in handles]
    seconds = time.monotonic() - started
    manager.close()
    return {"under_way": still_under_way, "problems": problems, "seconds": seconds}


def silent(stage: Stage) -> dict[str, Any]:
    """A host is cut off while its files are copied, and comes back."""
    manager = stage.manager(bytes_per_s=1 << 18)
    tuning.PEER_BYTES = 1 << 14
    first = stage.save(manager, 1)
    first.wait()
    assert first.copies is not None
    stage.ask("cut")
    if dist.get_rank() == 0:  # the other one is told nothing until it can be reached again
        first.copies.wait(20)
    stage.ask("mend")
    problem = first.copies.wait(20)
    dist.barrier()
    second = stage.save(manager, 2)
    second.wait()
    assert second.copies is not None
    copies = second.copies.wait(20)
    manager.close()
    return {"problem": problem, "copies": copies}


def locked(stage: Stage) -> dict[str, Any]:
    """Another job saves into the folders."""
    manager = stage.manager()
    stage.save(manager, 1).wait()
    stage.ask("second")
    stage.save(manager, 2).wait()
    manager.wait()
    return {}


def second(stage: Stage) -> dict[str, Any]:
    """The other job, with the same folders: while the first lives, and after it has died."""
    stage.case = "locked"
    manager = stage.manager()
    return {"refused": error_of(lambda: manager.save(7).wait())}


def heir(stage: Stage) -> dict[str, Any]:
    stage.case = "locked"
    manager = stage.manager()
    found = stage.recovered(manager)
    found["saved"] = error_of(stage.save(manager, 3).wait)
    manager.close()
    return found


# -- bytes and words of other hosts -----------------------------------------------------------------------------


def saved(stage: Stage) -> dict[str, Any]:
    """Saves steps 1 and 2 for other cases. Both have their copies, and step 1 is also in the root."""
    manager = stage.manager(durable_every=1)
    for step in (1, 2):
        handle = stage.save(manager, step, note=True)
        handle.wait()
        assert handle.copies is not None
        handle.copies.wait(20)
        if step == 1:
            assert handle.drain is not None
            handle.drain.wait(20)
            manager.close()
            manager = stage.manager(durable_every=None)
    manager.close()
    return {}


def rotten(stage: Stage) -> dict[str, Any]:
    """The test has damaged what `rot` has saved."""
    stage.case = "rot"
    manager = stage.manager(durable_every=1)
    found = stage.recovered(manager)
    manager.close()
    return found


def nonsense(stage: Stage) -> dict[str, Any]:
    """The server of the last host sends nonsense: in a recovery of what only it has, and while copies are made."""
    saved(stage)
    stage.ask("strip")
    found: dict[str, Any] = {}
    for kind in NONSENSE if stage.is_full else ("other bytes",):
        if dist.get_rank() == dist.get_world_size() - 1:
            PeerServer._obey = NONSENSE[kind]  # type: ignore[assignment, method-assign]
        stage.case = "nonsense"
        manager = stage.manager(durable_every=1)
        loaded = stage.recovered(manager)
        manager.close()
        stage.case = f"nonsense {kind}"
        manager = stage.manager()
        first = stage.save(manager, 1)
        first.wait()
        assert first.copies is not None
        problem = first.copies.wait(20)
        PeerServer._obey = _honest  # type: ignore[method-assign]
        dist.barrier()
        second = stage.save(manager, 2, note=True)
        second.wait()
        assert second.copies is not None
        copies = second.copies.wait(20)
        found[kind] = {"loaded": loaded, "problem": problem, "copies": copies, "after": stage.recovered(manager)}
        manager.close()
    return found


_honest = PeerServer._obey
_saves_are_done = threading.Event()


def _late(self: PeerServer, client: Any, verb: str, path: str, request: dict[str, Any]) -> None:
    if path.endswith(".pt"):  # the commit of a save reads the other nodes' manifests
        _saves_are_done.wait(20)
    _honest(self, client, verb, path, request)


def _other_bytes(self: PeerServer, client: Any, verb: str, path: str, request: dict[str, Any]) -> None:
    if verb != "read":
        _honest(self, client, verb, path, request)
        return
    data = b"\x5a" * (request.get("stop", 5000) - request.get("start", 0))
    client.connection.sendall(HEADER.pack(HERE, len(data)) + data)


def _other_names(self: PeerServer, client: Any, verb: str, path: str, request: dict[str, Any]) -> None:
    if verb != "sizes":
        _honest(self, client, verb, "../" + path, request)
        return
    data = json.dumps({"../../etc/passwd": 7, "model": [], "rng_states": -3}).encode()
    client.connection.sendall(HEADER.pack(HERE, len(data)) + data)


def _huge_sizes(self: PeerServer, client: Any, verb: str, path: str, request: dict[str, Any]) -> None:
    client.connection.sendall(HEADER.pack(HERE, 1 << 62) + b"\0" * 1000)


def _unknown_status(self: PeerServer, client: Any, verb: str, path: str, request: dict[str, Any]) -> None:
    client.connection.sendall(HEADER.pack(77, 3) + b"\xff\xfe\n")


def _half(self: PeerServer, client: Any, verb: str, path: str, request: dict[str, Any]) -> None:
    client.connection.sendall(HEADER.pack(HERE, request.get("stop", 100) - request.get("start", 0)) + b"x")
    client.cut()


NONSENSE = {
    "other bytes": _other_bytes,
    "other names": _other_names,
    "huge sizes": _huge_sizes,
    "unknown status": _unknown_status,
    "half an answer": _half,
}

CASES: dict[str, Callable[[Stage], dict[str, Any]]] = {
    each.__name__: each
    for each in (settings, alone, full, clock, limited, slow, slow_link, silent, locked, second, heir, rotten, nonsense)
} | {"rot": saved}
