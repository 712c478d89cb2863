"""One stop of a checkpoint that moves between worlds of different sizes. Started by tests/test_other_world.py:

torchrun --nproc_per_node N move.py FOLDER {train|load|resume} FROM TO LAYOUT_AS_JSON
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from agreement import everywhere
from checkpointing import manager_of, save
from global_state import assert_same_state, global_state, loss_and_norm
from snapshot import poison
from training import Layout, Training, build, parallel, train


def main(root: Path, what: str, source: str, target: str, layout: Layout) -> None:
    dist.init_process_group("gloo")
    with parallel(layout):
        training = build(layout, seed=1)
        if what == "train":
            train(training, 0, 2)
            keep(root / "state.pt", global_state(training))
            save(training, root / target, 2)
            keep(root / "next.pt", loss_and_norm(train(training, 2, 3)[0]))
        else:
            load(training, root / source, root / "state.pt")
            save(training, root / target, 2)
            (step,) = train(training, 2, 3)
            found, wanted = torch.tensor(loss_and_norm(step)), torch.tensor(torch.load(root / "next.pt"))
            with everywhere():
                # Gradients are added in another order where there are more or fewer replicas.
                torch.testing.assert_close(found, wanted, rtol=0 if what == "resume" else 2e-5, atol=0)
    dist.destroy_process_group()


def load(training: Training, source: Path, state: Path) -> None:
    poison(training)
    manager = manager_of(training, source)
    manager.load()
    manager.close()
    found, wanted = global_state(training), torch.load(state)
    with everywhere():
        assert_same_state(found, wanted)


def keep(path: Path, value: object) -> None:
    if dist.get_rank() == 0:
        torch.save(value, path)


if __name__ == "__main__":
    folder, what, source, target, layout = sys.argv[1:]
    main(Path(folder), what, source, target, Layout(**json.loads(layout)))
