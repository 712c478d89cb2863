"""Ends trainings in every way: after close, without it, and with a device that never answers."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_checks.child import AT_ONCE
from gpu_checks.needs import need_gpus, need_module
from gpu_checks.outcome import Failed
from gpu_checks.ranks import join, on_ranks, process_group

LIMIT_S = 300.0
GIGABYTES = 0.5
STEP = 7
# What a rank of the stuck case waits for others, and how long wait and close may take altogether.
TIMEOUT_S = 10.0
DEADLINE_S = 60.0
# How long a process beside such a kernel gets to end, its start included. Where none can, the check waits this long.
CONTROL_S = 60.0
# A stuck kernel spins for this many of the GPU's cycles, some minutes: longer than any call may take, but not for ever,
# because on some machines not even a killed process ends before the kernel does.
CYCLES = 4 * 10**11


# -- ordinary endings -------------------------------------------------------------------------------------


def endings() -> str:
    """Closes, frees and exits; exits without close. The process ends with 0, and the step is there."""
    need_gpus()
    need_module("megatron.core", "megatron-core")
    failed = []
    for mode in ("lazy", "snapshot"):
        for ending in ("closed", "left_open"):
            root = tempfile.mkdtemp(prefix=f"saved-{mode}-{ending}-")
            try:
                on_ranks(f"gpu_checks.endings:{ending}", mode, root, limit_s=LIMIT_S)
                _check_step(Path(root))
            except Failed as failure:
                failed.append(f"{mode}, {ending.replace('_', ' ')}: {failure}")
    if failed:
        raise Failed("; ".join(failed))
    return "lazy and snapshot: exit after close and free, and without close; each time the step was committed"


def _check_step(root: Path) -> None:
    tracker = root / "latest_checkpointed_iteration.txt"
    found = tracker.read_text().strip() if tracker.exists() else "nothing"
    if found != str(STEP):
        raise Failed(f"step {STEP} was saved, but the tracker names {found}")


def closed(mode: str, root: str) -> None:
    """Saves and closes, frees the tensors, and uses their memory anew."""
    import torch

    from gpu_checks import trainer

    with process_group():
        state = trainer.build(trainer.shape(trainer.fitting(GIGABYTES)))
        manager = trainer.open_manager(Path(root), state, async_mode=mode)
        manager.save(STEP).wait()
        manager.close()
        trainer.free(state)
        torch.cuda.empty_cache()
        torch.full((1 << 20,), 1.0, device="cuda").sum().item()
        torch.cuda.synchronize()


def left_open(mode: str, root: str) -> None:
    """Returns while a save is under way. The manager is not closed, and the process group is not destroyed."""
    from gpu_checks import trainer

    join()
    state = trainer.build(trainer.shape(trainer.fitting(GIGABYTES)))
    manager = trainer.open_manager(Path(root), state, async_mode=mode)
    manager.save(STEP)
    _kept.append((manager, state))


_kept: list[Any] = []


# -- a device that never answers --------------------------------------------------------------------------


def stuck_device() -> str:
    """Saves behind a kernel that never ends, and behind a collective that another rank never joins.

    `wait` and `close` have to raise by a deadline, and the process has to end. Where even a process without this
    package does not end beside such a kernel, only `wait` and `close` are checked.
    """
    count = need_gpus()
    need_module("megatron.core", "megatron-core")
    exits = _process_ends()
    texts, failed = [], []
    for cause, world in (("kernel", 1), ("collective", 2)):
        if world > count:
            texts.append(f"{cause}: not possible with one GPU")
            continue
        for ending in ("wait", "close", "exit"):
            if ending == "exit" and not exits:
                texts.append("exit: not checked, because no process ends beside such a kernel here")
                continue
            more = {} if exits else {AT_ONCE: "1"}
            limit_s = LIMIT_S + DEADLINE_S
            try:
                found = on_ranks("gpu_checks.endings:stuck", cause, ending, world=world, limit_s=limit_s, more=more)
                texts.append(f"{cause}, {ending}: {found[0]}")
            except Failed as failure:
                failed.append(f"{cause}, {ending}: {failure}")
    if failed:
        raise Failed("; ".join(failed))
    return "; ".join(texts)


def _process_ends() -> bool:
    try:
        on_ranks("gpu_checks.endings:stuck_alone", limit_s=CONTROL_S)
    except Failed:
        return False
    return True


def stuck_alone() -> None:
    """The control: a process that exits while a kernel never ends, without this package."""
    join()
    _stick("kernel")


def stuck(cause: str, ending: str) -> str:
    """Saves behind work that never ends on rank 0, then waits and closes, or returns at once; or only closes.

    Args:
        cause: "kernel" or "collective".
        ending: "wait": call `wait` and `close`. "exit": do not. "close": call `close` without a save under way, which
            unpins memory, and perhaps the driver then waits for the GPU.
    """
    from gpu_checks import trainer

    join()
    state = trainer.build(trainer.shape(trainer.fitting(GIGABYTES)))
    manager = trainer.open_manager(trainer.shared_folder(), state, async_mode="lazy", timeout_s=TIMEOUT_S)
    manager.save(1).wait()
    _kept.append((manager, state))
    if os.environ["RANK"] == "0":
        _stick(cause)
    if ending == "close":
        closed_after, _ = _until_it_raises("close", manager.close)
        return f"{closed_after:.0f} s"
    print("save is called", flush=True)
    handle = manager.save(2)
    if ending == "exit":
        return "the process has ended"
    waited, error = _until_it_raises("wait", handle.wait)
    closed_after, _ = _until_it_raises("close", manager.close)
    return f"wait {waited:.0f} s, close {closed_after:.0f} s: {error}"


def _stick(cause: str) -> None:
    import torch
    import torch.distributed as dist

    if cause == "kernel":
        torch.cuda._sleep(CYCLES)
    else:
        dist.all_reduce(torch.ones(1, device="cuda"))  # the current stream waits for it, and the host does not


def _until_it_raises(name: str, call: Any) -> tuple[float, str]:
    """Calls what has to come back by the deadline. Returns after how many seconds, and the error's text."""
    from mcore_ckpt.errors import CheckpointError

    print(f"{name} is called", flush=True)  # the last words of a process that never comes back
    started = time.monotonic()
    error = ""
    try:
        call()
    except CheckpointError as raised:
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - started
    print(f"{name} came back after {seconds:.0f} s: {error}", flush=True)
    if name == "wait" and not error:
        raise Failed("a save behind work that never ends was committed")
    if seconds > DEADLINE_S:
        raise Failed(f"{name} came back after {seconds:.0f} s with timeout_s={TIMEOUT_S:g}: {error}")
    return seconds, error
