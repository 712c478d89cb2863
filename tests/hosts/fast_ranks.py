"""One rank's part of test_lost_hosts.py: saves into the fast tier until it is killed, or recovers and goes on."""

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt import FastTier, SavedPart
from mcore_ckpt.recover import recover
from tests.distributed.agreement import gather
from tests.distributed.checkpointing import manager_of, position
from tests.distributed.global_state import global_state
from tests.distributed.snapshot import poison
from tests.distributed.training import Layout, Training, build, parallel, train

SIZES: dict[str, Any] = {"padded_vocab": 144, "global_batch": 16, "dropout": 0.0}
# How many steps a recovered training goes on, and the one that it is compared with.
MORE = 2


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    layout = Layout(dist.get_world_size(), **arguments["layout"], **SIZES)
    with parallel(layout):
        return {"save": _save, "recover": _recover}[arguments["do"]](layout, arguments)


def _manager(training: Training, arguments: dict[str, Any]) -> Any:
    fast = FastTier(f"{arguments['folder']}/run", **arguments["fast"])
    return manager_of(training, Path(arguments["root"]), async_save=True, fast=fast)


def _save(layout: Layout, arguments: dict[str, Any]) -> dict[str, Any]:
    """Saves each step; leaves a note of the last one and of what comes after it; then all processes die at once."""
    training = build(layout, seed=1)
    manager = _manager(training, arguments)
    steps = arguments["steps"]
    states, step = {}, 0
    manager.attach("prompts", save=lambda folder: _write_prompts(folder, step))
    for step in range(1, steps + 1):
        train(training, step - 1, step)
        states[step] = digest(training)
        handle = manager.save(step, extra_state=position(step))
        handle.wait()
        assert handle.copies.wait(30) is None
        if handle.drain is not None:
            handle.drain.wait(30)
    losses = losses_of(training, steps)
    note = {"states": states, "losses": losses}
    if dist.get_rank() == 0:
        Path(arguments["root"], "note.json").write_text(json.dumps(note))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _recover(layout: Layout, arguments: dict[str, Any]) -> dict[str, Any]:
    training = build(layout, seed=2)
    train(training, 0, 1)
    poison(training)
    manager, prompts = _manager(training, arguments), {}
    manager.attach("prompts", load=lambda part: prompts.update(_read_prompts(part)))
    recovery = recover(manager)
    found = {
        "step": recovery.step,
        "state": digest(training),
        "skipped": recovery.skipped,
        "path": str(recovery.results["actor"].report.path),
        "seen": recovery.results["actor"].extra_state["seen"].tolist(),
        "losses": losses_of(training, recovery.step),
        "prompts": prompts,
    }
    manager.close()
    return found


def _write_prompts(folder: Path, step: int) -> None:
    """A part of each rank. That of rank 1 has no files."""
    rank = dist.get_rank()
    if rank != 1:
        (folder / "open").mkdir()
        (folder / "open" / "prompts").write_bytes(_prompts(step, rank).encode() * 1000)
        (folder / "count").write_text(str(step))


def _prompts(step: int, rank: int) -> str:
    return f"step {step}, rank {rank}; "


def _read_prompts(part: SavedPart) -> dict[int, str]:
    """Reads the parts of all ranks that saved the step, on each rank. Returns the prompt of each."""
    found = {}
    for rank in part.ranks:
        folder = part.folder(rank)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        if files:
            assert files == ["count", "open/prompts"], files
            data = (folder / "open" / "prompts").read_bytes()
            assert data == _prompts(part.step, rank).encode() * 1000
            assert (folder / "count").read_text() == str(part.step)
        found[rank] = _prompts(part.step, rank) if files else ""
    return found


def digest(training: Training) -> str:
    """A digest of the whole training state, the same under every layout."""
    state = global_state(training)
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + state[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def losses_of(training: Training, step: int) -> list[str]:
    """What the next steps show on the ranks that compute losses, exactly."""
    by_rank = gather([repr(each) for each in train(training, step, step + MORE)])
    return sorted({text for texts in by_rank for text in texts if "losses=()" not in text})
