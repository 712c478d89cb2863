"""Steps that have lost their optimizer, together with the fast tier, the remote store, parts and pins."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt import FastTier, SavedPart, pin
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.recover import recover
from mcore_ckpt.steps.listing import complete_steps
from mcore_ckpt.tools.examine.verify import verify
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import assert_loads, manager_of, position
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import poison, snapshot
from tests.distributed.training import build, parallel, train

DP2 = LAYOUTS["dp2-bf16"]


@pytest.mark.world(2)
@pytest.mark.parametrize("durable_every", [None, 1])
def test_each_place_keeps_what_it_has(durable_every: int | None, shared_path: Path) -> None:
    """Step 1 is pinned, step 4 the newest. The nodes have the last two steps, and the store has all."""
    root, store, node = shared_path / "root", shared_path / "store", shared_path / "node"
    options: dict[str, Any] = {"optimizer_for_last": 1, "remote": f"file://{store}"}
    if durable_every is not None:
        options["fast"] = FastTier(node, replicas=0, keep=2, durable_every=durable_every)
    with parallel(DP2):
        training, states, rank = build(DP2, seed=1), {}, dist.get_rank()
        loaded: list[tuple[int, dict[int, bytes]]] = []

        def load_part(part: SavedPart) -> None:
            loaded.append((part.step, {each: part.read(each) for each in part.ranks}))

        def manager_with_part(**config: Any) -> Any:
            manager = manager_of(training, root, **(options | config))
            manager.attach("prompts", save=lambda folder: b"step %d, rank %d" % (now[0], rank), load=load_part)
            return manager

        now = [0]
        manager = manager_with_part()
        for step in range(1, 5):
            train(training, step - 1, step)
            now[0] = step
            handle = manager.save(step, extra_state=position(step))
            handle.wait()
            manager.wait()
            states[step] = snapshot(training)
            if step == 1:
                on_rank_0(lambda: pin(root, 1))
        with everywhere():
            if rank == 0:  # which removes the optimizers
                there = {status.step: sorted(status.dropped) for status in complete_steps(root)}
                assert there == {1: [], 2: ["optimizer"], 3: ["optimizer"], 4: []}
                assert verify(root).is_sound
                assert len(list(store.glob("global_steps_*/actor/*/optim"))) == 4
        # From the nodes, the store and the root, wherever the step has its optimizer.
        for step in (4, 3, 2, 1):
            assert_loads(manager, training, states[step], step=step)
        manager.close()
        on_rank_0(lambda: [shutil.rmtree(each) for each in node.glob("global_steps_*")])
        on_rank_0(lambda: shutil.rmtree(root / "global_steps_4"))
        on_rank_0(lambda: [shutil.rmtree(each) for each in store.glob("global_steps_4")])
        manager = manager_with_part()
        poison(training)
        recovery = recover(manager)
        with everywhere():
            assert recovery.step == 3, "from the store, which has its optimizer"
            parts = {each: b"step 3, rank %d" % each for each in range(2)}
            assert loaded[-1] == (3, parts)
        manager.close()
        on_rank_0(lambda: shutil.rmtree(store))
        del options["remote"]
        manager = manager_with_part()
        assert recover(manager).step == 1
        for message in raised_everywhere(CheckpointMismatchError, error_of(lambda: manager.load(step=3))):
            assert "retention has removed its optimizer" in message
        manager.close()
        manager = manager_with_part(load_contents=("model", "extra"))
        assert recover(manager).step == 3
        with everywhere():
            assert loaded[-1] == (3, parts)
        manager.close()


def on_rank_0(work: Callable[[], object]) -> None:
    with everywhere():
        if dist.get_rank() == 0:
            work()
