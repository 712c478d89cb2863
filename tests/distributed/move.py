"""A checkpoint that moves between worlds of different sizes. Started by tests/test_other_world.py:

python move.py FOLDER STOPS

STOPS is JSON: for each stop its layout, what to do, where the checkpoint is, and where it goes. What to do is "train",
"load" or "resume". A sharding type behind it ("resume dp_reshardable") means that a torch_dist checkpoint goes along,
which Megatron writes itself. The ranks of each stop are forked from a process that has done nothing but imports: this
one, or, if the stop has a PYTHONPATH as its fifth part, one that finds another version of megatron there.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed import forked_ranks
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import manager_of, save
from tests.distributed.foreign_checkpoints import save_torch_dist
from tests.distributed.global_state import assert_same_state, global_state, loss_and_norm
from tests.distributed.snapshot import poison
from tests.distributed.training import Layout, Training, build, parallel, train


def main(root: Path, what: str, source: str, target: str, layout: Layout) -> None:
    what, *sharding_types = what.split()
    with parallel(layout):
        training = build(layout, seed=1)
        if what == "train":
            train(training, 0, 2)
            keep(root / "state.pt", global_state(training))
            save(training, root / target, 2)
            for kind in sharding_types:
                save_torch_dist(training, root / target / kind, kind)
            keep(root / "next.pt", loss_and_norm(train(training, 2, 3)[0]))
        else:
            load(training, root / source, root / "state.pt")
            save(training, root / target, 2)
            for kind in sharding_types:
                load(training, root / source, root / "state.pt", root / source / kind)
                save_torch_dist(training, root / target / kind, kind)
            (step,) = train(training, 2, 3)
            found, wanted = torch.tensor(loss_and_norm(step)), torch.tensor(torch.load(root / "next.pt"))
            with everywhere():
                # Gradients are added in another order where there are more or fewer replicas.
                torch.testing.assert_close(found, wanted, rtol=0 if what == "resume" else 2e-5, atol=0)


def load(training: Training, source: Path, state: Path, path: Path | None = None) -> None:
    poison(training)
    manager = manager_of(training, source)
    manager.load(path=path)
    manager.close()
    found, wanted = global_state(training), torch.load(state)
    with everywhere():
        assert_same_state(found, wanted)


def keep(path: Path, value: object) -> None:
    if dist.get_rank() == 0:
        torch.save(value, path)


def go(folder: Path, layout: dict[str, Any], what: str, source: str, target: str) -> None:
    stop = partial(main, folder, what, source, target, Layout(**layout))
    codes = forked_ranks.run(layout["world"], lambda rank: stop(), sys.stdout)
    if any(codes):
        sys.exit(f"{what} {source} -> {target} in {layout}: the ranks have ended with {codes}")


def go_elsewhere(folder: Path, stop: list[Any], path: str) -> None:
    command = [sys.executable, __file__, str(folder), json.dumps([stop])]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path})
    if done.returncode != 0:
        sys.exit(f"{stop} with {path} has ended with {done.returncode}")


if __name__ == "__main__":
    for layout, what, source, target, *path in json.loads(sys.argv[2]):
        if path:
            go_elsewhere(Path(sys.argv[1]), [layout, what, source, target], *path)
        else:
            go(Path(sys.argv[1]), layout, what, source, target)
