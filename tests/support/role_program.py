"""A program that saves one role of steps that others save other roles of, with a store of its own.

`run_together` starts several, which have nothing in common but the folder.
"""

import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.steps import leftovers
from tests.support.checkpoints import begin, delete_old, finish

DEADLINE_S = 60.0


def save_role(root: Path, role: str, steps: Sequence[int], roles: Sequence[str], keep: int | None) -> None:
    """What one training program does with its manager; the version saved is the step."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    agreement = Agreement(store, 0, 1, role, DEADLINE_S)
    leftovers.remove_leftovers(root, role, alone=True)
    for step in steps:
        attempt = begin(agreement, root, step, role=role)
        finish(agreement, attempt, root, step, step, roles)
        delete_old(root, step, keep)


def run_together(programs: Sequence[Callable[[], None]]) -> None:
    """Runs each in a process of its own; all begin at the same moment. Fails if one of them does."""
    ready, go = os.pipe()
    pids = []
    for program in programs:
        pid = os.fork()
        if pid == 0:
            os.close(go)
            os.read(ready, 1)  # ends when the parent closes its side
            try:
                program()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    os.close(go)
    os.close(ready)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert ends == [0] * len(programs)
