"""AReaL's trainer on every rank (its SPMD mode): units move to other layouts. Started by test_areal.py.

torchrun --nproc_per_node 2 several_ranks.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.integrations.areal import with_areal  # noqa: F401  AReaL can be imported after it

# isort: split
from areal.api import SaveLoadMeta
from areal.engine.megatron_utils.checkpointer import MegatronCheckpointManager
from megatron.core.dist_checkpointing.core import CheckpointingException

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, CommitError
from mcore_ckpt.steps import listing as steps
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.forked_ranks import run as run_forked
from tests.distributed.global_state import GlobalState, assert_same_state, global_state
from tests.distributed.training import Layout, parallel
from tests.distributed.training import train as train_model
from tests.integrations.areal.simulated import BareEngine, Engine, Trainer

SAME = {"padded_vocab": 144, "global_batch": 8, "dropout": 0.0, "num_layers": 2}
REPLICAS, SLICES = Layout(2, **SAME), Layout(2, tp=2, **SAME)


class BeginsAnew(Trainer):
    data_begins_anew = True


def trainer_of(root: Path, layout: Layout, seed: int, kind: type[Trainer] = Trainer) -> Trainer:
    engines = {role: Engine(layout, seed + number) for number, role in enumerate(("default", "critic"))}
    # Each rank has a clock of its own, and one decides.
    return kind(engines, root, {}, {"mode": "on", "freq_secs": 1e-9, "retries": 0})


def train(trainer: Trainer, folder: Path, first: int, last: int) -> None:
    for step in range(first, last):
        trainer.train_step(step)
    keep(folder, last - 1, trainer)
    trainer.close()


def keep(folder: Path, step: int, trainer: Trainer) -> None:
    state = {role: global_state(engine.training) for role, engine in trainer.engines.items()}
    keep_state(folder / f"state{step}.pt", state)


def keep_state(path: Path, state: dict[str, GlobalState]) -> None:
    if dist.get_rank() == 0:
        torch.save(state, path)


def resumed(folder: Path, layout: Layout, step: int) -> Trainer:
    """Under another data-parallel size: the position is refused, or the data begin anew, as the trainer says."""
    error = error_of(lambda: trainer_of(folder / "run", layout, seed=7))
    for message in raised_everywhere(CheckpointMismatchError, error):
        assert "saved by other data-parallel ranks" in message
        assert "data_begins_anew" in message
    trainer = trainer_of(folder / "run", layout, seed=7, kind=BeginsAnew)
    wanted = torch.load(folder / f"state{step}.pt")
    found = {role: global_state(engine.training) for role, engine in trainer.engines.items()}
    with everywhere():
        assert trainer.start_step == step + 1, trainer.start_step
        assert trainer.train_dataloader.position == 0
        for role, state in found.items():
            assert_same_state(state, wanted[role])
    return trainer


def damaged(folder: Path, layout: Layout) -> None:
    """One rank's data loader: all say so, and none goes on alone."""
    (root,) = (folder / "run").glob("checkpoints/*/exp/trial/recover_info")
    (status,) = steps.complete_steps(root)
    path = status.path / "recover_info" / "dataloader_info_00001_dp1_of2.pt"
    data = path.read_bytes()
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    dist.barrier()
    error = error_of(lambda: trainer_of(folder / "run", layout, seed=7))
    for message in raised_everywhere(CheckpointCorruptError, error):
        assert path.name in message
        assert "rank 1" in message, message
    if dist.get_rank() == 0:
        path.write_bytes(data)
    dist.barrier()


def unreadable(folder: Path, layout: Layout) -> None:
    """One rank's data loader says no word: all are told, and what was saved before stays."""
    trainer = trainer_of(folder / "run", layout, seed=7)
    before = trainer.start_step
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(trainer.train_dataloader, "state_dict", lost_worker)
        error = error_of(lambda: trainer.train_step(before))
    for message in raised_everywhere(CommitError, error):
        assert "rank 1: RuntimeError: a worker of the data loader has died" in message
    trainer.close()
    again = trainer_of(folder / "run", layout, seed=7)
    with everywhere():
        assert again.start_step == before
    again.close()


def lost_worker() -> None:
    raise RuntimeError("a worker of the data loader has died")


def save_as_areal(folder: Path, layout: Layout) -> None:
    """With AReaL's own checkpointer. Of the optimizer it fails with megatron-core 0.16.1."""
    engine = BareEngine(layout, seed=3)
    assert type(engine.checkpointer) is MegatronCheckpointManager
    train_model(engine.training, 0, 1)
    if dist.get_rank() == 0:
        (folder / "areal").mkdir()
    dist.barrier()
    with everywhere(), pytest.raises(CheckpointingException, match="flattened_range"):
        engine.save(SaveLoadMeta(path=str(folder / "areal"), weight_format="dcp", with_optim=True))
    engine.save(SaveLoadMeta(path=str(folder / "areal"), weight_format="dcp", with_optim=False))
    keep_state(folder / "areal.pt", {"default": global_state(engine.training)})


def load_from_areal(folder: Path, layout: Layout, with_rng: bool) -> None:
    engine = Engine(layout, seed=4)
    if with_rng:
        engine.load(SaveLoadMeta(path=str(folder / "areal"), weight_format="dcp", with_optim=False))
    else:  # megatron keeps random states for the ranks that there were
        engine.checkpointer.load_checkpoint(folder / "areal", with_optimizer=False, with_rng=False)
    wanted, found = torch.load(folder / "areal.pt")["default"], global_state(engine.training)
    engine.checkpointer.close()
    with everywhere():
        names = [name for name in wanted if "exp_avg" not in name and name != "step"]
        assert names
        assert_same_state({name: found[name] for name in names}, {name: wanted[name] for name in names})


def work(folder: Path) -> None:
    """What each rank does, in a process group of gloo."""
    with parallel(REPLICAS):
        train(trainer_of(folder / "run", REPLICAS, seed=1), folder, 0, 2)
        damaged(folder, REPLICAS)
        unreadable(folder, REPLICAS)
        save_as_areal(folder, REPLICAS)
        load_from_areal(folder, REPLICAS, with_rng=True)
    with parallel(SLICES):
        train(resumed(folder, SLICES, 1), folder, 2, 3)
        load_from_areal(folder, SLICES, with_rng=False)
    with parallel(REPLICAS):
        resumed(folder, REPLICAS, 2).close()
    dist.destroy_process_group()


@pytest.mark.shows("AReaL", "other layout")
@pytest.mark.full
def test_on_two_ranks(tmp_path: Path) -> None:
    """On forks of this process, which has imported AReaL. The full tier does it under torchrun, too."""
    log = tmp_path / "log"
    assert run_forked(2, lambda rank: work(tmp_path), log) == [0, 0], log.read_text()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    work(Path(sys.argv[1]))
