"""Run with recorder.c loaded: two ranks of a training save, save again, delete and pin below FOLDER.

`recorded_saves.py FOLDER`. It marks in the recording what the trainer was told: `begun` before a save,
with its step; `acked` when it is committed, with its attempt and the steps that must be there from then on.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import sync_dir, write_file
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.pins import pin, unpin
from mcore_ckpt.steps.retention import PreservationPolicy
from mcore_ckpt.tools.maintain.prune import prune
from tests.distributed import forked_ranks
from tests.distributed.training import Layout, build, parallel, train
from tests.faults.power.recording import mark, name_syncs
from tests.support.step_parts import PartsOfStep

WORLD = 2
HIDDEN = 8
ROOT = "runs/gpt/checkpoints"


class Saver:
    """Trains a step and saves it, and marks what the trainer is told."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.root = folder / ROOT
        self.training = build(Layout(WORLD, hidden_size=HIDDEN, precision="bf16"), seed=1)
        config = CheckpointConfig(max_to_keep=keep, timeout_s=60.0)
        self.manager = CheckpointManager(
            self.root, self.training.model, self.training.optimizer, self.training.scheduler, config=config
        )
        self.trained = 0
        self.parts = PartsOfStep(self.manager, dist.get_rank(), folder / "work", repeats=10)

    def save(self, step: int, keeps: list[int]) -> None:
        train(self.training, self.trained, self.trained + 1)
        self.trained += 1
        self.parts.step = self.trained
        dist.barrier()
        mark(begun=step)
        self.manager.save(step, extra_state={"trained": self.trained}).wait()
        mark(acked=step, attempt=read_manifest(self.role_dir(step)).attempt, keeps=keeps)
        self.manager.wait()
        dist.barrier()

    def role_dir(self, step: int) -> Path:
        return file_names.step_dir(self.root, step) / "actor"


def write_in_folder(folder: Path) -> None:
    """Makes a folder with a file, durably. No link can be made to it."""
    folder.mkdir()
    write_file(folder / "x", [b"x"])
    sync_dir(folder)
    sync_dir(folder.parent)


def run_rank(rank: int, folder: Path) -> None:
    tuning.SHARE_BYTES = tuning.WRITE_BYTES = 4096
    name_syncs()
    with parallel(Layout(WORLD, hidden_size=HIDDEN, precision="bf16")):
        saver = Saver(folder, keep=2)
        saver.save(1, [1])
        saver.save(2, [1, 2])
        saver.save(2, [1, 2])
        saver.save(3, [2, 3])
        if rank == 0:
            # As a trainer that writes its data position beside the checkpoint.
            data = saver.role_dir(3) / "data.pt"
            write_file(data, [b"a trainer's own file"])
            sync_dir(data.parent)
            mark(foreign=[data.name])
        dist.barrier()
        saver.save(3, [2, 3])
        if rank == 0:
            write_in_folder(data.parent / "folder")
            mark(foreign=[data.name, "folder/x"])
        commit._exchange = lambda first, second: False
        dist.barrier()
        saver.save(3, [2, 3])
        if rank == 0:
            mark(pinning=[2])
            pin(saver.root, 2)
            mark(pinned=[2])
        dist.barrier()
        saver.save(4, [2, 3, 4])
        saver.save(5, [2, 4, 5])
        if rank == 0:
            prune(saver.root, PreservationPolicy(optimizer_for_last=1))  # step 4 loses its optimizer
            mark(foreign=[], pinning=[2])
            unpin(saver.root, 2)
            mark(pinned=[], keeps=[5])
            prune(saver.root, PreservationPolicy(max_to_keep=1))
        dist.barrier()
        saver.manager.close()


def main() -> None:
    folder = Path(sys.argv[1])
    log = folder.with_name("ranks.log")
    codes = forked_ranks.run(WORLD, lambda rank: run_rank(rank, folder), log)
    sys.stdout.write(log.read_text())
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
